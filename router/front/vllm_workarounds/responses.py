"""Refuses a streamed answer of /v1/responses with its status, as a whole one.

vLLM asks the engine for it only when the stream has begun, so that a full server, or a request that can never be
served, was told in an event of a stream with the status 200, and clients did not try again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from copy import copy
from typing import Any, Final

_PASSED_ON: Final = ("lora_request", "trace_headers", "priority", "session_id", "reasoning_parser_kwargs")


class _Asked:
    """The engine client of one request, which has been asked for its first answer already."""

    def __init__(self, client: Any, answer: AsyncIterator[Any]) -> None:
        self._client = client
        self._answer: AsyncIterator[Any] | None = answer

    def generate(self, *args: Any, **named: Any) -> AsyncIterator[Any]:
        """Return the first answer once; later ones come after calls of the server's own tools."""
        answer, self._answer = self._answer, None
        return self._client.generate(*args, **named) if answer is None else answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def install(state: Any) -> None:
    """Wrap a method of the handler in the state of vLLM's app."""
    serving = state.openai_serving_responses
    generate = type(serving)._generate_with_builtin_tools

    def asked(*, request_id: str, engine_input: Any, sampling_params: Any, **named: Any) -> AsyncIterator[Any]:
        """Raise what the engine client raises, and otherwise return vLLM's generator, which goes on from there."""
        passed_on = {name: named[name] for name in _PASSED_ON}
        answer = serving.engine_client.generate(engine_input, sampling_params, f"{request_id}_0", **passed_on)
        its_own = copy(serving)
        its_own.engine_client = _Asked(serving.engine_client, answer)
        made: AsyncIterator[Any] = generate(
            its_own, request_id=request_id, engine_input=engine_input, sampling_params=sampling_params, **named
        )
        return made

    vars(serving)["_generate_with_builtin_tools"] = asked
