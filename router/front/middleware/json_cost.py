"""Limits the work of reading a request's body, which is estimated before any of it is parsed.

A body of a few megabytes may hold millions of numbers or hundreds of thousands of messages. pydantic checks each of
them in the one event loop, and for seconds every stream would stand still. So the parts are counted first, weighted by
cost; an ordinary body of that length (a long text) costs very little. This layer is behind the key guard.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from router.front.http.errors import send_error
from router.front.http.types import Asgi, Message, Receive, Scope, Send

MAX_COST: Final = 1_000_000
"""Largest cost, about 0.15 s of the loop. In numbers: a context of a million tokens, or eight of 128,000."""
STRING_COST: Final = 20
OBJECT_COST: Final = 100
LIST_COST: Final = 2
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def cost(body: bytes) -> int:
    """Estimate the cost of a JSON text: 1 for each number, and the weights above for strings, lists and objects."""
    if _cost(body, body.count(b'"') // 2) <= MAX_COST:
        return _cost(body, body.count(b'"') // 2)  # overestimates, because it also counts punctuation inside strings
    bare, strings = _STRING.subn(b"", body)
    return _cost(bare, strings)


def _cost(body: bytes, strings: int) -> int:
    return body.count(b",") + STRING_COST * strings + OBJECT_COST * body.count(b"{") + LIST_COST * body.count(b"[")


class WholeBodies:
    """Calls the app when a body is complete, and passes it on in one piece."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if not _may_have_body(scope):
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                await self._app(scope, _replaying(message, receive), send)
                return
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        parts.clear()
        await self._app(scope, _replaying({"type": "http.request", "body": body, "more_body": False}, receive), send)


class BoundedJson:
    """Refuses with 400 a body that would cost too much; expects bodies in one piece."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if not _may_have_body(scope):
            await self._app(scope, receive, send)
            return
        message = await receive()
        found = cost(message.get("body", b""))
        if found > MAX_COST:
            sentence = (
                f"The request body has too many parts to be read beside others: {found}, counting each number once, "
                f"each string {STRING_COST} times and each object {OBJECT_COST} times, where {MAX_COST} are allowed. "
                "Send several requests."
            )
            await send_error(send, HTTPStatus.BAD_REQUEST, sentence)
            return
        await self._app(scope, _replaying(message, receive), send)


def _may_have_body(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("POST", "PUT", "PATCH")


def _replaying(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
