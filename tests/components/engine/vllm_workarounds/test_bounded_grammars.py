"""Grammars that do not end, compiled and asked for masks as an engine does, without one."""

from __future__ import annotations

import json
import random
import re
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
import llguidance
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind

from ridgeline.engine.vllm_workarounds import bounded_grammars
from ridgeline.engine.vllm_workarounds.bounded_grammars import Bounded, BoundedGuidance
from tests.support.patterns import PATTERNS

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")  # vLLM still gives it
TEXT = Path(__file__).parents[4] / "loadtest" / "data" / "opticks.txt"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer", "minimum": 1800, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
OLD_TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
NEW_TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
}
AMBIGUOUS = 'root ::= root root | "a" | "b" | ""'


def compiled(backend: BoundedGuidance, kind: Kind, spec: Any) -> Bounded:
    return Bounded(backend.compile_grammar(kind, spec if isinstance(spec, str) else json.dumps(spec), {0}))


def allowed(backend: BoundedGuidance, grammar: Any) -> list[int]:
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits[: backend.vocab_size])]


def written(backend: BoundedGuidance, grammar: Bounded, most: int) -> str:
    """What a model writes that takes any token that is allowed, and ends as late as it can."""
    dice, tokens = random.Random(1), list[int]()
    while len(tokens) < most and not grammar.is_terminated():
        choice = allowed(backend, grammar)
        token = dice.choice([token for token in choice if token != 0] or choice)
        if not grammar.accept_tokens("r", [token]):
            break
        tokens.append(token)
    return str(backend.tokenizer.decode([token for token in tokens if token]))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (Kind.REGEX, "((a{0,200}){0,200}){0,200}"),
        (Kind.REGEX, "((a{0,20}){0,20}){0,20}"),
        pytest.param(Kind.GRAMMAR, AMBIGUOUS, marks=pytest.mark.long),  # a minute; tests/engines asks engines for it
        (Kind.GRAMMAR, 'root ::= s\ns ::= s s s | s s | "a" | [a-z] | ""'),
        (Kind.JSON, {"type": "object", "properties": {f"x{number}": {"type": "string"} for number in range(1000)}}),
    ],
    ids=["regex", "short regex", "ambiguous", "more ambiguous", "properties"],
)
def test_a_grammar_without_end_ends_its_request_with_a_sentence(backend, kind, spec):
    grammar = compiled(backend, kind, spec)
    text = written(backend, grammar, 1000)
    assert grammar.why is not None
    assert grammar.why.startswith("structured output: this grammar")
    assert "\n" not in grammar.why
    assert not grammar.accept_tokens("r", [1])
    again = compiled(backend, kind, spec)
    assert written(backend, again, 1000) == text, "it ends at the same token, however busy the machine is"


@pytest.mark.parametrize(
    ("kind", "spec", "as_wanted"),
    [
        (Kind.JSON, SCHEMA, lambda text: json.loads(text)["name"] in ("Ada", "Grace")),
        (Kind.CHOICE, ["red", "green (or so)", "a.b"], lambda text: text in ["red", "green (or so)", "a.b"]),
        (Kind.CHOICE, [f"item {number}" for number in range(5000)], lambda text: re.fullmatch(r"item \d+", text)),
        (Kind.REGEX, "[a-d]{2,5}", lambda text: re.fullmatch("[a-d]{2,5}", text)),
        (Kind.GRAMMAR, 'root ::= "yes" | "no"', lambda text: text in ("yes", "no")),
        (Kind.STRUCTURAL_TAG, NEW_TAG, lambda text: json.loads(text[3:-4])["born"] > 1799),
    ],
    ids=["json", "choice", "many choices", "regex", "grammar", "new tag"],
)
def test_ordinary_grammars_hold_to_their_end(backend, kind, spec, as_wanted):
    grammar = compiled(backend, kind, spec)
    text = written(backend, grammar, 300)
    assert grammar.why is None
    assert as_wanted(text), text
    assert grammar.is_terminated()


def typed(backend: BoundedGuidance, grammar: Any, text: str) -> int:
    """How many tokens of a text are left when its grammar takes no more."""
    mask, tokens = backend.allocate_token_bitmask(1), backend.tokenizer.encode(text)
    for done, token in enumerate(tokens):
        grammar.fill_bitmask(mask, 0)
        if not grammar.accept_tokens("r", [token]):
            return len(tokens) - done
    return 0


