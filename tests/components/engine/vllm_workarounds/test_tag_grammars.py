"""Structural tags as guidance reads them: they take the texts that xgrammar takes, and lets no schema be broken."""

from __future__ import annotations

import contextlib
import json
import re
import time
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag, limit_to_single_tool_call
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

from ridgeline.engine.grammars import MAX_GRAMMAR_BYTES, refusal, strict_refusal
from ridgeline.engine.tag_grammars import Unreadable, as_lark
from ridgeline.engine.vllm_workarounds.bounded_grammars import BoundedGuidance, serialize_in_tag
from tests.components.engine.vllm_workarounds.tool_schemas import HOSTILE, ORDINARY
from tests.support import strict_tools

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")  # vLLM still gives it
MODELS = ("hermes", "llama", "qwen_3", "deepseek_r1", "deepseek_v3_1", "kimi", "longcat")
END = 0


def a_schema(dice: Random, depth: int = 2) -> dict[str, Any]:
    """One that both compile alike."""
    leaves: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "string", "maxLength": dice.randint(1, 6)},
        {"type": "string", "minLength": dice.randint(1, 3), "maxLength": dice.randint(3, 9)},
        {"enum": dice.sample(["red", "blue", 'a "b"', 5, True, None], 3)},
        {"type": "integer"},
        {"type": "integer", "minimum": dice.randint(-9, 0), "maximum": dice.randint(1, 120)},
        {"type": "boolean"},
        {"type": "null"},
    ]
    match dice.choice(["leaf", "leaf", *(["list", "object", "any"] if depth else [])]):
        case "list":
            return {"type": "array", "items": a_schema(dice, depth - 1), "maxItems": dice.randint(1, 4)}
        case "object":
            return an_object(dice, depth - 1)
        case "any":
            return {"anyOf": [a_schema(dice, 0), an_object(dice, 0)]}
    return dice.choice(leaves)


def an_object(dice: Random, depth: int = 2) -> dict[str, Any]:
    names = dice.sample(["a", "b", "name", "per page", "é"], dice.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: a_schema(dice, depth) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
    } | ({"additionalProperties": False} if dice.random() < 0.5 else {})


def a_value(dice: Random, schema: Any) -> Any:
    """What the schema allows, or sometimes what it does not."""
    if schema is True or dice.random() < 0.03:
        return dice.choice([None, 7, "wrong", True, [], {}, {"x": 1}, -1000, "x" * 20])
    if "enum" in schema:
        return dice.choice(schema["enum"])
    if "anyOf" in schema:
        return a_value(dice, dice.choice(schema["anyOf"]))
    match schema.get("type"):
        case "string":
            length = dice.randint(schema.get("minLength", 0), schema.get("maxLength", 12)) + (dice.random() < 0.03)
            # xgrammar refuses escapes, which JSON allows, in a string with a length.
            return "".join(
                dice.choice("ab c<é日}{" if "maxLength" in schema else 'ab c"\\\n<é日}{') for _ in range(length)
            )
        case "integer":
            return dice.randint(schema.get("minimum", -200), schema.get("maximum", 3000)) + (dice.random() < 0.03)
        case "boolean":
            return dice.random() < 0.5
        case "array":
            count = dice.randint(0, schema["maxItems"]) + (dice.random() < 0.03)
            return [a_value(dice, schema["items"]) for _ in range(count)]
        case "object":
            return {
                name: a_value(dice, one)
                for name, one in schema["properties"].items()
                if (name in schema["required"]) == (dice.random() > 0.05) or dice.random() < 0.4
            }
    return None


