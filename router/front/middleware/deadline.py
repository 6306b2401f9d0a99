"""Reads the header `x-ridgeline-timeout-s`, the time that a client allows for one request."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Final

from router.front.http.context import current
from router.front.http.errors import send_error
from router.front.http.types import Asgi, Receive, Scope, Send

HEADER: Final = b"x-ridgeline-timeout-s"


class Deadline:
    """Records each request's own deadline, and refuses an invalid one with 400."""

    def __init__(self, app: Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        given = dict(scope.get("headers", ())).get(HEADER) if scope["type"] == "http" else None
        if given is not None:
            timeout_s = _positive_seconds(given)
            if timeout_s is None:
                name = HEADER.decode()
                sentence = f"{name} must be a number of seconds above 0, not {given.decode('latin-1')!r}"
                await send_error(send, HTTPStatus.BAD_REQUEST, sentence, param=name)
                return
            current().timeout_s = timeout_s
        await self._app(scope, receive, send)


def _positive_seconds(text: bytes) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None
