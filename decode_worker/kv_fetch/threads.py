"""The threads on which pulls run, in two pools: one for complete hand-offs, one for those that overlap their prefill.

An overlapping pull keeps its thread for the rest of the prefill, mostly asleep. A complete hand-off takes milliseconds
and must not wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from ridgeline.kv_transfer.interfaces import Pull

MAX_CONCURRENT_FETCHES: Final = 8
"""Concurrent pulls of complete hand-offs; each holds at most one frame in memory."""
MAX_CONCURRENT_OVERLAPS: Final = 32
"""Concurrent pulls that overlap their prefill; each needs as much memory once blocks come. Further pulls wait for a
thread, behind prefills that may take long: two prefill workers may announce so many prompts at a time."""


class FetchThreads:
    """Two bounded pools of threads, started on demand."""

    def __init__(self, name: str) -> None:
        """`name` is the prefix of the threads' names."""
        self._whole = ThreadPoolExecutor(MAX_CONCURRENT_FETCHES, thread_name_prefix=name)
        self._overlapping = ThreadPoolExecutor(MAX_CONCURRENT_OVERLAPS, thread_name_prefix=f"{name}-overlap")

    async def run(self, pull: Pull, work: Callable[[], None], stop: Callable[[], None]) -> None:
        """Await `work` on a thread of the pool for this kind of pull.

        If cancelled, call `stop` and return only when the thread has ended.
        """
        running = (self._overlapping if pull.overlaps else self._whole).submit(work)
        ended = asyncio.wrap_future(running)
        try:
            await asyncio.wait((ended,))  # unlike awaiting it, this leaves it running when we are cancelled
        except asyncio.CancelledError:
            stop()
            running.cancel()  # succeeds only if no thread has taken it yet
            while not ended.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((ended,))
            if not ended.cancelled():
                ended.exception()  # retrieve the result; how it ended no longer matters
            raise
        ended.result()

    def close(self) -> None:
        """Start no more work. Calling it again does nothing."""
        for threads in (self._whole, self._overlapping):
            threads.shutdown(wait=False, cancel_futures=True)