def a_text(dice: Random, form: dict[str, Any]) -> str:
    """A text of a format, as a model may write it."""
    match form["type"]:
        case "const_string" | "regex" | "any_text" as kind:
            return {"const_string": form.get("value", ""), "regex": str(dice.randint(0, 99)), "any_text": free(dice)}[
                kind
            ]
        case "json_schema":
            style: dict[str, Any] = dice.choice([{}, {"separators": (",", ":")}])
            return json.dumps(a_value(dice, form["json_schema"]), ensure_ascii=False, **style)
        case "sequence":
            return "".join(a_text(dice, one) for one in form["elements"])
        case "or":
            return a_text(dice, dice.choice(form["elements"]))
        case "optional":
            return a_text(dice, form["content"]) if dice.random() < 0.5 else ""
        case "tag":
            return form["begin"] + a_text(dice, form["content"]) + str(form["end"])
        case "triggered_tags":
            count = dice.choice([0, 1, 1, 2])
            calls = [dice.choice(["", free(dice)]) + a_text(dice, dice.choice(form["tags"])) for _ in range(count)]
            return "".join(calls) + dice.choice(["", free(dice)])
        case "tags_with_separator":
            count = dice.choice([0, 1, 1, 2, 3])
            return form["separator"].join(a_text(dice, dice.choice(form["tags"])) for _ in range(count))
    raise AssertionError(form)


def free(dice: Random) -> str:
    pieces = ["Let me see. ", "\n\n", "{", "<tool", "<tool_call>", "<think>", "</think>", '{"name": ', "<", "日本"]
    return "".join(dice.choice([*pieces[:3], *pieces]) for _ in range(dice.randint(0, 3)))


def damaged(dice: Random, text: str) -> str:
    at = dice.randint(0, len(text))
    match dice.choice(["none", "none", "cut", "drop", "more", "twice"]):
        case "cut":
            return text[:at]
        case "drop":
            return text[:at] + text[at + 1 :]
        case "more":
            return text[:at] + dice.choice(['"', "}", "x", ","])  # xgrammar takes blanks everywhere + text[at:]
        case "twice":
            return text + text[at:]
    return text


def a_tag(dice: Random, model: str) -> dict[str, Any]:
    tools = [
        ChatCompletionToolsParam(
            function={"name": name, "parameters": an_object(dice), "strict": dice.random() < 0.8 or name == "find"}
        )
        for name in dice.sample(["find", "find_all", "send", "get_weather"], dice.randint(1, 3))
    ]
    named = {"type": "function", "function": {"name": tools[0].function.name}}
    choice = dice.choice(["auto", "required", named])
    tools[0].function.strict = True
    if isinstance(choice, dict):
        choice = ChatCompletionNamedToolChoiceParam.model_validate(choice)
    tag = get_model_structural_tag(model, tools, choice, reasoning=dice.random() < 0.3)
    assert tag is not None
    return (limit_to_single_tool_call(tag) if dice.random() < 0.3 else tag).model_dump()  # type: ignore[no-any-return]


def takes(backend: BoundedGuidance, grammar: Any, text: str) -> bool:
    """Whether a grammar takes a text, and lets it end there."""
    mask = backend.allocate_token_bitmask(1)
    for token in [*backend.tokenizer.encode(text), END]:
        grammar.fill_bitmask(mask, 0)
        if not int(mask[0][token // 32]) >> (token % 32) & 1:
            return False
        assert grammar.accept_tokens("r", [token])
    return True


@pytest.fixture(scope="module")
def xgrammar(backend):
    return XgrammarBackend(backend.vllm_config, backend.tokenizer, backend.ll_tokenizer.vocab_size)


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_guidance_takes_the_texts_that_xgrammar_takes(backend, xgrammar, model, seed):
    dice = Random(seed)
    tag = json.dumps(a_tag(dice, model))
    for _ in range(6):
        text = damaged(dice, a_text(dice, json.loads(tag)["format"]))
        ours = backend.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END})
        theirs = xgrammar.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END})
        assert not ours.ll_matcher.is_error(), (ours.ll_matcher.get_error(), tag)
        assert takes(backend, ours, text) == takes(backend, theirs, text), (text, tag)


