"""Waits for an answer for so many seconds in which this process ran and could have heard it.

A driver that stood still (SIGSTOP, `docker pause`, swap, one long call) would otherwise find all its questions overdue
at once when it goes on, before it reads the answers that are already there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

LISTEN_S = 0.5
"""The wait is made of parts of this length, each of which counts as that long however late it ends: a pause of any
length costs one part, and a loop that is slow costs patience only."""
T = TypeVar("T")


async def answered(asked: Awaitable[T], within_s: float) -> T:
    """Return the answer. Raises TimeoutError if there is none in time, and then no longer waits for it."""
    answer = asyncio.ensure_future(asked)
    try:
        left_s = within_s
        while left_s > 0.0:
            part_s = min(left_s, LISTEN_S)
            await asyncio.wait((answer,), timeout=part_s)
            if answer.done():
                return answer.result()
            left_s -= part_s
        raise TimeoutError
    finally:
        answer.cancel()