def test_a_long_string_with_a_largest_length_is_written_to_its_end(backend):
    text = re.sub(r'["\\\s]+', " ", TEXT.read_text()[:40_000])[:30_000]
    grammar = backend.compile_grammar(Kind.JSON, json.dumps({"type": "string", "maxLength": 30_000}), {0})
    left = typed(backend, grammar, json.dumps(text, ensure_ascii=False))
    assert left == 0, grammar.ll_matcher.get_error()


LENIENT: dict[str, tuple[dict[str, Any], str]] = {
    "dict of named keys": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        '{"a":1}',
    ),
    "oneOf of overlapping types": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1.5"),
    "not": ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, '{"a":1}'),
    "if": ({"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, '{"c":1}'),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, '{"a":1,"b":2}'),
    "an unknown format": ({"type": "string", "format": "color"}, '"red"'),
}


@pytest.mark.parametrize("name", LENIENT)
def test_a_keyword_that_guidance_lacks_is_no_reason_to_refuse_a_schema(backend, name):
    schema, answer = LENIENT[name]
    bounded_grammars._validate(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))
    assert typed(backend, backend.compile_grammar(Kind.JSON, json.dumps(schema), {0}), answer) == 0


def test_a_schema_that_guidance_knows_allows_the_tokens_that_vllms_own_grammar_of_it_allows(backend, monkeypatch):
    monkeypatch.setattr(backend, "disable_any_whitespace", True)
    ours = backend.compile_grammar(Kind.JSON, json.dumps(SCHEMA), {0})
    theirs = GuidanceBackend.compile_grammar(backend, Kind.JSON, json.dumps(SCHEMA), {0})
    for token in backend.tokenizer.encode('{"name":"Ada","born":1815}'):
        assert allowed(backend, ours) == allowed(backend, theirs)
        assert ours.accept_tokens("r", [token])
        assert theirs.accept_tokens("r", [token])


@pytest.mark.parametrize("kind", [Kind.JSON, Kind.STRUCTURAL_TAG])
def test_a_json_answer_is_on_one_line_whatever_its_schema_says_of_blanks(backend, kind):
    loose = {"x-guidance": {"whitespace_flexible": True, "item_separator": "\\s*,\\s*"}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA | loose}}
    spec = json.dumps(tag if kind is Kind.STRUCTURAL_TAG else SCHEMA | loose)
    for answer, taken in {
        '{"name": "Ada", "born": 1815}': True,
        '{"name":"Ada","born":1815}': True,
        '{"name":  "Ada", "born": 1815}': False,
        '{"name": "Ada",\n "born": 1815}': False,
        '{ "name": "Ada", "born": 1815}': False,
    }.items():
        assert (typed(backend, backend.compile_grammar(kind, spec, {0}), answer) == 0) == taken, answer


def test_a_number_of_a_json_answer_ends_and_a_text_of_digits_does_not(backend):
    digit = backend.tokenizer.encode("7")[0]
    for kind, opening, ends in (("number", "1.", True), ("integer", "1", True), ("string", '"', False)):
        grammar = Bounded(backend.compile_grammar(Kind.JSON, json.dumps({"type": kind}), {0}), backend.digits)
        grammar.accept_tokens("r", backend.tokenizer.encode(opening))
        for _ in range(2):  # the second time after the first was taken back, as with speculation
            written = next((count for count in range(60) if not takes_next(backend, grammar, digit)), 60)
            assert (written < 60) == ends, kind
            assert not ends or allowed(backend, grammar), "something else is left"
            grammar.rollback(written)


def takes_next(backend: BoundedGuidance, grammar: Bounded, token: int) -> bool:
    return token in allowed(backend, grammar) and grammar.accept_tokens("r", [token])


def test_text_around_old_structural_tags_is_free(backend):
    grammar = compiled(backend, Kind.STRUCTURAL_TAG, OLD_TAG)
    assert len(written(backend, grammar, 50)) > 50
    assert grammar.why is None


