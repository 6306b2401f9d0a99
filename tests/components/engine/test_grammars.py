"""What is refused before a grammar is compiled, and which of vLLM's backends compiles it."""

from __future__ import annotations

import json
import logging
import time
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from vllm.sampling_params import StructuredOutputsParams

from ridgeline.engine.grammars import IGNORED, MAX_GRAMMAR_BYTES, choose_backend, ignored, refusal, unrolled_parts
from tests.support.patterns import PATTERNS


def why(**fields: Any) -> str | None:
    return refusal(StructuredOutputsParams(**fields), MAX_GRAMMAR_BYTES)


def tag(**content: Any) -> str:
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    )


def xml(**schema: Any) -> str:
    """A tag whose arguments are XML, which only xgrammar reads."""
    return tag(type="json_schema", json_schema=schema, style="qwen_xml")


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"x{number}": {"type": "string"} for number in range(count)}}


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": [f"item number {number}" for number in range(20_000)]},
        {"regex": "a|" * 40_000},
        {"grammar": 'root ::= "' + "a" * 70_000 + '"'},
        {"json": {"enum": [f"item number {number}" for number in range(20_000)]}},
        {"json": json.dumps(properties(5000))},
        {"structural_tag": tag(type="const_string", value="a" * 600_000)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_too_long_is_refused_with_the_limit_and_its_setting(fields):
    limit = MAX_GRAMMAR_BYTES * (8 if "structural_tag" in fields else 1)
    assert f"{limit} are allowed (server.max_grammar_bytes)" in (why(**fields) or "")


def test_bytes_are_counted_and_not_characters():
    assert "has 80000 bytes, and 65536 are allowed" in (why(regex="\u00e9" * 40_000) or "")
    assert why(regex="\u00e9" * 32_768) is None
    assert why(choice=["\ud800" * 100]) is None, "half a character, which JSON can name, has no encoding"


def test_a_schema_of_many_small_parts_is_refused_by_their_number():
    assert "more than 2048 objects" in (why(json={"anyOf": [{}] * 2500}) or "")
    assert why(json=properties(1500)) is None


def test_a_larger_limit_lets_larger_ones_through():
    params = StructuredOutputsParams(choice=[f"item number {number}" for number in range(20_000)])
    assert refusal(params, 10 * MAX_GRAMMAR_BYTES) is None


@pytest.mark.parametrize("multiple", [99_991, 0.99991, [97, 997], 131_072, 65_521])
def test_a_multiple_with_many_remainders_is_refused(multiple):
    values = multiple if isinstance(multiple, list) else [multiple]
    schema = {"allOf": [{"type": "number", "multipleOf": value} for value in values]}
    assert "multipleOf" in (why(json=schema) or "")


@pytest.mark.parametrize("multiple", [0.01, 5, 100_000, 65_536, 49_152, 0.65536, 1e300, True, float("inf"), "5"])
def test_ordinary_multiples_and_what_is_none_are_left_to_the_compiler(multiple):
    assert why(json={"type": "number", "multipleOf": multiple}) is None


def test_a_multiple_beyond_every_float_is_judged_too():
    assert "multipleOf" in (why(json={"multipleOf": 99_991 * 10**400}) or "")
    assert why(json=f'{{"multipleOf": {10**400}}}') is None, "guidance says what it cannot read"


def test_multiples_that_divide_each_other_count_once():
    schema = {"type": "object", "properties": {f"x{value}": {"multipleOf": value} for value in (8, 16, 32, 64)}}
    assert why(json=schema) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{0,200}){0,200}){0,200}",
        "((a{0,20}){0,20}){0,20}",
        "(.{0,500}x){0,20}",
        "(.{0,120}x){0,8}",
        "(a{0,100}){0,100}",
        r"(\w{1,60} \)[)]){0,60}",
        "^.{0,100000}$",
        r"((a|b|\S{2,30}){0,30}c?){0,30}",
    ],
)
def test_a_pattern_that_is_long_when_it_is_unrolled_is_refused_where_xgrammar_alone_can_read_it(pattern):
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    for asked in (
        xml(**schema),
        tag(type="regex", pattern=pattern),
        xml(patternProperties={pattern: {}}),
    ):
        refused = why(structural_tag=asked) or ""
        assert "may have 1024 parts together" in refused
        assert pattern[:20].replace("\\", "\\\\") in refused
    assert why(regex=pattern) is None, "guidance bounds it"
    assert why(structural_tag=tag(type="json_schema", json_schema=schema)) is None, "guidance bounds it"


