"""The context of the HTTP request being served.

The layers before vLLM's app fill it in, and `ridgeline.router.front.engine_client` reads it. Tasks created for a
request inherit it.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, Literal, Protocol

from ridgeline.router.client_identity import ANONYMOUS
from ridgeline.router.flow.admission_rules import ListSoFar
from ridgeline.router.front.http.types import Asgi, Message, Receive, Scope, Send

AdminRight = Literal["", "local", "key"]
"""No right; that of a caller on this machine; that of a caller with an admin key."""
_NOTED: Final = "ridgeline"
MAX_REQUEST_ID_CHARACTERS: Final = 256
"""Longest id of a request, with what vLLM adds to a client's own; every chunk of a stream repeats it."""
REQUEST_ID: Final = b"x-request-id"
NOT_HELD: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Tell proxies, above all nginx, to pass on each event of a stream at once and to keep none."""
_PRINTABLE: Final = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARACTERS)
_RETRYABLE: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


class Collector(Protocol):
    """Outputs that wait for a client."""

    unread_bytes: int


@dataclass
class RequestContext:
    """The context of one HTTP request. Outside a request, as for a health probe, all fields have their defaults."""

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
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """Its headers of W3C trace context, `traceparent` and perhaps `tracestate`."""
    retry_after_s: int = 1
    """Seconds after which a refusal says that another try may succeed."""
    taken_in: Callable[[], None] = lambda: None
    """Ends its turn in the concurrency limiter: from now on it needs only its tokens delivered. May be called twice."""
    list_so_far: ListSoFar = field(default_factory=ListSoFar)
    """The prompts of its list that have been accepted so far."""
    failed: bool = False
    """Whether one of its sequences has failed here: the others end with it, and their client has not left them."""
    streams: bool = False
    """Whether the answer has begun as a stream of events."""
    collectors: set[Collector] = field(default_factory=set)
    """What its connection is to count as unread, too."""


_current: Final[ContextVar[RequestContext | None]] = ContextVar("ridgeline_request", default=None)


def current() -> RequestContext:
    """Return the context of the request being served; a new one outside of any."""
    return _current.get() or RequestContext()


def note_head_read(scope_state: dict[str, object], collectors: set[Collector]) -> None:
    """Record the time at which a head was read, and where its connection looks for unread outputs.

    The parser calls this before the loop runs anything else.
    """
    scope_state[_NOTED] = time.monotonic(), collectors


def new_request_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex


class WithContext:
    """The outermost layer, which gives each HTTP request its context and the head of its answer our headers.

    These are `x-request-id` (the client's own if that can be echoed), NOT_HELD, and Retry-After: vLLM's errors carry
    no headers, so that estimate is in the context. HEAD is served as GET, which is all that vLLM's routes know; uvicorn
    sends no body to it.
    """

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        given = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
        request_id = given if _PRINTABLE.fullmatch(given) else new_request_id().encode()
        head_read_s, collectors = scope.get("state", {}).get(_NOTED) or (time.monotonic(), set())
        context = RequestContext(head_read_s, request_id.decode(), collectors=collectors)

        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                context.taken_in()
                # server_args.enable_request_id_headers adds one too
                headers = [header for header in message["headers"] if header[0].lower() != REQUEST_ID]
                headers.append((REQUEST_ID, request_id))
                if message["status"] in _RETRYABLE:
                    headers.append((b"retry-after", str(context.retry_after_s).encode()))
                context.streams = any(value.startswith(b"text/event-stream") for _, value in headers)
                if context.streams:
                    headers += NOT_HELD
                message = {**message, "headers": headers}
            return send(message)

        token = _current.set(context)
        try:
            served = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(served, receive, sending)
        finally:
            _current.reset(token)
