"""The threads that pulls borrow: those that follow a growing prefill have their own.

A follower keeps its thread for the rest of that prefill, mostly asleep; a complete hand-off is a matter of milliseconds
and must not wait behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kv_transfer.interfaces import Pull, run_in_thread

MAX_CONCURRENT_FETCHES: Final = 8
"""Of complete hand-offs; each holds one frame at most."""
MAX_CONCURRENT_FOLLOWERS: Final = 8
"""Of growing ones; as much memory each. The others wait for their turn."""


class FetchThreads:
    """Two bounded pools of threads, started as they are needed."""

    def __init__(self, name: str) -> None:
        """`name`: what the threads' names begin with."""
        self._whole = ThreadPoolExecutor(MAX_CONCURRENT_FETCHES, thread_name_prefix=name)
        self._following = ThreadPoolExecutor(MAX_CONCURRENT_FOLLOWERS, thread_name_prefix=f"{name}-follow")

    async def run(self, pull: Pull, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """As `run_in_thread`, on a thread for this kind of pull."""
        await run_in_thread(self._following if pull.follows else self._whole, work, stop)

    def close(self) -> None:
        """Start nothing more. Idempotent."""
        for threads in (self._whole, self._following):
            threads.shutdown(wait=False, cancel_futures=True)