def test_patterns_of_one_request_are_bounded_together_and_those_that_are_alike_count_once():
    def tools(*patterns: str) -> str:
        return xml(anyOf=[{"pattern": pattern} for pattern in patterns])

    assert why(structural_tag=tools(*["^[a-z]{1,64}$"] * 100)) is None
    assert "these have 6400" in (why(structural_tag=tools(*(f"^[a-z]{{{least},64}}$" for least in range(100)))) or "")


def test_rules_of_a_grammar_in_a_tag_that_repeat_each_other_multiply():
    rules = 'root ::= a{0,40}\na ::= b{0,40}\nb ::= "b"{'
    assert why(structural_tag=tag(type="grammar", grammar=rules + "0,1}")) is not None
    assert why(structural_tag=tag(type="grammar", grammar='root ::= "a"{1,40} "b"{2}')) is None


def test_ordinary_patterns_are_served_in_tools_and_structural_tags():
    assert len(PATTERNS) > 50
    refused = {name: why(structural_tag=xml(pattern=pattern)) for name, pattern in PATTERNS.items()}
    assert not {name: sentence for name, sentence in refused.items() if sentence}


@pytest.mark.parametrize(
    ("pattern", "parts"),
    [
        ("abc", 3),
        ("a{3}", 3),
        ("(ab){2,4}c", 9),
        ("([a-z]{1,5},){3,}", 18),
        (r"\(a{2}\)*", 4),
        ("[(a{3}){3}]{2}", 2),
        (r"[\]a{3}]{2}", 2),
        (r"[^\]]{3}.", 16),
        ("[](a{9}){9}]", 83),
        ("a{800}", 100),
        ("a{,5}", 5),
        ("(a))(", 1),
        ("[\u0080-\uffff]{3}é", 16),
        (r"[\S ]{2}\w", 9),
        ("a{x}", 4),
    ],
)
def test_parts_of_a_pattern_are_counted_as_if_its_counts_were_written_out(pattern, parts):
    assert unrolled_parts(pattern) == parts


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= h{8} "-" h{4} "-" h{4} "-" h{4} "-" h{12}\nh ::= [0-9a-f]',
        "root ::= " + ' ":" '.join(["[0-9a-f]{2}"] * 12),
    ],
)
def test_counts_of_a_grammar_that_stand_side_by_side_add_up(grammar):
    assert why(structural_tag=tag(type="grammar", grammar=grammar)) is None


@pytest.mark.parametrize(
    "counts", ["a{9999}" * 60_000, "a{99} " * 2_200, "a{" + "9" * 5_000 + "}", "(" * 99 + "a){9999}" * 99]
)
def test_counts_without_number_or_end_are_refused_in_a_sentence(counts):
    began_s = time.process_time()
    assert "may have 1024 parts" in why(structural_tag=tag(type="grammar", grammar=f"root ::= {counts}"))
    assert time.process_time() - began_s < 5.0


def test_a_schema_of_long_names_and_many_parts_takes_no_more_memory_than_it_has():
    schema = {"properties": {"n" * 50_000: {"anyOf": [0] * 20_000}, "m" * 50_000: {"anyOf": [{}] * 20_000}}}
    tracemalloc.start()
    assert ignored(schema) is None
    assert ignored({"properties": {"n" * 50_000: {"not": {"type": "null"}}}}) == f"/properties/{'n' * 100}.../not"
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_a_tag_of_long_names_and_many_parts_takes_no_more_memory_than_it_has():
    lists = {"n" * 50_000: [1] * 20_000, "m" * 50_000: [{"maxLength": number} for number in range(1, 2_000)]}
    asked = json.dumps({"type": "structural_tag", "format": lists})
    tracemalloc.start()
    refused = why(structural_tag=asked) or ""
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert f"/format/{'m' * 100}.../" in refused
    assert "/maxLength: " in refused


