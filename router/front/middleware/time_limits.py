"""Reads the headers with which a client limits the time of one request, and refuses values that mean nothing.

`x-ridgeline-timeout-s` ends the request. `x-ridgeline-ttft-ms` and `x-ridgeline-tpot-ms` say how soon the first token
is wanted, and how soon each further one on average; they end nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from http import HTTPStatus
from typing import Final

from ridgeline.router.front.http.context import current
from ridgeline.router.front.http.errors import HttpRefusal
from ridgeline.router.settings import LONGEST_LIMIT_MS, SHORTEST_LIMIT_MS

TIMEOUT: Final = b"x-ridgeline-timeout-s"
TTFT: Final = b"x-ridgeline-ttft-ms"
TPOT: Final = b"x-ridgeline-tpot-ms"
SHOWN_CHARACTERS = 40
"""How much of a bad value its refusal repeats."""


def note_limits(headers: Iterable[tuple[bytes, bytes]], ttft_limit_s: float | None, tpot_limit_s: float | None) -> None:
    """Put a request's limits, by default these, into its context. Raises HttpRefusal (400)."""
    given, context = dict(headers), current()
    if (timeout := given.get(TIMEOUT)) is not None:
        context.timeout_s = read_timeout_s(timeout)
    ttft, tpot = given.get(TTFT), given.get(TPOT)
    context.ttft_limit_s = ttft_limit_s if ttft is None else read_limit_s(TTFT, ttft)
    context.tpot_limit_s = tpot_limit_s if tpot is None else read_limit_s(TPOT, tpot)


def read_timeout_s(value: bytes) -> float:
    """Return the seconds that a client allows for its request. Raises HttpRefusal."""
    timeout_s = _number(value)
    if timeout_s is None or timeout_s <= 0:
        raise _bad_header(TIMEOUT, "a number of seconds above 0", value)
    return timeout_s


def read_limit_s(name: bytes, value: bytes) -> float:
    """Return a limit that the header `name` gives in milliseconds, in seconds. Raises HttpRefusal."""
    limit_ms = _number(value)
    if limit_ms is None or not SHORTEST_LIMIT_MS <= limit_ms <= LONGEST_LIMIT_MS:
        raise _bad_header(
            name, f"a number of milliseconds from {SHORTEST_LIMIT_MS:g} to {LONGEST_LIMIT_MS:,.0f}", value
        )
    return limit_ms / 1e3


def _bad_header(name: bytes, must_be: str, value: bytes) -> HttpRefusal:
    shown = value[:SHOWN_CHARACTERS].decode("latin-1")
    param = name.decode()
    return HttpRefusal(HTTPStatus.BAD_REQUEST, f"{param} must be {must_be}, not {shown!r}", param=param)


def _number(text: bytes) -> float | None:
    """Return a decimal number; None if it is none, or not finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and b"_" not in text else None  # Python's own 1_000 is no one's number
