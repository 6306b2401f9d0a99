"""What is refused before a grammar is compiled, and which of vLLM's backends compiles it."""

from __future__ import annotations

import json
import logging
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from vllm.sampling_params import StructuredOutputsParams

from ridgeline.engine.grammars import MAX_GRAMMAR_BYTES, choose_backend, refusal, strict_refusal


def why(**fields: Any) -> str | None:
    return refusal(StructuredOutputsParams(**fields), MAX_GRAMMAR_BYTES)


def tag(**content: Any) -> str:
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
    )


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
    assert ("limits the time" in caplog.text) == said


LACKING = (
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
    "$recursiveRef",
)
"""What `docs/reference/http.md` names."""


@pytest.mark.parametrize("keyword", LACKING)
def test_a_keyword_that_guidance_lacks_is_refused_where_it_is_a_keyword(keyword):
    for schema in (
        {keyword: "x"},
        {"properties": {"a": {"items": {keyword: "x"}}}},
        {"anyOf": [{"type": "null"}, {keyword: "x"}]},
    ):
        assert f'"{keyword}"' in (strict_refusal(schema, MAX_GRAMMAR_BYTES) or "")
    assert strict_refusal({"properties": {keyword: {"const": {keyword: "x"}}}}, MAX_GRAMMAR_BYTES) is None


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"uniqueItems": False, "unevaluatedProperties": True, "additionalProperties": False}, False),
        ({"type": "string", "format": "date-time", "minLength": 3}, False),
        ({"type": "string", "format": "json-pointer"}, True),
        ({"type": "string", "pattern": "^(?=.*7)[a-z0-9]{2,4}$"}, True),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, False),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, True),
        ({"$ref": "https://example.org/schema"}, True),
        ({"x-guidance": {"lenient": True}, "not": {"type": "null"}}, True),
        (properties(1500), False),
        (properties(3000), True),
        (True, False),
    ],
)
def test_a_strict_schema_is_refused_if_any_of_it_would_not_be_enforced(schema, refused):
    assert (strict_refusal(schema, MAX_GRAMMAR_BYTES) is not None) == refused


def test_a_tool_that_needs_a_property_which_it_does_not_name_cannot_be_called():
    schema = {"type": "object", "properties": {"a": {}}, "required": ["b"]}
    assert strict_refusal(schema, MAX_GRAMMAR_BYTES) is None
    assert "'b'" in (strict_refusal(schema, MAX_GRAMMAR_BYTES, closed=True) or "")


def test_a_schema_of_long_names_and_many_parts_takes_no_more_memory_than_it_has():
    schema = {"properties": {"n" * 50_000: {"anyOf": [0] * 20_000}, "m" * 50_000: {"anyOf": [{}] * 20_000}}}
    tracemalloc.start()
    assert refusal(StructuredOutputsParams(structural_tag=json.dumps(schema)), MAX_GRAMMAR_BYTES) is not None
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