def test_lengths_count_like_patterns_where_only_xgrammar_reads_them_and_the_place_is_named():
    def tools(*longest: int) -> dict[str, Any]:
        return {"type": "object", "properties": {f"x{most}": {"type": "string", "maxLength": most} for most in longest}}

    assert why(structural_tag=xml(**tools(100_000))) is None
    assert why(structural_tag=xml(**tools(20, 50, 100))) is None
    refused = why(structural_tag=xml(**tools(*range(96, 106)))) or ""
    assert "these have 4020" in refused
    assert "/properties/x105/maxLength: " in refused
    assert "send strict: false" in refused
    assert why(structural_tag=tag(type="json_schema", json_schema=tools(*range(96, 106)))) is None


@pytest.mark.parametrize("limit", [{"minProperties": 1}, {"maxProperties": 10**9}])
def test_properties_whose_number_is_limited_count_by_pairs_where_only_xgrammar_reads_them(limit):
    assert why(structural_tag=xml(**properties(100), **limit)) is None
    refused = why(structural_tag=xml(**properties(800), **limit)) or ""
    assert "these have 1600" in refused
    assert f"/{next(iter(limit))}: " in refused
    assert why(structural_tag=xml(**properties(800))) is None
    assert why(structural_tag=tag(type="json_schema", json_schema=properties(800) | limit)) is None, "guidance reads it"


def test_repeated_repeats_of_a_tag_are_refused():
    once = {"type": "repeat", "min": 0, "max": 200, "content": {"type": "const_string", "value": "a"}}
    assert why(structural_tag=tag(**once)) is None
    assert "repeat" in (why(structural_tag=tag(**once | {"content": once})) or "")


def test_what_is_no_json_is_refused():
    assert "not JSON" in (why(json="{") or "")
    assert "not JSON" in (why(structural_tag="{") or "")


@pytest.mark.parametrize(
    ("configured", "fast", "chosen", "said"),
    [
        ("auto", True, "guidance", False),
        ("auto", False, "auto", True),
        ("guidance", True, "guidance", False),
        ("xgrammar", True, "xgrammar", True),
    ],
)
def test_guidance_is_chosen_where_the_operator_has_not_chosen_and_any_other_is_told(
    monkeypatch, caplog, configured, fast, chosen, said
):
    monkeypatch.setattr("ridgeline.engine.grammars.GuidanceBackend.is_tokenizer_supported", lambda tokenizer: fast)
    config = SimpleNamespace(backend=configured)
    with caplog.at_level(logging.WARNING):
        choose_backend(config, None)
    assert config.backend == chosen
    assert ("bounds neither" in caplog.text) == said


@pytest.mark.parametrize("keyword", IGNORED)
def test_guidance_says_of_each_keyword_that_is_listed_as_ignored_that_it_lacks_it(keyword):
    import llguidance

    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({keyword: 1}))
    assert f'Unimplemented keys: ["{keyword}"]' in llguidance.LLMatcher.validate_grammar(grammar)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"items": {"not": {"type": "null"}}}}}, "/properties/a/items/not"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "/anyOf/1/uniqueItems"),
        ({"$defs": {"one": {"if": {"const": 1}}}}, "/$defs/one/if"),
        ({"uniqueItems": False, "unevaluatedProperties": True, "additionalProperties": False}, None),
        ({"properties": {"not": {"const": {"not": 1}, "enum": [{"if": 1}]}}, "required": ["not"]}, None),
        (True, None),
    ],
)
def test_a_keyword_that_is_not_enforced_is_found_where_it_is_a_keyword(schema, path):
    assert ignored(schema) == path
