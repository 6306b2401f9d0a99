"""What is refused before a grammar is compiled, and which of vLLM's backends compiles it."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from vllm.sampling_params import StructuredOutputsParams

from engine.grammars import MAX_GRAMMAR_BYTES, choose_backend, refusal, repeats_a_repetition


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


@pytest.mark.parametrize("multiple", [99_991, 0.99991, [97, 997]])
def test_a_multiple_with_many_remainders_is_refused(multiple):
    values = multiple if isinstance(multiple, list) else [multiple]
    schema = {"allOf": [{"type": "number", "multipleOf": value} for value in values]}
    assert "multipleOf" in (why(json=schema) or "")


@pytest.mark.parametrize("multiple", [0.01, 5, 100_000, 1e300, True, float("inf"), "5"])
def test_ordinary_multiples_and_what_is_none_are_left_to_the_compiler(multiple):
    assert why(json={"type": "number", "multipleOf": multiple}) is None


def test_multiples_that_divide_each_other_count_once():
    schema = {"type": "object", "properties": {f"x{value}": {"multipleOf": value} for value in (8, 16, 32, 64)}}
    assert why(json=schema) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{0,200}){0,200}){0,200}",
        "(.{0,500}x){0,20}",
        "(a{0,100}){0,100}",
        "(a*){0,50}",
        "(a{0,9})+",
        "(?:(a{2,}b)c)*",
    ],
)
def test_a_counted_repetition_of_repetitions_is_refused_where_xgrammar_alone_can_read_it(pattern):
    assert repeats_a_repetition(pattern)
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": pattern}}}
    assert "no repetition may contain another" in (
        why(structural_tag=tag(type="json_schema", json_schema=schema)) or ""
    )
    assert "no repetition may contain another" in (why(structural_tag=tag(type="regex", pattern=pattern)) or "")
    assert why(regex=pattern) is None, "guidance bounds it"


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\d{4}-\d{2}-\d{2}$",
        "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "([a-z]+-)*[a-z]+",
        r"\(a{1,2}\)*",
        "[({*]{1,3}",
    ],
)
def test_patterns_of_dates_ids_and_words_are_not(pattern):
    assert not repeats_a_repetition(pattern)


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
    monkeypatch.setattr("engine.grammars.GuidanceBackend.is_tokenizer_supported", lambda tokenizer: fast)
    config = SimpleNamespace(backend=configured)
    with caplog.at_level(logging.WARNING):
        choose_backend(config, None)
    assert config.backend == chosen
    assert ("bounds neither" in caplog.text) == said
