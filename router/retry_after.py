"""The Retry-After header of refusals: vLLM's errors carry no headers, so the estimate travels beside them.

Wraps the whole ASGI app (`app.py`), so that what is raised in any task made for a request finds that request's slot.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from router.asgi import Asgi

_RETRYABLE = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass
class _Slot:
    """Of one HTTP request. Tasks copy the context, but share what is in it."""

    seconds: int = 1


_slot: ContextVar[_Slot | None] = ContextVar("ridgeline_retry_after", default=None)


def suggest(seconds: int) -> None:
    """The request being served may be worth another try after so many whole seconds."""
    slot = _slot.get()
    if slot is not None:
        slot.seconds = seconds


def with_retry_after(app: Asgi) -> Asgi:
    """The app, with Retry-After on every 429 and 503: what was suggested, else a second."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        slot = _Slot()

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] in _RETRYABLE:
                header = (b"retry-after", str(slot.seconds).encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        token = _slot.set(slot)
        try:
            await app(scope, receive, sending)
        finally:
            _slot.reset(token)

    return wrapped
