"""How much work a request's body may be to read: counted in C before anything of it is parsed.

A body of a few megabytes may hold millions of numbers, or hundreds of thousands of messages, each of which pydantic
looks at in the one event loop: seconds in which every stream stands still. So the parts are counted first, by what each
costs; an ordinary body of that length (a long text) costs next to nothing. Called by `router.app` inside the guard.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from router.asgi import Asgi, Message

MAX_COST: Final = 1_000_000
"""About 0.15 s of the loop. As numbers: a context of a million tokens, or eight of 128,000."""
STRING_COST: Final = 20
OBJECT_COST: Final = 100
LIST_COST: Final = 2
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def cost(body: bytes) -> int:
    """Of a JSON text: one for each number, and what strings, lists and objects cost more than that."""
    if _cost(body, body.count(b'"') // 2) <= MAX_COST:
        return _cost(body, body.count(b'"') // 2)  # what looks like parts within strings is counted too
    bare, strings = _STRING.subn(b"", body)
    return _cost(bare, strings)


def _cost(body: bytes, strings: int) -> int:
    return body.count(b",") + STRING_COST * strings + OBJECT_COST * body.count(b"{") + LIST_COST * body.count(b"[")


def with_whole_bodies(app: Asgi) -> Asgi:
    """The app, which gets bodies in one piece, and is called when it is there."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if not _may_have_body(scope):
            await app(scope, receive, send)
            return
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                await app(scope, _replaying(message, receive), send)
                return
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        parts.clear()
        await app(scope, _replaying({"type": "http.request", "body": body, "more_body": False}, receive), send)

    return wrapped


def with_bounded_json(app: Asgi) -> Asgi:
    """The app, with 400 for a body that would cost too much. Bodies have come in one piece."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if not _may_have_body(scope):
            await app(scope, receive, send)
            return
        message = await receive()
        found = cost(message.get("body", b""))
        if found > MAX_COST:
            await _refuse(send, found)
            return
        await app(scope, _replaying(message, receive), send)

    return wrapped


def _may_have_body(scope: Any) -> bool:
    return scope["type"] == "http" and scope["method"] in ("POST", "PUT", "PATCH")


def _replaying(first: Message, receive: Any) -> Any:
    waiting = [first]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


async def _refuse(send: Any, found: int) -> None:
    sentence = (
        f"The request body has too many parts to be read beside others: {found} counting each number once, each string "
        f"{STRING_COST} times and each object {OBJECT_COST} times, where {MAX_COST} are allowed. Send several requests."
    )
    error = {"message": sentence, "type": "BadRequestError", "param": None, "code": 400}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
