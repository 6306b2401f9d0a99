"""Tells a tool call that was cut off alike in a whole answer and in a stream: the call, and what there is of it.

So does OpenAI's API: `finish_reason` is `length`, and `arguments` end where the answer did. vLLM's streams do so too,
but a whole answer was the bare text of the call, or a call with the reason `tool_calls`. Arguments that no schema binds
are an object here, as clients expect while they read them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextvars import ContextVar
from typing import Any, Final

from pydantic_core import from_json
from vllm.entrypoints.generate.base.protocol import FunctionCall
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.parser.abstract_parser import DelegatingParser

_cut_off: Final[ContextVar[Collection[Sequence[int]]]] = ContextVar("ridgeline_cut_off", default=())
"""The tokens of those choices of the answer being parsed that ended at the limit."""
_parse: Final = DelegatingParser.parse
_constrain: Final = DelegatingParser._apply_structural_tag
_ANY_OBJECT: Final = {"type": "object"}


def install(state: Any) -> None:
    """Replace two methods of vLLM's parsers for this process, and wrap handlers in the state of vLLM's app."""
    DelegatingParser.parse = _parse_also_cut_off
    DelegatingParser._apply_structural_tag = _with_objects
    for serving in (state.openai_serving_chat, state.anthropic_serving_messages):
        vars(serving)["chat_completion_full_generator"] = _noting_the_end(serving.chat_completion_full_generator)
    messages, responses = state.anthropic_serving_messages, state.openai_serving_responses
    vars(messages)["messages_full_converter"] = _with_parsed_arguments(messages.messages_full_converter)
    vars(responses)["_make_response_output_items"] = _noting_its_end(responses._make_response_output_items)


def _parse_also_cut_off(
    self: DelegatingParser,
    model_output: str,
    request: Any,
    enable_auto_tools: bool = False,
    model_output_token_ids: Sequence[int] = (),
) -> tuple[str | None, str | None, list[FunctionCall] | None]:
    """Parse as vLLM, and what was cut off as a stream would if that shows more calls.

    A call may be complete all the same, and some parsers' streams need several parts to show all of one.
    """
    parsed: tuple[str | None, str | None, list[FunctionCall] | None] = _parse(
        self, model_output, request, enable_auto_tools, model_output_token_ids
    )
    if model_output_token_ids not in _cut_off.get() or not _shows_calls(self, request, enable_auto_tools):
        return parsed
    reasoning, text = self.extract_reasoning(model_output, request)
    text, ids = text or "", list(model_output_token_ids)
    shown, _ = self._extract_tool_calls_streaming("", text, text, [], ids, ids, request, tool_call_idx=0)
    calls, complete = _joined(shown.tool_calls) if shown is not None else [], parsed[2] or []
    is_forced = request.tool_choice not in ("auto", None)  # one whose name is not complete is no text
    if len(calls) > len(complete) or (is_forced and not complete):
        before = shown.content if shown is not None and (shown.content or "").strip() else None
        return reasoning, before, calls
    return parsed


def _shows_calls(parser: DelegatingParser, request: Any, enable_auto_tools: bool) -> bool:
    """Return whether a stream could show calls; vLLM's newer parsers, on its engine, tell both kinds alike."""
    offered = parser._tool_parser is not None and not parser._engine_based and request.tools
    return bool(offered) and request.tool_choice != "none" and (enable_auto_tools or request.tool_choice != "auto")


def _joined(deltas: Sequence[Any]) -> list[FunctionCall]:
    """Return the calls that a client would make of these parts."""
    calls: dict[int, FunctionCall] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, FunctionCall(id=delta.id, name="", arguments=""))
        if delta.function is not None:
            call.name += delta.function.name or ""
            call.arguments += delta.function.arguments or ""
    return list(calls.values())


def _with_objects(self: DelegatingParser, request: Any) -> Any:
    """Let arguments be any object where vLLM lets them be any JSON: half a string or number cannot be read as any."""
    request = _constrain(self, request)
    outputs = request.structured_outputs
    if outputs is not None and outputs.structural_tag is not None:
        outputs.structural_tag = json.dumps(_objects(json.loads(outputs.structural_tag)))
    return request


def _objects(tag: Any) -> Any:
    """Return the tag with that schema in each place that takes any JSON; schemas themselves are left alone."""
    if isinstance(tag, list):
        return [_objects(each) for each in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        anything = tag.get("style") == "json" and tag["json_schema"] is True
        return tag | {"json_schema": _ANY_OBJECT} if anything else tag
    return {name: _objects(value) for name, value in tag.items()}


def _noting_the_end(whole: Any) -> Any:
    async def generate(request: Any, outputs: AsyncIterator[Any], *rest: Any, **named: Any) -> Any:
        """Tell the parser how the answer ended, and the client too, whom vLLM tells of complete calls instead."""
        ends: dict[int, str | None] = {}

        async def noting() -> AsyncIterator[Any]:
            async for output in outputs:
                ends.update((one.index, one.finish_reason) for one in output.outputs)
                _cut_off.set([one.token_ids for one in output.outputs if one.finish_reason == "length"])
                yield output

        answer = await whole(request, noting(), *rest, **named)
        for choice in answer.choices if isinstance(answer, ChatCompletionResponse) else ():
            if ends.get(choice.index) == "length":
                choice.finish_reason = "length"
        return answer

    return generate


def _noting_its_end(make: Any) -> Any:
    def items(request: Any, final_output: Any, *rest: Any, **named: Any) -> Any:
        _cut_off.set([final_output.token_ids] if final_output.finish_reason == "length" else ())
        return make(request, final_output, *rest, **named)

    return items


def _with_parsed_arguments(convert: Any) -> Any:
    def converted(answer: ChatCompletionResponse) -> Any:
        """Give vLLM, which parses arguments here, what Anthropic's client makes of the same part in a stream."""
        for choice in answer.choices:
            for call in choice.message.tool_calls if choice.finish_reason == "length" else ():
                call.function.arguments = json.dumps(_read(call.function.arguments))
        return convert(answer)

    return converted


def _read(arguments: str) -> dict[str, Any]:
    try:
        read = from_json(arguments, allow_partial=True)
    except ValueError:  # nothing has come yet
        return {}
    return read if isinstance(read, dict) else {}
