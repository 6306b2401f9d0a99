"""Structural tags as guidance reads them: they take the texts that xgrammar takes, of the tools of each model."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolsParam,
)
from vllm.sampling_params import StructuredOutputsParams
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag, limit_to_single_tool_call
from vllm.v1.structured_output.backend_guidance import GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions as Kind

from ridgeline.engine.grammars import MAX_GRAMMAR_BYTES, refusal, tag_as_lark
from ridgeline.engine.vllm_workarounds.bounded_grammars import BoundedGuidance, serialize_in_tag
from tests.components.engine.vllm_workarounds.tool_schemas import HOSTILE, ORDINARY

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
            style: dict[str, Any] = dice.choice([{}, {"separators": (",", ":")}, {"indent": 1}])
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
            return text[:at] + dice.choice(['"', " ", "}", "x", ",", "\n"]) + text[at:]
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


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_guidance_takes_the_texts_that_xgrammar_takes(backend, model, seed):
    dice = Random(seed)
    tag = a_tag(dice, model)
    lark = tag_as_lark(tag, backend._special_tokens, serialize_in_tag)
    assert lark is not None
    for _ in range(6):
        text = damaged(dice, a_text(dice, tag["format"]))
        ours, theirs = backend._guided(lark), backend._by_xgrammar(json.dumps(tag), {END})
        assert not ours.ll_matcher.is_error(), (ours.ll_matcher.get_error(), lark)
        assert takes(backend, ours, text) == takes(backend, theirs, text), (text, lark)


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
def test_guidance_compiles_the_tools_that_xgrammar_would_take_long_for(backend, name):
    tag = strict_tag(HOSTILE[name])
    grammar = backend.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END})
    assert isinstance(grammar, GuidanceGrammar) == ("nested arrays" not in name), "xgrammar takes 0.03 s for those"


def test_a_string_with_a_largest_length_may_have_escapes_and_no_more_characters(backend):
    tag = strict_tag({"type": "object", "properties": {"x": {"type": "string", "maxLength": 20}}})
    for length, taken in ((20, True), (21, False)):
        arguments = json.dumps({"x": "\n" * length})
        text = f'<tool_call>{{"name": "do", "arguments": {arguments}}}</tool_call>'
        assert takes(backend, backend.compile_grammar(Kind.STRUCTURAL_TAG, tag, {END}), text) == taken


def test_what_guidance_cannot_read_is_left_to_xgrammar(backend):
    for form in ({"type": "any_tokens"}, {"type": "regex", "pattern": "a{100}"}, {"type": "nothing"}, {}):
        assert tag_as_lark({"type": "structural_tag", "format": form}, {}, json.dumps) is None
    assert tag_as_lark({"structures": [], "triggers": 1}, {}, json.dumps) is None


def nested(levels: int) -> dict[str, Any]:
    content: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "string", "maxLength": 2000}}
    for level in range(levels):
        one = {"type": "tag", "begin": f"<{level}>", "content": content, "end": f"</{level}>"}
        content = {"type": "tags_with_separator", "separator": ",", "tags": [one]}
    return {"type": "structural_tag", "format": content}


def test_lists_of_tags_inside_each_other_do_not_double_the_grammar_at_each_level(backend):
    tag = nested(18)
    lark = tag_as_lark(tag, {}, serialize_in_tag) or ""
    assert 1_000 < len(lark) < 10_000
    grammar = backend.compile_grammar(Kind.STRUCTURAL_TAG, json.dumps(nested(2)), {END})
    assert isinstance(grammar, GuidanceGrammar)
    assert takes(backend, grammar, '<1><0>"a"</0>,<0>"b"</0></1>,<1></1>')


def test_a_text_with_many_ends_that_excludes_much_is_not_written_out_for_each_of_them():
    content = {"type": "any_text", "excludes": [f"{number:04}" for number in range(2_000)]}
    tag = {"type": "tag", "begin": "a", "content": content, "end": [f"e{number}" for number in range(2_000)]}
    assert tag_as_lark({"type": "structural_tag", "format": tag}, {}, json.dumps) is None
    tag["end"] = tag["end"][:20]
    assert tag_as_lark({"type": "structural_tag", "format": tag}, {}, json.dumps) is not None
