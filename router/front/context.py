"""What is known of the HTTP request that is being served, for whatever serves it.

The layers before vLLM's app fill it in, and `router.front.engine_client` reads it. Tasks made for a request inherit it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from router.client_identity import ANONYMOUS
from router.front.middleware.admin_access import AdminRight
from router.front.middleware.types import Asgi, Receive, Scope, Send

_HEAD_READ_S: Final = "ridgeline_head_read_s"


def _nothing() -> None:
    """Nobody waits for this request to be taken in."""


@dataclass
class RequestContext:
    """One HTTP request. Without one, as for a canary, everything has its default."""

    head_read_s: float | None = None
    """When the head of the request had been read, on the monotonic clock, before anything else of it was done.

    Latencies are counted from there, so that they contain reading the body, the chat template, tokenising, admission,
    and whatever the event loop made the request wait between them.
    """
    client: str = ANONYMOUS
    """A short hash of the API key where keys are configured, else the client's IPv4 address or IPv6 network; never the
    key itself."""
    admin: AdminRight = ""
    """What its caller may do on the operator's paths. Nothing, unless the key guard has said otherwise."""
    timeout_s: float | None = None
    """How long the client gives it, if it says so."""
    retry_after_s: int = 1
    """After how long a refusal says that another try may be worth it."""
    taken_in: Callable[[], None] = _nothing
    """Says that the request needs no more of the router's attention than its tokens do. Safe to call twice."""


_current: Final[ContextVar[RequestContext | None]] = ContextVar("ridgeline_request", default=None)


def current() -> RequestContext:
    """The context of the request being served; a new one outside of any."""
    return _current.get() or RequestContext()


def note_head_read(scope_state: dict[str, object]) -> None:
    """Remember now as the time at which a head was read; the parser calls it, before the loop has run anything else."""
    scope_state[_HEAD_READ_S] = time.monotonic()


class WithContext:
    """The outermost layer: gives each HTTP request its context."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as ASGI asks for it."""
        if scope["type"] not in ("http", "websocket"):  # what the app's own start makes has not come from a client
            await self._app(scope, receive, send)
            return
        read_s = scope.get("state", {}).get(_HEAD_READ_S, time.monotonic())
        token = _current.set(RequestContext(head_read_s=read_s))
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)
