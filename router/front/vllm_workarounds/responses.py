"""Corrects the beginning and the end of /v1/responses.

vLLM asks the engine for a streamed answer only when the stream has begun, so that a full server, or a request that can
never be served, was told in an event of a stream with the status 200, and clients did not try again. It called an item
completed that the limit had cut off, and the stream too, and clients took the text for whole.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from openai.types.responses import ResponseOutputItemDoneEvent
from vllm.entrypoints.openai.responses.protocol import ResponseCompletedEvent


class _IncompleteEvent(ResponseCompletedEvent):  # type: ignore[misc]
    type: Literal["response.incomplete"] = "response.incomplete"


def install(state: Any) -> None:
    """Wrap methods of the handler in the state of vLLM's app."""
    serving = state.openai_serving_responses
    vars(serving)["_generate_with_builtin_tools"] = _asking_first(serving)
    vars(serving)["responses_full_generator"] = _telling_the_limit(serving.responses_full_generator)
    vars(serving)["responses_stream_generator"] = _streaming_the_limit(serving.responses_stream_generator)


def _asking_first(serving: Any) -> Any:
    def asked(
        *, request_id: str, engine_input: Any, sampling_params: Any, context: Any, tok_params: Any, **named: Any
    ) -> AsyncIterator[Any]:
        """Raise what the engine client raises, and otherwise do as vLLM does where the server runs no tools."""
        asked_for = serving.engine_client.generate(engine_input, sampling_params, f"{request_id}_0", **named)

        async def contexts() -> AsyncIterator[Any]:
            async for output in asked_for:
                context.request_metrics = output.metrics
                context.append_output(output)
                yield context

        return contexts()

    return asked


def _telling_the_limit(whole: Any) -> Any:
    async def generate(*given: Any, **named: Any) -> Any:
        """Call the last item incomplete if the answer is; a call is told if it is whole only."""
        answer = await whole(*given, **named)
        for item in answer.output[-1:] if getattr(answer, "status", None) == "incomplete" else ():
            item.status = "incomplete" if item.type in ("message", "reasoning") else "completed"
        return answer

    return generate


def _streaming_the_limit(stream: Any) -> Any:
    async def generate(*given: Any, **named: Any) -> AsyncIterator[Any]:
        """Keep the end of an item until what follows: after the last one its status is decided."""
        ended: list[Any] = []
        async for event in stream(*given, **named):
            for item_ended in ended:
                yield item_ended
            ended = [event] if isinstance(event, ResponseOutputItemDoneEvent) else []
            if isinstance(event, ResponseCompletedEvent) and event.response.status == "incomplete":
                yield _IncompleteEvent(response=event.response, sequence_number=event.sequence_number)
            elif not ended:
                yield event

    return generate
