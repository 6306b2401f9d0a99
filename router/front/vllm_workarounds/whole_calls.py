"""Tells a tool call once its text is whole, or not at all; whole answers and streams tell the same calls.

A text may stop within a call: at the limit, at a stop string, or because the model ends there. vLLM's streams told half
of its arguments, and some of its parsers arguments that nobody wrote; clients run such calls.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any, Final

from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall, FunctionCall
from vllm.parser.abstract_parser import DelegatingParser, Parser
from vllm.parser.engine.parser_engine import ParserEngine
from vllm.parser.engine.parser_engine_config import ParserState
from vllm.parser.engine.streaming_parser_engine import StreamingParserEngine
from vllm.renderers.chat_utils import make_tool_call_id

_constrain: Final = DelegatingParser._apply_structural_tag
_build: Final = ParserEngine._build_extracted_result
_finish: Final = StreamingParserEngine.finish


def install(state: Any) -> None:
    """Replace methods of vLLM's parsers for this process, and parsers and a method in the state of vLLM's app."""
    DelegatingParser._apply_structural_tag = _with_objects
    ParserEngine._build_extracted_result = _without_an_open_call
    StreamingParserEngine.finish = _noting_an_open_call
    for serving in (state.openai_serving_chat, state.anthropic_serving_messages):
        serving.parser_cls = telling_whole_calls(serving.parser_cls)
        vars(serving)["chat_completion_full_generator"] = _telling_its_end(serving.chat_completion_full_generator)
    state.openai_serving_responses.parser = telling_whole_calls(state.openai_serving_responses.parser)


def telling_whole_calls(parser: type[Parser] | None) -> type[Parser] | None:
    """Return a parser that tells whole calls only."""
    return parser and type(parser.__name__, (_WholeCalls, parser), {})


class _WholeCalls(Parser):  # type: ignore[misc]
    """Comes before vLLM's parser in the order of methods."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._another = partial(type(self), *given, **named)
        self._prompt_ids: list[int] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._told = ""

    def set_prompt_token_ids(self, prompt_token_ids: Any) -> None:
        """Keep what a stream is parsed with."""
        self._prompt_ids = prompt_token_ids
        super().set_prompt_token_ids(prompt_token_ids)

    def parse(
        self, model_output: str, request: Any, enable_auto_tools: bool = False, model_output_token_ids: Any = ()
    ) -> tuple[str | None, str | None, list[FunctionCall]]:
        """Parse as vLLM, or else as its stream: some parsers find no call if the last one is not whole.

        Without a whole call all is text, unless a call was asked for.
        """
        reasoning, text, found = None, model_output, None
        with suppress(ValueError):  # internlm's takes half of a call for JSON
            reasoning, text, found = super().parse(model_output, request, enable_auto_tools, model_output_token_ids)
        calls = [call for call in found or () if _is_whole(call.arguments)]
        if not calls and _may_call(request):
            given = model_output, [*model_output_token_ids], request, [*self._prompt_ids]
            shown = super(_WholeCalls, self._another()).parse_delta(*given, finished=False) or DeltaMessage()
            for part in ParserEngine._coalesce_tool_call_deltas(shown.tool_calls):
                if _is_whole(part.function.arguments or ""):
                    calls += [FunctionCall(id=part.id, **part.function.model_dump())]
            if calls or request.tool_choice not in ("auto", None):
                text = shown.content
        return reasoning, text, calls

    def parse_delta(
        self, delta_text: str, delta_token_ids: Any, request: Any, prompt_token_ids: Any = None, *, finished: bool
    ) -> DeltaMessage | None:
        """Keep calls back until the end, where all the text is parsed to tell them, and text that is no call."""
        told = super().parse_delta(delta_text, delta_token_ids, request, prompt_token_ids, finished=finished)
        if not _may_call(request):
            return told
        told = told or DeltaMessage()
        told.tool_calls = []
        self._texts.append(delta_text)
        self._ids += delta_token_ids
        self._told += told.content or ""
        if finished:
            parser = self._another()
            parser.set_prompt_token_ids(prompt_token_ids or [])
            _, text, calls = parser.parse("".join(self._texts), request, True, self._ids)
            if self._stream_state.reasoning_ended and text and text.startswith(self._told):
                told.content = (told.content or "") + text[len(self._told) :]
            for index, call in enumerate(calls):
                beginning = {"index": index, "type": "function", "id": call.id or make_tool_call_id()}
                told.tool_calls.append(DeltaToolCall(**beginning, function=call.model_dump()))
        return told


def _may_call(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice != "none"


def _is_whole(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments, parse_constant=_no_json), dict | None)
    except ValueError:
        return False


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON, though Python writes it")


def _noting_an_open_call(self: StreamingParserEngine) -> Any:
    """Note whether the text stopped in a call: vLLM ends it here, and then it is like any other."""
    events = self._process_scanner_items(self._scanner.flush_pending())
    events += self._process_lex_tokens(self._lexer.flush())
    self._record_reasoning_tokens(events)
    self.left_open = self.state in (ParserState.TOOL_NAME, ParserState.TOOL_ARGS)
    return events + _finish(self)


def _without_an_open_call(self: ParserEngine, *deltas: Any) -> Any:
    """Leave out a call that was left open, for which vLLM may invent `{}`; whole JSON needs no mark of its end."""
    last = slice(self._engine.tool_index, None)
    if self._engine.left_open and not any(_is_whole(slot.args) for slot in self._tool_slots[last]):
        del self._tool_slots[last]
    return _build(self, *deltas)


def _with_objects(self: DelegatingParser, request: Any) -> Any:
    """Let a call that was asked for have an object as arguments where vLLM's grammar takes any JSON."""
    request = _constrain(self, request)
    outputs = request.structured_outputs
    if outputs is not None and outputs.structural_tag is not None:
        outputs.structural_tag = json.dumps(json.loads(outputs.structural_tag, object_hook=_an_object))
    return request


def _an_object(tag: dict[str, Any]) -> dict[str, Any]:
    takes_any = (tag.get("type"), tag.get("style"), tag.get("json_schema")) == ("json_schema", "json", True)
    return tag | {"json_schema": {"type": "object"}} if takes_any else tag


def _telling_its_end(whole: Any) -> Any:
    async def generate(request: Any, outputs: AsyncIterator[Any], *rest: Any, **named: Any) -> Any:
        """Tell how each text ended, as a stream does; `tool_calls` only if it ended by itself, with a call."""
        ends: dict[int, str | None] = {}

        async def noting() -> AsyncIterator[Any]:
            async for output in outputs:
                ends.update((one.index, one.finish_reason) for one in output.outputs)
                yield output

        answer = await whole(request, noting(), *rest, **named)
        for choice in getattr(answer, "choices", ()):
            if ends[choice.index] != "stop" or not choice.message.tool_calls:
                choice.finish_reason = ends[choice.index]
        return answer

    return generate