PARSERS = ("hermes", "qwen3_coder", "mimo", "minimax_m2", "deepseek_v32", "deepseek_v41", "glm47")
SEEDS = 120
CLOSING = re.compile(r'["}\]<>/]|\n')


def written(backend: BoundedGuidance, grammar: Any, dice: Random, most: int) -> str | None:
    """A text that the grammar lets end, by tokens of dice that fall on closing ones more often; None without an end."""
    mask, tokens = backend.allocate_token_bitmask(1), list[int]()
    words = [backend.tokenizer.decode([token]) for token in range(backend.vocab_size)]
    while len(tokens) < most:
        grammar.fill_bitmask(mask, 0)
        row = mask[0].tolist()
        allowed = [token for token in range(backend.vocab_size) if row[token // 32] >> (token % 32) & 1]
        if END in allowed and (len(allowed) == 1 or (tokens and dice.random() < 0.5)):
            return str(backend.tokenizer.decode(tokens))
        closing = [token for token in allowed if CLOSING.search(words[token])]
        token = dice.choice(closing if closing and dice.random() < 0.5 else allowed)
        if token == END or not grammar.accept_tokens("r", [token]):
            break
        tokens.append(token)
    return None


@pytest.mark.parametrize("parser", PARSERS)
def test_arguments_as_vllm_reads_them_from_what_a_grammar_lets_through_keep_to_the_schema(backend, parser):
    checked = refused = 0
    for seed in range(SEEDS):
        dice = Random(seed)
        schema = strict_tools.parameters(dice)
        tool = ChatCompletionToolsParam(function={"name": "note", "parameters": schema, "strict": True})
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "x"}], tools=[tool], tool_choice="required"
        )
        kind = ToolParserManager.get_tool_parser(parser)
        tag = get_model_structural_tag(kind.structural_tag_model, [tool], "required", reasoning=False)
        if strict_refusal(schema, MAX_GRAMMAR_BYTES, closed=True) is not None:
            refused += 1
            continue
        try:
            grammar = backend.compile_grammar(Kind.STRUCTURAL_TAG, tag.model_dump_json(), {END})
        except Unreadable:
            refused += 1
            continue
        if grammar.ll_matcher.is_error():  # as XML each value is a grammar of its own, and one may have no value
            assert parser != "hermes"
            refused += 1
            continue
        text = written(backend, grammar, dice, 300)
        if text is None:
            continue
        calls = kind(backend.tokenizer, [tool]).extract_tool_calls(text, request=request).tool_calls
        for call in calls:
            wrong = strict_tools.broken(schema, call.function.arguments)
            assert wrong is None, (seed, wrong, text, schema)
            checked += 1
    assert checked > 10, (checked, refused)


QWEN = "<tool_call>\n<function=note>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>note<arg_key>a</arg_key><arg_value>{}</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("model", "call", "markup"),
    [
        ("qwen_3_coder", QWEN, "x</function>yyy"),
        ("qwen_3_coder", QWEN, "x<parameter=evil>y"),
        ("qwen_3_coder", QWEN, "x< /parameter>yyy"),
        ("glm_4_7", GLM, "x</tool_call>yyy"),
    ],
)
@pytest.mark.parametrize("kind", ["string", "list"])
def test_a_value_as_xml_has_nothing_that_vllms_parser_takes_for_markup(backend, model, call, markup, kind):
    part: dict[str, Any] = {"type": "string", "minLength": 5}
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    if kind == "list":
        schema["properties"] = {"a": {"type": "array", "items": part}}
    tool = ChatCompletionToolsParam(function={"name": "note", "parameters": schema, "strict": True})
    tag = get_model_structural_tag(model, [tool], "auto", reasoning=False)
    for value, taken in (("a < 5, B<C>", kind == "string"), ("a plain text", True), (markup, False)):
        text = call.format(json.dumps([value]) if kind == "list" else value)
        grammar = backend.compile_grammar(Kind.STRUCTURAL_TAG, tag.model_dump_json(), {END})
        assert takes(backend, grammar, text) == taken, value


