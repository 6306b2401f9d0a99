"""Limits the work of reading a request's body, which is estimated before any of it is parsed.

A body of a few megabytes may hold millions of numbers or hundreds of thousands of messages. pydantic checks each of
them in the one event loop, and for seconds every stream would stand still. So the parts are counted first, weighted by
cost; an ordinary body of that length (a long text) costs very little.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from ridgeline.router.front.http.errors import HttpRefusal

MAX_COST: Final = 1_000_000
"""Largest cost, about 0.15 s of the loop. In numbers: a context of a million tokens, or eight of 128,000."""
STRING_COST: Final = 20
OBJECT_COST: Final = 100
LIST_COST: Final = 2
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def cost(body: bytes) -> int:
    """Estimate the cost of a JSON text: 1 for each number, and the weights above for strings, lists and objects."""
    most = _cost(body, body.count(b'"') // 2)  # an overestimate: it counts punctuation inside of strings too
    if most <= MAX_COST:
        return most
    bare, strings = _STRING.subn(b"", body)
    return _cost(bare, strings)


def _cost(body: bytes, strings: int) -> int:
    return body.count(b",") + STRING_COST * strings + OBJECT_COST * body.count(b"{") + LIST_COST * body.count(b"[")


def check_cost(body: bytes) -> None:
    """Raise HttpRefusal (400) if a body would cost too much."""
    if (found := cost(body)) > MAX_COST:
        raise HttpRefusal(
            HTTPStatus.BAD_REQUEST,
            f"The request body has too many parts to be read beside others: {found}, counting each number once, each "
            f"string {STRING_COST} times and each object {OBJECT_COST} times, where {MAX_COST} are allowed. Send "
            "several requests.",
        )
