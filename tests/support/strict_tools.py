"""Parameters of strict tools made by dice: keywords of JSON Schema beside, within and against each other."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from random import Random
from typing import Any

import jsonschema

Schema = dict[str, Any]
DEFINITIONS: Schema = {
    "number": {"type": "integer"},
    "unit": {"type": "string", "enum": ["km", "mile"]},
    "place": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {"value": {"type": "boolean"}, "left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
        "required": ["value"],
        "additionalProperties": False,
    },
}
WORDS = ("alpha", "bravo", "charlie", "z", "", "7", "null", 'a "b"', "é日")
PATTERNS = ("^[a-z]*$", "[0-9]", r"^\d{4}", "^(ab|c)+$", "x$", r"^\w+@\w+$", "^a|b$", "^(?=.*7)[a-z0-9]{2,4}$", "<|>")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "json-pointer", "regex")
TOOLS = 500


def parameters(dice: Random) -> Schema:
    """Of a tool: an object of one to three properties, most of them required."""
    names = dice.sample(["a", "b", "per page", "é"], dice.randint(1, 3))
    schema: Schema = {
        "type": "object",
        "properties": {name: a_schema(dice, 2) for name in names},
        "required": [name for name in names if dice.random() < 0.8],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }
    if dice.random() < 0.05:
        schema["required"] = [*schema["required"], "missing"]
    return schema


def a_schema(dice: Random, depth: int) -> Schema:
    kinds = [a_string, a_string, a_number, a_constant, a_reference]
    kinds += [a_list, an_object, a_choice, a_choice, a_rare_one] if depth else []
    schema = dice.choice(kinds)(dice, depth - 1)
    if dice.random() < 0.1:
        schema |= dice.choice([{"title": "It"}, {"default": None}, {"minimum": 3}, {"maxLength": 4}, {"examples": [1]}])
    return schema


def a_string(dice: Random, _: int) -> Schema:
    more: list[Schema] = [
        {"minLength": dice.randint(0, 12)},
        {"maxLength": dice.randint(1, 20)},
        {"pattern": dice.choice(PATTERNS)},
        {"format": dice.choice(FORMATS)},
        {"enum": dice.sample(WORDS, 4)},
        {"contentEncoding": "base64"},
    ]
    return merged({"type": "string"}, *dice.sample(more, dice.choice([0, 0, 1, 1, 2])))


def a_number(dice: Random, _: int) -> Schema:
    more: list[Schema] = [
        {"minimum": dice.choice([-20, 0, 5, 70_000, 2.5])},
        {"maximum": dice.choice([9, 100, 70_009, 1e6])},
        {"exclusiveMinimum": 0},
        {"multipleOf": dice.choice([5, 0.25, 0.01])},
    ]
    return merged({"type": dice.choice(["integer", "number"])}, *dice.sample(more, dice.choice([0, 1, 2])))


def a_constant(dice: Random, _: int) -> Schema:
    values = [*WORDS, 5, 0.5, True, None, [1, "a"], {"b": 1}]
    return dice.choice(
        [
            {"const": dice.choice(values)},
            {"enum": dice.sample(values, 3)},
            {"enum": list(WORDS[:4]), "maxLength": 1},
            {"type": ["string", "null"], "enum": ["alpha", None]},
            {"type": "boolean"},
        ]
    )


def a_reference(dice: Random, _: int) -> Schema:
    return {"$ref": f"#/$defs/{dice.choice(list(DEFINITIONS))}"} | dice.choice([{}, {}, {"minimum": 70_000}])


def a_list(dice: Random, depth: int) -> Schema:
    more: list[Schema] = [
        {"minItems": dice.randint(0, 2)},
        {"maxItems": dice.randint(1, 3)},
        {"uniqueItems": dice.random() < 0.5},
        {"contains": {"type": "integer"}},
        {"prefixItems": [a_schema(dice, 0), a_schema(dice, 0)]},
    ]
    items: Schema = {"type": "array", "items": a_schema(dice, depth)}
    return merged(items, *dice.sample(more, dice.choice([0, 1, 2])))


def an_object(dice: Random, depth: int) -> Schema:
    names = dice.sample(["x", "y", "z"], dice.randint(0, 3))
    more: list[Schema] = [
        {"required": dice.sample([*names, "w"], 1)},
        {"additionalProperties": dice.choice([False, {"type": "integer"}])},
        {"minProperties": 1},
        {"maxProperties": 2},
        {"patternProperties": {"^p": {"type": "integer"}}},
        {"propertyNames": {"pattern": "^[a-z]$"}},
        {"dependentRequired": {"x": ["y"]}},
    ]
    properties: Schema = {"type": "object", "properties": {name: a_schema(dice, depth) for name in names}}
    return merged(properties, *dice.sample(more, dice.choice([0, 1, 2])))


def a_choice(dice: Random, depth: int) -> Schema:
    schemas = [a_schema(dice, depth) for _ in range(2)]
    beside: Schema = dice.choice([{}, {}, {"minimum": 70_000}, {"minLength": 3}, {"type": ["string", "null"]}])
    return {dice.choice(["anyOf", "anyOf", "oneOf", "allOf"]): schemas} | beside


def a_rare_one(dice: Random, depth: int) -> Schema:
    return dice.choice(
        [
            {"not": {"type": "string"}},
            {"if": {"type": "string"}, "then": {"minLength": 3}},
            {"type": ["string", "integer"]},
            {"type": ["string", "null"], "maxLength": 3},
            {},
            {"unevaluatedProperties": False, "type": "object"},
            a_schema(dice, depth) | {"x-guidance": {"lenient": True, "whitespace_flexible": True}},
        ]
    )


def merged(*schemas: Schema) -> Schema:
    return {name: value for schema in schemas for name, value in schema.items()}


def broken(schema: Schema, arguments: str) -> str | None:
    """Say how arguments break a schema; None if they do not. 1234.56 is a multiple of 0.01, though not as a float."""
    exact, given = (json.loads(text, parse_float=Decimal) for text in (json.dumps(schema), arguments))
    checker = jsonschema.Draft202012Validator(exact, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    errors = (error for error in checker.iter_errors(given) if not _is_known(error))
    error = next(errors, None)
    return None if error is None else error.message


def _is_known(error: jsonschema.ValidationError) -> bool:
    """guidance's dates are those of a year that may be 0 and has a 29 February, as `docs/reference/http.md` says."""
    return error.validator == "format" and re.search("-02-29|^0000", str(error.instance)) is not None
