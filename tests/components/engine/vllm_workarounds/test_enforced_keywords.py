"""Each keyword of JSON schema that guidance takes is enforced: a right value can be written, and a wrong one cannot."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind

from ridgeline.engine.grammars import MAX_GRAMMAR_BYTES, strict_refusal

pytestmark = pytest.mark.filterwarnings("ignore:max_rollback_tokens:DeprecationWarning")  # vLLM still gives it
TEXT, NUMBER, LIST = {"type": "string"}, {"type": "integer"}, {"type": "array"}
CLOSED = {"type": "object", "additionalProperties": False}
ENFORCED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    *(
        ({"type": kind}, [right], [{"x": 1}, wrong])
        for kind, right, wrong in (
            ("string", "a", 1),
            ("integer", 1, 1.5),
            ("number", 1.5, "1"),
            ("boolean", True, 0),
            ("null", None, 0),
            ("array", [1], 1),
        )
    ),
    ({"type": ["integer", "null"]}, [1, None], ["1", 1.5]),
    ({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}]),
    ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    ({**TEXT, "minLength": 2}, ["ab"], ["a"]),
    ({**TEXT, "maxLength": 2}, ["ab"], ["abc"]),
    ({**TEXT, "pattern": "^[a-c]{2}$"}, ["ab"], ["a", "abc", "zz"]),
    ({**TEXT, "pattern": "b"}, ["abc"], ["ac"]),
    ({**TEXT, "pattern": "^a+$", "minLength": 3}, ["aaa"], ["aa", "bbb"]),
    *(
        ({**TEXT, "format": name}, [right], [wrong])
        for name, right, wrong in (
            ("date", "2026-11-30", "2026-13-40"),
            ("time", "10:00:00Z", "25:00"),
            ("date-time", "2026-11-30T10:00:00Z", "2026-11-30"),
            ("duration", "P1D", "1 day"),
            ("email", "a@b.org", "a b"),
            ("hostname", "a.org", "-a b"),
            ("ipv4", "10.0.0.1", "10.0.0.256"),
            ("ipv6", "::1", "10.0.0.1"),
            ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
            ("uri", "https://a.org/b", "a b"),
        )
    ),
    ({**NUMBER, "minimum": 10}, [10, 123], [9, -12]),
    ({**NUMBER, "maximum": 10}, [10, -3], [11]),
    ({**NUMBER, "exclusiveMinimum": 10}, [11], [10]),
    ({**NUMBER, "exclusiveMaximum": 10}, [9], [10]),
    ({"type": "number", "minimum": 0.5, "maximum": 1.5}, [0.75, 1.5], [0.25, 1.75]),
    ({**NUMBER, "multipleOf": 5}, [15], [12]),
    ({"type": "number", "multipleOf": 0.01}, [1.25], [1.255]),
    ({**LIST, "items": NUMBER}, [[1, 2], []], [["a"]]),
    ({**LIST, "minItems": 2}, [[1, 2]], [[1]]),
    ({**LIST, "maxItems": 2}, [[1, 2]], [[1, 2, 3]]),
    ({**LIST, "prefixItems": [NUMBER, TEXT], "items": False}, [[1, "a"]], [["a"], [1, "a", 2]]),
    ({**CLOSED, "properties": {"a": NUMBER}}, [{}, {"a": 1}], [{"b": 1}, {"a": "b"}]),
    ({**CLOSED, "properties": {"a": NUMBER}, "required": ["a"]}, [{"a": 1}], [{}]),
    ({"type": "object", "properties": {"a": NUMBER}}, [{"a": 1, "b": 2}], [{"a": "b"}]),
    ({"type": "object", "additionalProperties": NUMBER}, [{"b": 1}], [{"b": "c"}]),
    ({**CLOSED, "patternProperties": {"^x": NUMBER}}, [{"x1": 1}, {}], [{"y": 1}, {"x": "a"}]),
    ({"type": "object", "patternProperties": {"^x": NUMBER}}, [{"x1": 1, "y": "a"}], [{"x1": "a"}]),
    ({"type": "object", "minProperties": 1, "additionalProperties": NUMBER}, [{"a": 1}], [{}]),
    ({"type": "object", "maxProperties": 1, "additionalProperties": NUMBER}, [{"a": 1}], [{"a": 1, "b": 2}]),
    ({"anyOf": [NUMBER, {**TEXT, "maxLength": 1}]}, [12, "a"], ["ab", None]),
    ({"oneOf": [NUMBER, TEXT]}, [1, "a"], [None]),
    ({"allOf": [{**NUMBER, "minimum": 5}, {"maximum": 7}]}, [6], [4, 8, "a"]),
    ({"minimum": 5, "anyOf": [NUMBER]}, [6], [4]),
    ({"$ref": "#/$defs/a", "$defs": {"a": NUMBER}, "minimum": 5}, [6], [4, "a"]),
    ({"$ref": "#/definitions/a", "definitions": {"a": NUMBER}}, [6], ["a"]),
    ({"enum": ["alpha", "z"], "maxLength": 1}, ["z"], ["alpha"]),
    (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": {**CLOSED, "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, NUMBER]}}}},
        },
        [{"n": {"n": 1}}, {}],
        [{"n": "a"}, {"n": {"m": 1}}],
    ),
    (TypeAdapter(Decimal).json_schema(), [1.5, "1.50"], [None]),
]
ONE_BY_ONE = [
    (json.dumps(schema), value, values is right)
    for schema, right, wrong in ENFORCED
    for values in (right, wrong)
    for value in values
]


@pytest.mark.parametrize(("schema", "value", "is_right"), ONE_BY_ONE)
def test_a_value_can_be_written_if_its_schema_allows_it_and_not_otherwise(backend, schema, value, is_right):
    grammar, mask = backend.compile_grammar(Kind.JSON, schema, {0}), backend.allocate_token_bitmask(1)

    def accepts(token: int) -> bool:
        grammar.fill_bitmask(mask, 0)
        return bool((int(mask[0][token // 32]) >> (token % 32)) & 1) and grammar.accept_tokens("r", [token])

    assert strict_refusal(json.loads(schema), MAX_GRAMMAR_BYTES) is None, "else a strict schema is refused"
    tokens = backend.tokenizer.encode(json.dumps(value, separators=(",", ":")))
    assert all(accepts(token) for token in [*tokens, 0]) == is_right
