"""Limits what a request may take before vLLM's app reads it: its headers, body, memory, parsing, and its turn.

A body is read whole before anything is done with it, and refusals cost a fraction of taking a request in. The fair
share is of places and of memory for bodies. Turns are those of `ridgeline.router.flow.concurrency_limiter`.

A body of a few megabytes may hold millions of numbers or hundreds of thousands of messages. pydantic checks each of
them in the one event loop, and for seconds every stream would stand still. So the parts are counted before any of it is
parsed, weighted by cost; an ordinary body of that length (a long text) costs very little.

`x-ridgeline-timeout-s` ends a request. `x-ridgeline-ttft-ms` and `x-ridgeline-tpot-ms` say how soon the first token is
wanted, and how soon each further one on average; they end nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from starlette.requests import ClientDisconnect

from ridgeline.router.flow.admission_rules import Refused
from ridgeline.router.flow.concurrency_limiter import ConcurrencyLimiter
from ridgeline.router.flow.held_bodies import HeldBodies
from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.errors import HttpRefusal, send_error
from ridgeline.router.front.http.routes import GENERATING
from ridgeline.router.front.http.types import Asgi, Message, Receive, Scope, Send
from ridgeline.router.front.request_fields import check_headers
from ridgeline.router.settings import LONGEST_LIMIT_MS, SHORTEST_LIMIT_MS, RouterSettings

BODY_PART_WITHIN_S: Final = 30.0
"""Longest time to wait for the next part of a body."""
LATE_S: Final = 1.0
"""If that time ends so much later, this router stood still, and not its client."""
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 64 << 20
MAX_COST: Final = 1_000_000
"""Largest cost, about 0.15 s of the loop. In numbers: a context of a million tokens, or eight of 128,000."""
STRING_COST: Final = 20
OBJECT_COST: Final = 100
LIST_COST: Final = 2
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
SHOWN_CHARACTERS: Final = 40
"""How much of a bad header its refusal repeats."""


@dataclass(frozen=True)
class Gates:
    """The checks and queues that requests pass before vLLM's app."""

    check_share: Callable[[str, int], None]
    """Raises Refused if a client holds its whole share, counting this many requests that are not taken in yet."""
    most_sequences: int
    """Sequences that one client may have served at the same time."""
    bodies: HeldBodies
    limiter: ConcurrencyLimiter = field(default_factory=ConcurrencyLimiter)


class Ingress:
    """Calls the app with a complete body at its client's turn, or refuses the request."""

    def __init__(self, app: Asgi, settings: RouterSettings, gates: Gates) -> None:
        self._app = app
        self._settings = settings
        self._gates = gates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        body = _Body(scope, receive, self._settings.server.max_request_bytes)
        async with AsyncExitStack() as held:
            try:
                await self._take_in(scope, body, held)
            except (HttpRefusal, Refused) as refused:
                await body.refuse(_as_http(refused), send)
                return
            except ClientDisconnect:  # nobody is left to answer
                return
            await self._app(scope, body.replay, send)

    async def _take_in(self, scope: Scope, body: _Body, held: AsyncExitStack) -> None:
        """Read the body, and wait for the request's turn. Raises HttpRefusal, Refused, ClientDisconnect."""
        settings, gates, context = self._settings, self._gates, current()
        body.check_length()
        check_headers(scope["headers"])
        headers, slo = dict(scope["headers"]), settings.router.slo
        context.timeout_s = read_timeout_s(headers)
        context.ttft_limit_s = read_limit_s(headers, b"x-ridgeline-ttft-ms", slo.ttft_limit_s)
        context.tpot_limit_s = read_limit_s(headers, b"x-ridgeline-tpot-ms", slo.tpot_limit_s)
        if not body.expected:
            return
        if scope["path"] in GENERATING:
            gates.check_share(context.client, gates.limiter.of(context.client))
        await body.read(held.enter_context(gates.bodies.holding(context.client, body.announced_bytes)))
        turn = await held.enter_async_context(gates.limiter.turn(context.client))
        context.taken_in = turn.close
        check_cost(body.whole)


