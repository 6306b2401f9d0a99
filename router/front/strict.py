"""`strict: true` is enforced or refused: before vLLM reads a schema, and once its parser has made a grammar of tools.

guidance says of a schema what it cannot enforce. Not every tool parser of vLLM puts the schemas into its grammar.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from ridgeline.engine import grammars


async def beyond_strict(request: BaseModel, max_bytes: int) -> VLLMValidationError | None:
    """Return why a schema sent with `strict: true` is refused; None if a grammar of it can be made."""
    tools = [(f"tools ({name})", schema, True) for name, schema in _strict_tools(request)]
    schemas = [*_strict_formats(request), *tools]
    return await asyncio.to_thread(_first_refusal, schemas, max_bytes) if schemas else None


def _first_refusal(schemas: list[tuple[str, Any, bool]], max_bytes: int) -> VLLMValidationError | None:
    for parameter, schema, closed in schemas:
        if (why := grammars.strict_refusal(schema, max_bytes, closed)) is not None:
            return VLLMValidationError(
                f"{parameter}: {why}. strict: true cannot be enforced: change the schema, or send strict: false",
                parameter=parameter.partition(" ")[0],
            )
    return None


def _strict_formats(request: BaseModel) -> Iterator[tuple[str, Any, bool]]:
    """Of chat's `response_format`, and of the `text.format` of Responses."""
    chat = getattr(getattr(request, "response_format", None), "json_schema", None)
    if getattr(chat, "strict", None) is True:
        yield "response_format", getattr(chat, "json_schema", None), False
    form = getattr(getattr(request, "text", None), "format", None)
    if getattr(form, "strict", None) is True:
        yield "text.format", getattr(form, "schema_", None), False


def _strict_tools(request: BaseModel) -> Iterator[tuple[str, Any]]:
    """The names and schemas of the strict tools that this request lets a model call, in all three APIs."""
    choice: Any = getattr(request, "tool_choice", None)
    chosen = getattr(getattr(choice, "function", choice), "name", None)
    for tool in getattr(request, "tools", None) or ():
        function = getattr(tool, "function", tool)
        name = getattr(function, "name", "")
        if getattr(function, "strict", None) is True and choice != "none" and chosen in (None, name):
            yield name[:64], getattr(function, "parameters", None) or getattr(function, "input_schema", None)


def install() -> None:
    """Refuse a request with strict tools whose parser made no grammar of their schemas; a second call does nothing."""
    for body in (ChatCompletionRequest, ResponsesRequest):
        if not hasattr(body.to_sampling_params, "__wrapped__"):
            body.to_sampling_params = _checked(body.to_sampling_params)


def _checked(to_sampling_params: Callable[..., SamplingParams]) -> Callable[..., SamplingParams]:
    @functools.wraps(to_sampling_params)
    def checked(request: Any, *given: Any, **named: Any) -> SamplingParams:
        params = to_sampling_params(request, *given, **named)
        schemas = [_without_definitions(schema) for _, schema in _strict_tools(request) if schema]
        made = params.structured_outputs
        # A parser writes the schemas of all tools that may be called, or of none.
        if schemas and not any(part in schemas for part in _parts(made and (made.structural_tag or made.json))):
            raise VLLMValidationError(
                "tools: this server's tool parser cannot enforce schemas with this tool_choice: send strict: false and "
                "check the arguments yourself",
                parameter="tools",
            )
        return params

    return checked


def _parts(grammar: Any) -> Iterator[dict[str, Any]]:
    left = [json.loads(grammar) if isinstance(grammar, str) else grammar]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            yield _without_definitions(one)
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _without_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """Where parsers write a list of calls, the definitions stand beside it."""
    return {name: value for name, value in schema.items() if name != "$defs"}