@pytest.mark.parametrize(
    "choices", [["a", "ab", "b c"], ["", "a"], ["x.y*(z)", "[q]", 'a/b\n\t\\"', "#&-~^$ "], ["é", "日本"]]
)
def test_choices_allow_the_tokens_that_vllms_own_grammar_of_them_allows(backend, choices):
    for choice in choices:
        ours = backend.compile_grammar(Kind.CHOICE, json.dumps(choices), {0})
        theirs = llguidance.LLMatcher(backend.ll_tokenizer, llguidance.grammar_from("choice", json.dumps(choices)))
        for token in [*backend.tokenizer.encode(choice), 0]:
            mask = backend.allocate_token_bitmask(1)
            llguidance.torch.fill_next_token_bitmask(theirs, mask, 0)
            assert allowed(backend, ours) == [
                token for token in range(backend.vocab_size) if (int(mask[0][token // 32]) >> (token % 32)) & 1
            ]
            assert ours.accept_tokens("r", [token])
            theirs.consume_token(token)


def test_the_engine_ends_only_that_request_and_its_output_says_why(monkeypatch, backend):
    bounded_grammars.bound_grammars()
    manager = StructuredOutputManager.__new__(StructuredOutputManager)
    manager.reasoner_cls, manager.enable_in_reasoning, manager.backend = None, False, backend
    manager._use_async_grammar_compilation = False

    def request(**fields: Any) -> Any:
        params = StructuredOutputsParams(**fields)
        key = Kind.REGEX, fields["regex"]
        structured = SimpleNamespace(params=params, structured_output_key=key, reasoning_ended=None, reasoner=None)
        found = SimpleNamespace(
            request_id="r",
            structured_output_request=structured,
            sampling_params=None,
            use_structured_output=True,
            stop_reason=None,
        )
        structured.grammar = manager._create_grammar(found)
        return found

    hostile, polite = request(regex="((a{0,200}){0,200}){0,200}"), request(regex="[a-d]{2,5}")
    written(backend, hostile.structured_output_request.grammar, 1000)
    assert not manager.accept_tokens(hostile, [1])
    assert "too many expressions" in hostile.stop_reason
    token = allowed(backend, polite.structured_output_request.grammar)[0]
    assert manager.accept_tokens(polite, [token])
    assert polite.stop_reason is None


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"regex": "[a-d]{2,5}"}, False),
        ({"regex": "[a-d"}, True),
        ({"choice": ["(", "["]}, False),
        ({"grammar": "root ::= ["}, True),
        ({"json": {"type": "nothing"}}, True),
        ({"json": SCHEMA}, False),
        ({"structural_tag": json.dumps(NEW_TAG)}, False),
        ({"structural_tag": json.dumps(OLD_TAG)}, False),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "nothing"}})}, True),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_it_reaches_an_engine(fields, refused):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    if refused:
        with pytest.raises(VLLMValidationError):
            bounded_grammars._validate(params)
    else:
        bounded_grammars._validate(params)


def xml(**properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    content = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    return {"type": "structural_tag", "format": {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}}


MANY = [f"<{number}>" for number in range(4_000)]


@pytest.mark.parametrize(
    "tag",
    [
        xml(a={"type": "string", "format": "date"}, b={"type": "string", "description": "x" * 20_000}),
        {"structures": [{"begin": one, "schema": {}, "end": ""} for one in MANY], "triggers": MANY},
    ],
    ids=["long", "many triggers"],
)
def test_a_tag_that_cannot_be_enforced_is_refused_at_once_whatever_its_size(tag):
    params = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=json.dumps(tag)))
    began_s = time.thread_time()
    with pytest.raises(VLLMValidationError):
        bounded_grammars._validate(params)
    assert time.thread_time() - began_s < 0.5


def test_the_ordinary_patterns_that_tools_have_are_compiled(backend):
    for pattern in PATTERNS.values():
        tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
        grammar = compiled(backend, Kind.STRUCTURAL_TAG, tag)
        assert allowed(backend, grammar), pattern
        assert grammar.why is None


def test_nothing_is_kept_of_a_grammar_once_its_request_has_gone(backend):
    grammars = [compiled(backend, Kind.JSON, {"type": "string", "maxLength": longest}) for longest in range(1000, 1010)]
    for grammar in grammars:
        written(backend, grammar, 5)
    gone = [weakref.ref(grammar.grammar) for grammar in grammars]
    del grammar, grammars
    assert [one() for one in gone] == [None] * 10
