"""Reads the headers with which a client limits the time of one request, and refuses values that mean nothing.

`x-ridgeline-timeout-s` ends the request. `x-ridgeline-ttft-ms` and `x-ridgeline-tpot-ms` say how soon the first token
is wanted, and how soon each further one on average; they end nothing.
"""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Final

from router.front.http.context import current
from router.front.http.errors import send_error
from router.front.http.types import Asgi, Receive, Scope, Send
from router.settings import LONGEST_LIMIT_MS, SHORTEST_LIMIT_MS

TIMEOUT: Final = b"x-ridgeline-timeout-s"
TTFT: Final = b"x-ridgeline-ttft-ms"
TPOT: Final = b"x-ridgeline-tpot-ms"
SHOWN_CHARACTERS = 40
"""How much of a bad value its refusal repeats."""


class BadHeader(ValueError):
    """A header's value means nothing; `name` is the header's."""

    def __init__(self, name: bytes, must_be: str, value: bytes) -> None:
        self.name = name.decode()
        super().__init__(f"{self.name} must be {must_be}, not {value[:SHOWN_CHARACTERS].decode('latin-1')!r}")


class TimeLimits:
    """Records each request's own limits, and refuses an invalid one with 400."""

    def __init__(self, app: Asgi, ttft_limit_s: float | None = None, tpot_limit_s: float | None = None) -> None:
        """The limits are those of requests without the header."""
        self._app = app
        self._ttft_limit_s = ttft_limit_s
        self._tpot_limit_s = tpot_limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request by the ASGI protocol."""
        if scope["type"] == "http":
            try:
                self._note(dict(scope.get("headers", ())))
            except BadHeader as bad:
                await send_error(send, HTTPStatus.BAD_REQUEST, str(bad), param=bad.name)
                return
        await self._app(scope, receive, send)

    def _note(self, headers: dict[bytes, bytes]) -> None:
        """Put the limits into the request's context. Raises BadHeader."""
        context = current()
        if (given := headers.get(TIMEOUT)) is not None:
            context.timeout_s = read_timeout_s(given)
        ttft, tpot = headers.get(TTFT), headers.get(TPOT)
        context.ttft_limit_s = self._ttft_limit_s if ttft is None else read_limit_s(TTFT, ttft)
        context.tpot_limit_s = self._tpot_limit_s if tpot is None else read_limit_s(TPOT, tpot)


def read_timeout_s(value: bytes) -> float:
    """Return the seconds that a client allows for its request. Raises BadHeader."""
    timeout_s = _number(value)
    if timeout_s is None or timeout_s <= 0:
        raise BadHeader(TIMEOUT, "a number of seconds above 0", value)
    return timeout_s


def read_limit_s(name: bytes, value: bytes) -> float:
    """Return a limit that the header `name` gives in milliseconds, in seconds. Raises BadHeader."""
    limit_ms = _number(value)
    if limit_ms is None or not SHORTEST_LIMIT_MS <= limit_ms <= LONGEST_LIMIT_MS:
        raise BadHeader(name, f"a number of milliseconds from {SHORTEST_LIMIT_MS:g} to {LONGEST_LIMIT_MS:,.0f}", value)
    return limit_ms / 1e3


def _number(text: bytes) -> float | None:
    """Return a decimal number; None if it is none, or not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and b"_" not in text else None  # Python's own 1_000 is no one's number
