"""How long a client gives one request: the header `x-ridgeline-timeout-s`, read for every HTTP request."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any

from starlette.responses import JSONResponse

from router.asgi import Asgi

HEADER = b"x-ridgeline-timeout-s"
TIMEOUT_S: ContextVar[float | None] = ContextVar("timeout_s", default=None)
"""Seconds, or None; read where a request enters the router."""


def with_deadline(app: Asgi) -> Asgi:
    """An ASGI app that knows each request's own deadline, and refuses one that makes no sense with 400."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(HEADER) if scope["type"] == "http" else None
        if given is None:
            await app(scope, receive, send)
            return
        timeout_s = _positive_seconds(given)
        if timeout_s is None:
            message = f"{HEADER.decode()} must be a number of seconds above 0, not {given.decode('latin-1')!r}"
            error = {"message": message, "type": "BadRequestError", "param": HEADER.decode(), "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)
            return
        token = TIMEOUT_S.set(timeout_s)
        try:
            await app(scope, receive, send)
        finally:
            TIMEOUT_S.reset(token)

    return call


def _positive_seconds(text: bytes) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
