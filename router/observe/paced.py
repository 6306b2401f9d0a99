"""Long work on the event loop, done in slices so that streams do not stand still meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Final, TypeVar

T = TypeVar("T")
SLICE_S: Final = 0.001
"""How long such work takes the loop before it gives way, for as long again: a token is late by no more than that."""


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, giving way to the event loop whenever making and using them has taken a slice."""
    await asyncio.sleep(0)  # what its caller has done until now is a slice too
    began_s = time.perf_counter()
    for item in items:
        yield item
        took_s = time.perf_counter() - began_s
        if took_s > SLICE_S:
            await asyncio.sleep(took_s)
            began_s = time.perf_counter()
