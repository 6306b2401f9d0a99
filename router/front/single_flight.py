"""One computation for many callers: concurrent callers share it, and a burst reuses the last result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")


BURST: Final = 4


class SingleFlight(Generic[T]):
    """Computes at most one answer at a time, and in the long run at most one in `every_s`.

    Occasional callers get a new answer each time: `burst` computations are allowed before the last one is reused.
    """

    def __init__(
        self,
        compute: Callable[[], Coroutine[Any, Any, T]],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        burst: int = BURST,
    ) -> None:
        self._compute = compute
        self._every_s = every_s
        self._clock = clock
        self._computing: asyncio.Task[T] | None = None
        self._burst = burst
        self._free = float(burst)
        self._counted_s = clock()

    def __call__(self) -> Awaitable[T]:
        """Return the answer, or raise what computing it raised. A caller that leaves does not end it for the others."""
        task = self._computing
        if task is None or (task.done() and self._may_compute()):
            task = self._computing = asyncio.create_task(self._compute(), name="single-flight")
            self._free -= 1
        return asyncio.shield(task)

    def _may_compute(self) -> bool:
        now_s = self._clock()
        self._free = min(self._burst, self._free + (now_s - self._counted_s) / self._every_s)
        self._counted_s = now_s
        return self._free >= 1

    def cancel(self) -> None:
        """End the computation in progress."""
        if self._computing is not None:
            self._computing.cancel()
