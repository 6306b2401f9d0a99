"""`strict: true` with each of vLLM's tool parsers: their grammar has the schema, or the request is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_engine  # noqa: F401 - imports vLLM quietly

# isort: split
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser.parser_manager import ParserManager

from ridgeline.router.front import strict

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "where": {"$ref": "#/$defs/where"}},
    "required": ["city"],
    "$defs": {"where": {"type": "string"}},
}
NAMED: Any = {"type": "function", "function": {"name": "find"}}


def asked(choice: Any, strict: bool | None = True) -> ChatCompletionRequest:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": is_strict}}
        for name, is_strict in (("find", strict), ("send", None))
    ]
    return ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice
    )


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(autouse=True, scope="module")
def installed():
    strict.install()


@pytest.mark.parametrize("choice", ["auto", "required", NAMED, "none"], ids=str)
@pytest.mark.parametrize(
    ("parser", "enforces"),
    [
        ("hermes", ("auto", "required", "named")),
        ("qwen3_coder", ("auto", "required", "named")),
        ("glm47", ("auto", "required", "named")),
        ("internlm", ("required", "named")),
        ("pythonic", ("required", "named")),
        ("hunyuan_a13b", ("required", "named")),
    ],
)
def test_a_grammar_of_a_parser_has_the_schema_or_the_request_is_refused(tokenizer, parser, enforces, choice):
    kind = choice if isinstance(choice, str) else "named"
    request = asked(choice)
    parsing = ParserManager.get_parser(tool_parser_name=parser, enable_auto_tools=True)(tokenizer, request.tools)
    request = parsing.adjust_request(request)
    if kind in (*enforces, "none"):
        params = request.to_sampling_params(16, {})
        made = params.structured_outputs
        assert kind == "none" or '"maxLength": 9' in (made.structural_tag or json.dumps(made.json))
    else:
        with pytest.raises(VLLMValidationError, match="strict: false"):
            request.to_sampling_params(16, {})


@pytest.mark.parametrize(
    ("choice", "is_strict"),
    [("auto", None), ("auto", False), ({"type": "function", "function": {"name": "send"}}, True)],
)
def test_tools_that_are_not_strict_or_not_chosen_are_served(choice, is_strict):
    assert asked(choice, is_strict).to_sampling_params(16, {}).max_tokens == 16
