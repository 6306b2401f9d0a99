"""The context of the HTTP request being served.

The layers before vLLM's app fill it in, and `router.front.engine_client` reads it. Tasks created for a request inherit
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal

from router.client_identity import ANONYMOUS
from router.front.http.types import Asgi, Receive, Scope, Send

AdminRight = Literal["", "local", "key"]
"""No right; that of a caller on this machine; that of a caller with an admin key."""
_HEAD_READ_S: Final = "ridgeline_head_read_s"
MAX_REQUEST_ID_CHARACTERS: Final = 256
"""Longest id of a request, with what vLLM adds to a client's own; every chunk of a stream repeats it."""


def _nothing() -> None:
    """Do nothing: no request is waiting to be taken in."""


@dataclass
class RequestContext:
    """The context of one HTTP request. Outside a request, as for a canary, all fields have their defaults."""

    head_read_s: float | None = None
    """When the head of the request had been read, on the monotonic clock, before anything else was done.

    Latencies count from here, so that they include reading the body, the chat template, tokenising, admission, and
    any time that the event loop made the request wait in between.
    """
    request_id: str = ""
    """The value of `x-request-id` in the answer."""
    client: str = ANONYMOUS
    """A short hash of the API key if keys are configured, else the client's IPv4 address or IPv6 network; never the key
    itself."""
    admin: AdminRight = ""
    """The caller's right to the operator's paths: none, unless the key guard has granted one."""
    timeout_s: float | None = None
    """Seconds that the client allows for the request, if it says so."""
    ttft_limit_s: float | None = None
    """Seconds until the first token that the client, or else `router.slo`, wants at most."""
    tpot_limit_s: float | None = None
    """The same for the mean time from one token to the next."""
    retry_after_s: int = 1
    """Seconds after which a refusal says that another try may succeed."""
    taken_in: Callable[[], None] = _nothing
    """Ends the request's turn in the intake: from now on it needs only its tokens delivered. May be called twice."""


_current: Final[ContextVar[RequestContext | None]] = ContextVar("ridgeline_request", default=None)


def current() -> RequestContext:
    """Return the context of the request being served; a new one outside of any."""
    return _current.get() or RequestContext()


def note_head_read(scope_state: dict[str, object]) -> None:
    """Record the time at which a head was read; the parser calls this before the loop runs anything else."""
    scope_state[_HEAD_READ_S] = time.monotonic()


class WithContext:
    """The outermost layer, which gives each HTTP request its context."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] not in ("http", "websocket"):  # lifespan events come from the app's start, not from a client
            await self._app(scope, receive, send)
            return
        read_s = scope.get("state", {}).get(_HEAD_READ_S, time.monotonic())
        token = _current.set(RequestContext(head_read_s=read_s))
        try:
            await self._app(scope, receive, send)
        finally:
            _current.reset(token)
