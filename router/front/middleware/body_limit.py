"""How long a body may be, and how long its parts may take to come."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from starlette.requests import ClientDisconnect

from router.front.errors import send_error
from router.front.middleware.types import Asgi, Message, Receive, Scope, Send

LINGER_BYTES: Final = 64 << 20
BODY_PART_WITHIN_S: Final = 30.0
"""A client that sends its body slower, part by part, is not waited for."""
LINGER_S: Final = 2.0


class BodyLimit:
    """Refuses with 413 a body that is too long, by what it announces or as soon as it is; keeps nothing of it."""

    def __init__(self, app: Asgi, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request as ASGI asks for it."""
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
    """One request's messages. After the refusal its app reads a client that left, and what it sends goes nowhere."""

    def __init__(self, max_bytes: int, receive: Receive, send: Send) -> None:
        self._left_bytes = max_bytes
        self._max_bytes = max_bytes
        self._receive = receive
        self._send = send
        self._answering = False
        self._whole = False
        self.refused = False

    async def receive(self) -> Message:
        """Give the app the next part of the body."""
        if self.refused:
            return {"type": "http.disconnect"}
        try:
            async with asyncio.timeout(None if self._whole else BODY_PART_WITHIN_S):
                message = await self._receive()
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

    async def send(self, message: Message) -> None:
        """Pass on the app's answer."""
        if not self.refused:
            self._answering = True
            await self._send(message)

    async def refuse_length(self, *, more_to_come: bool = True) -> None:
        """Refuse a body that is too long with 413."""
        sentence = (
            f"The request body is longer than {self._max_bytes} bytes: send less, or have server.max_request_bytes "
            "raised."
        )
        await self._refuse(413, sentence, more_to_come=more_to_come)

    async def _refuse(self, status: int, sentence: str, *, more_to_come: bool = False) -> None:
        """Refuse, and end the connection, since the rest of the body will not be read."""
        self.refused = True
        if self._answering:
            return
        close = [(b"connection", b"close")]
        await send_error(self._send, status, sentence, headers=close, more_body=True)
        if more_to_come:
            await self._linger()
        await self._send({"type": "http.response.body", "body": b""})

    async def _linger(self) -> None:
        """Throw away some of what still comes: closing at once would reset the connection of a client that sends its
        whole body before it reads, and it would never see the answer."""
        left_bytes = LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while left_bytes > 0:
                    message = await self._receive()
                    left_bytes -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


def announced_bytes(scope: Scope) -> int:
    """Zero for a body whose length is not told, which is then counted, and for nonsense, which the parser refuses."""
    announced = [value for name, value in scope["headers"] if name == b"content-length"]
    return max((int(value) for value in announced if value.isdigit()), default=0)