def strict_tag(schema: dict[str, Any]) -> str:
    tool = ChatCompletionToolsParam(function={"name": "do", "parameters": schema, "strict": True})
    tag = get_model_structural_tag("hermes", [tool], "auto", reasoning=False)
    assert tag is not None
    return str(tag.model_dump_json())


@pytest.mark.parametrize("name", ORDINARY)
def test_calls_of_ordinary_tools_are_served(backend, name):
    schema, arguments = ORDINARY[name]
    tag = strict_tag(schema)
    assert refusal(StructuredOutputsParams(structural_tag=tag), MAX_GRAMMAR_BYTES) is None
    call = f'<tool_call>\n{{"name": "do", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    assert takes(backend, backend.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END}), f"Let me see. {call} So.")
    wrong = call.replace('"arguments": {', '"arguments": {"unknown": 1, ')
    assert not takes(backend, backend.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END}), wrong)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("model", ["hermes", "qwen_3_coder"])
def test_tools_that_are_made_to_be_slow_are_compiled_or_refused_at_once(backend, name, model):
    tool = ChatCompletionToolsParam(function={"name": "do", "parameters": HOSTILE[name], "strict": True})
    tag = get_model_structural_tag(model, [tool], "auto", reasoning=False)
    began_s = time.thread_time()
    with contextlib.suppress(Unreadable):
        backend.compile_grammar(Kind.STRUCTURAL_TAG, tag.model_dump_json(), {END})
    assert time.thread_time() - began_s < 1.0


def test_a_string_with_a_largest_length_may_have_escapes_and_no_more_characters(backend):
    tag = strict_tag({"type": "object", "properties": {"x": {"type": "string", "maxLength": 20}}})
    for length, taken in ((20, True), (21, False)):
        arguments = json.dumps({"x": "\n" * length})
        text = f'<tool_call>{{"name": "do", "arguments": {arguments}}}</tool_call>'
        assert takes(backend, backend.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END}), text) == taken


@pytest.mark.parametrize(
    "tag",
    [
        {"type": "structural_tag", "format": {"type": "any_tokens"}},
        {"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a"'}},
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "any_text"}] * 2}},
        {"type": "structural_tag", "format": {"type": "nothing"}},
        {"type": "structural_tag", "format": {}},
        {"structures": [], "triggers": 1},
    ],
)
def test_what_guidance_cannot_read_is_refused(tag):
    with pytest.raises((Unreadable, ValidationError)):
        as_lark(tag, {}, json.dumps)


def nested(levels: int) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 2000}}
    for level in range(levels):
        one = {"type": "tag", "begin": f"<{level}>", "content": content, "end": f"</{level}>"}
        content = {"type": "tags_with_separator", "separator": ",", "tags": [one]}
    return {"type": "structural_tag", "format": content}


def test_lists_of_tags_inside_each_other_do_not_double_the_grammar_at_each_level(backend):
    tag = nested(18)
    assert 1_000 < len(as_lark(tag, {}, serialize_in_tag)) < 10_000
    grammar = backend.compile_grammar(Kind.STRUCTURAL_TAG, json.dumps(nested(2)), {END})
    assert takes(backend, grammar, '<1><0>"a"</0>,<0>"b"</0></1>,<1></1>')


def test_a_text_with_many_ends_that_excludes_much_is_not_written_out_for_each_of_them():
    content = {"type": "any_text", "excludes": [f"{number:04}" for number in range(2_000)]}
    tag = {"type": "tag", "begin": "a", "content": content, "end": [f"e{number}" for number in range(2_000)]}
    with pytest.raises(Unreadable, match="too long"):
        as_lark({"type": "structural_tag", "format": tag}, {}, json.dumps)
    tag["end"] = tag["end"][:20]
    as_lark({"type": "structural_tag", "format": tag}, {}, json.dumps)
