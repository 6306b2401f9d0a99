"""Corrects /v1/messages, which vLLM makes of a chat.

A limit above the context is cut to it, as Claude Code asks for 32,000 tokens of any model. An error in the middle of a
stream is told with its own words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final

_ERROR: Final = 'data: {"error"'


def install(state: Any) -> None:
    """Wrap the methods of the handler in the state of vLLM's app."""
    serving = state.anthropic_serving_messages
    vars(serving)["create_messages"] = _limited(serving)
    vars(serving)["message_stream_converter"] = _telling_errors(serving)


def _limited(serving: Any) -> Any:
    create = serving.create_messages

    async def limited(request: Any, *rest: Any) -> Any:
        """Serve it with a limit that vLLM cuts to what the prompt leaves; it refuses one above the whole context."""
        request.max_tokens = min(request.max_tokens, serving.model_config.max_model_len)
        return await create(request, *rest)

    return limited


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
