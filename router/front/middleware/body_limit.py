"""Limits the length of a body, and the time that each of its parts may take to arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Final

from starlette.requests import ClientDisconnect

from router.front.http.errors import send_error
from router.front.http.types import Asgi, Message, Receive, Scope, Send

LINGER_BYTES: Final = 64 << 20
BODY_PART_WITHIN_S: Final = 30.0
"""Longest time to wait for the next part of a body."""
LATE_S: Final = 1.0
"""If that time ends so much later, this router stood still, and not its client."""
LINGER_S: Final = 2.0


class BodyLimit:
    """Refuses a body that is too long with 413, by its announced length or as soon as it exceeds the limit."""

    def __init__(self, app: Asgi, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _CountedBody(self._max_bytes, receive, send)
        if announced_bytes(scope) > self._max_bytes:
            await body.refuse_length()
            return
        try:
            await self._app(scope, body.receive, body.send)
        except ClientDisconnect:
            if not body.refused:
                raise


class _CountedBody:
    """One request's messages. After a refusal the app sees a client that left, and what the app sends is dropped."""

    def __init__(self, max_bytes: int, receive: Receive, send: Send) -> None:
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes
        self._receive = receive
        self._send = send
        self._answering = False
        self._whole = False
        self.refused = False

    async def receive(self) -> Message:
        """Return the next part of the body to the app."""
        if self.refused:
            return {"type": "http.disconnect"}
        try:
            message = await self._next_part()
        except TimeoutError:
            await self._refuse(408, f"No part of the request body came for {BODY_PART_WITHIN_S:g} s: send it at once.")
            return {"type": "http.disconnect"}
        more = message.get("more_body", False)
        self._whole = not more
        self._left_bytes -= len(message.get("body", b""))
        if self._left_bytes >= 0:
            return message
        await self.refuse_length(more_to_come=more)
        return {"type": "http.disconnect"}

    async def _next_part(self) -> Message:
        """Return what comes next. Raises TimeoutError if nothing does, but not because this router stood still."""
        while True:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(None if self._whole else BODY_PART_WITHIN_S):
                    return await self._receive()
            except TimeoutError:
                if time.monotonic() - began_s < BODY_PART_WITHIN_S + LATE_S:
                    raise

    def send(self, message: Message) -> Awaitable[None]:
        """Pass the app's answer on."""
        if self.refused:
            return _nothing()
        self._answering = True
        return self._send(message)

    async def refuse_length(self, *, more_to_come: bool = True) -> None:
        """Refuse a body that is too long, with 413."""
        sentence = (
            f"The request body is longer than {self._max_bytes} bytes: send less, or raise server.max_request_bytes."
        )
        await self._refuse(413, sentence, more_to_come=more_to_come)

    async def _refuse(self, status: int, sentence: str, *, more_to_come: bool = False) -> None:
        """Refuse, and close the connection, since the rest of the body will not be read."""
        self.refused = True
        if self._answering:
            return
        close = [(b"connection", b"close")]
        await send_error(self._send, status, sentence, headers=close, more_body=True)
        if more_to_come:
            await self._linger()
        await self._send({"type": "http.response.body", "body": b""})

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


def announced_bytes(scope: Scope) -> int:
    """Return the announced length; 0 if there is none (the body is then counted) or if it is not a number."""
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) for value in announced if value.isdigit()), default=0)


async def _nothing() -> None:
    """Drop a message."""
