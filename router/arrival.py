"""When the request that is being served arrived: its head was read, nothing else of it was done yet.

Latencies are counted from there, so that reading the body, the chat template, tokenising and admission are in them, and
whatever the event loop made the request wait between them. Tasks made while a request is served inherit it.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Final

from router.asgi import Asgi, Receive, Scope, Send

HEAD_READ_S: Final[ContextVar[float | None]] = ContextVar("ridgeline_head_read_s", default=None)
"""On the monotonic clock; None for what no client has asked for over HTTP."""
_KEY: Final = "ridgeline_head_read_s"


def note_head_read(scope_state: dict[str, object]) -> None:
    """Called by the parser, which is before the loop has run anything for this request."""
    scope_state[_KEY] = time.monotonic()


def with_arrival(app: Asgi) -> Asgi:
    """An ASGI app, outermost, whose requests know when they arrived."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # what the app's own start makes has not come from a client
            await app(scope, receive, send)
            return
        token = HEAD_READ_S.set(scope.get("state", {}).get(_KEY, time.monotonic()))
        try:
            await app(scope, receive, send)
        finally:
            HEAD_READ_S.reset(token)

    return call
