"""Corrects /v1/messages, which vLLM makes of a chat.

A limit above the context is cut to it, as Claude Code asks for 32,000 tokens of any model. A stream tells cached tokens
from its first event on. An error in the middle is told with its own words. A whole answer has each of Anthropic's keys.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

from vllm.entrypoints.anthropic import serving as anthropic_serving
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.openai.chat_completion.serving import _make_prompt_tokens_details

_ERROR: Final = 'data: {"error"'
_DATA: Final = "data: "


class _Answer(AnthropicMessagesResponse):  # type: ignore[misc]
    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Keep this null: vLLM leaves out all, and clients read the key."""
        return {**super().model_dump(**options), "stop_sequence": self.stop_sequence}


def install(state: Any) -> None:
    """Wrap the methods of the handler in the state of vLLM's app, and give vLLM's module another class."""
    vars(anthropic_serving)["AnthropicMessagesResponse"] = _Answer
    serving = state.anthropic_serving_messages
    vars(serving)["create_messages"] = _limited(serving)
    vars(serving)["chat_completion_stream_generator"] = _telling_cached_tokens(serving)
    vars(serving)["message_stream_converter"] = _telling_errors(serving)


def _limited(serving: Any) -> Any:
    create = serving.create_messages

    async def limited(request: Any, *rest: Any) -> Any:
        """Serve it with a limit that vLLM cuts to what the prompt leaves; it refuses one above the whole context."""
        request.max_tokens = min(request.max_tokens, serving.model_config.max_model_len)
        return await create(request, *rest)

    return limited


def _telling_cached_tokens(serving: Any) -> Any:
    stream = serving.chat_completion_stream_generator

    async def with_details(request: Any, outputs: AsyncIterator[Any], *rest: Any, **named: Any) -> AsyncIterator[str]:
        """Add to the first chunk's usage what vLLM adds to the last one's only.

        Without it `input_tokens` includes the cached ones at the beginning of a stream and not at its end.
        """
        details, is_first = None, True

        async def noting() -> AsyncIterator[Any]:
            nonlocal details
            async for output in outputs:
                counts = output.num_cached_tokens, output.num_cache_creation_tokens
                details = _make_prompt_tokens_details(serving.enable_prompt_tokens_details, *counts, None)
                yield output

        async for chunk in stream(request, noting(), *rest, **named):
            yield _with_details(chunk, details) if is_first else chunk
            is_first = False

    return with_details


def _with_details(chunk: str, details: Any) -> str:
    if details is None or chunk.startswith(_ERROR):
        return chunk
    told = json.loads(chunk.removeprefix(_DATA))
    told["usage"]["prompt_tokens_details"] = details.model_dump(exclude_none=True)
    return f"{_DATA}{json.dumps(told)}\n\n"


def _telling_errors(serving: Any) -> Any:
    convert = serving.message_stream_converter

    async def converted(chunks: AsyncGenerator[str, None]) -> AsyncIterator[str]:
        """End with the error's own event; vLLM's converter takes it for a chunk without an id."""
        error = ""

        async def until_an_error() -> AsyncIterator[str]:
            nonlocal error
            async for chunk in chunks:
                if chunk.startswith(_ERROR):
                    error = chunk
                    return
                yield chunk

        async for event in convert(until_an_error()):
            yield event
        if error:
            yield f"event: error\n{error}"

    return converted
