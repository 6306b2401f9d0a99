"""Limits what a request may take before vLLM's app reads it: its headers, body, memory, parsing, and its turn.

A body is read whole before anything is done with it, and refusals cost a fraction of taking a request in. The fair
share is of places and of memory for bodies. Turns are those of `ridgeline.router.flow.concurrency_limiter`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from starlette.requests import ClientDisconnect

from ridgeline.router.flow.admission_rules import Refused
from ridgeline.router.flow.concurrency_limiter import ConcurrencyLimiter
from ridgeline.router.flow.held_bodies import HeldBodies, HeldBody
from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.errors import HttpRefusal, send_error
from ridgeline.router.front.http.routes import GENERATING
from ridgeline.router.front.http.types import Asgi, Message, Receive, Scope, Send
from ridgeline.router.front.middleware.json_cost import check_cost
from ridgeline.router.front.middleware.time_limits import note_limits
from ridgeline.router.front.request_fields import check_headers
from ridgeline.router.settings import RouterSettings

BODY_PART_WITHIN_S: Final = 30.0
"""Longest time to wait for the next part of a body."""
LATE_S: Final = 1.0
"""If that time ends so much later, this router stood still, and not its client."""
LINGER_S: Final = 2.0
LINGER_BYTES: Final = 64 << 20


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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
        note_limits(scope["headers"], settings.router.slo.ttft_limit_s, settings.router.slo.tpot_limit_s)
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
        announced = [value for name, value in scope["headers"] if name == b"content-length"]
        self.announced_bytes = max((int(value) for value in announced if value.isdigit()), default=0)
        """0 if none is announced, or no number; the body is counted then."""
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

    async def read(self, held: HeldBody) -> None:
        """Read it to its end. Raises HttpRefusal (408, 413), Refused if there is no room for it, ClientDisconnect."""
        parts: list[bytes] = []
        while self._more:
            parts.append(await self._next_part())
            held.has_come(len(parts[-1]))
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