class _Body:
    """The body of one request on its way in."""

    def __init__(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        self.announced_bytes = int(dict(scope["headers"]).get(b"content-length", 0))  # the parser takes one number only
        """0 if none is announced; the body is counted then."""
        self.expected = scope["method"] in ("POST", "PUT", "PATCH")
        """Whether the app reads a body; any other is left to uvicorn, which holds 64 KiB of it."""
        self.whole = b""
        self._receive = receive
        self._max_bytes = self._left_bytes = max_bytes
        self._more = self._replays = self.expected

    def check_length(self) -> None:
        """Raise HttpRefusal if the announced length is too long."""
        if self.announced_bytes > self._max_bytes:
            raise self._too_long()

    async def read(self, hold: Callable[[int], None]) -> None:
        """Read it to its end. Raises HttpRefusal (408, 413), Refused if there is no room for it, ClientDisconnect."""
        parts: list[bytes] = []
        while self._more:
            parts.append(await self._next_part())
            hold(self._max_bytes - self._left_bytes)
        self.whole = b"".join(parts)

    async def replay(self) -> Message:
        """Give the app the whole body, and then what else comes."""
        if not self._replays:
            return await self._receive()
        self._replays, whole, self.whole = False, self.whole, b""
        return {"type": "http.request", "body": whole, "more_body": False}

    async def refuse(self, refusal: HttpRefusal, send: Send) -> None:
        """Answer, with the rest of the body read: closing the connection before its end would reset it."""
        with suppress(ClientDisconnect):
            try:
                while self._more and not refusal.closes:
                    await self._next_part()
            except HttpRefusal as later:
                refusal = later
            await send_error(send, refusal, more_body=True)
            if refusal.closes and self._more:
                await self._linger()
            await send({"type": "http.response.body", "body": b""})

    async def _next_part(self) -> bytes:
        """Return the next part. Raises HttpRefusal if it makes the body too long, or is late; ClientDisconnect."""
        message = await self._next_message()
        if message["type"] != "http.request":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        self._more = message.get("more_body", False)
        self._left_bytes -= len(part)
        if self._left_bytes < 0:
            raise self._too_long()
        return part

    async def _next_message(self) -> Message:
        while True:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(BODY_PART_WITHIN_S):
                    return await self._receive()
            except TimeoutError:
                if time.monotonic() - began_s < BODY_PART_WITHIN_S + LATE_S:
                    self._more = False
                    sentence = f"No part of the request body came for {BODY_PART_WITHIN_S:g} s: send it at once."
                    raise HttpRefusal(HTTPStatus.REQUEST_TIMEOUT, sentence, closes=True) from None

    def _too_long(self) -> HttpRefusal:
        return HttpRefusal(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"The request body is longer than {self._max_bytes} bytes: send less, or raise server.max_request_bytes.",
            closes=True,
        )

    async def _linger(self) -> None:
        """Read and drop some of what still arrives.

        A client that sends its whole body before it reads would otherwise get a reset connection instead of the answer.
        """
        left_bytes = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while left_bytes > 0:
                    message = await self._receive()
                    left_bytes -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def _as_http(refused: HttpRefusal | Refused) -> HttpRefusal:
    if isinstance(refused, HttpRefusal):
        return refused
    current().retry_after_s = refused.retry_after_s
    return HttpRefusal(refused.status, str(refused))


def check_cost(body: bytes) -> None:
    """Raise HttpRefusal (400) if a body would cost too much."""
    if (found := cost(body)) > MAX_COST:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            f"The request body has too many parts to be read beside others: {found}, counting each number once, each "
            f"string {STRING_COST} times and each object {OBJECT_COST} times, where {MAX_COST} are allowed. Send "
            "several requests.",
        )


def cost(body: bytes) -> int:
    """Estimate the cost of a JSON text: 1 for each number, and the weights above for strings, lists and objects."""
    most = _cost(body, body.count(b'"') // 2)  # an overestimate: it counts punctuation inside of strings too
    if most <= MAX_COST:
        return most
    bare, strings = _STRING.subn(b"", body)
    return _cost(bare, strings)


def _cost(body: bytes, strings: int) -> int:
    return body.count(b",") + STRING_COST * strings + OBJECT_COST * body.count(b"{") + LIST_COST * body.count(b"[")


def read_timeout_s(headers: Mapping[bytes, bytes]) -> float | None:
    """Return the seconds that a client allows for its request; None if it does not say. Raises HttpRefusal."""
    return _number(headers, b"x-ridgeline-timeout-s", math.ulp(0.0), math.inf, "a number of seconds above 0")


def read_limit_s(headers: Mapping[bytes, bytes], name: bytes, default_s: float | None = None) -> float | None:
    """Return a limit that a header gives in milliseconds, in seconds. Raises HttpRefusal."""
    bounds = f"a number of milliseconds from {SHORTEST_LIMIT_MS:g} to {LONGEST_LIMIT_MS:,.0f}"
    limit_ms = _number(headers, name, SHORTEST_LIMIT_MS, LONGEST_LIMIT_MS, bounds)
    return default_s if limit_ms is None else limit_ms / 1e3


def _number(headers: Mapping[bytes, bytes], name: bytes, least: float, most: float, must_be: str) -> float | None:
    if (text := headers.get(name)) is None:
        return None
    with suppress(ValueError):
        if b"_" not in text and least <= (number := float(text)) <= most and math.isfinite(number):
            return number  # Python's own 1_000 is no one's number
    shown, param = text[:SHOWN_CHARACTERS].decode("latin-1"), name.decode()
    raise HttpRefusal(HTTPStatus.BAD_REQUEST, f"{param} must be {must_be}, not {shown!r}", param=param)
