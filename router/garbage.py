"""When Python looks through all objects of a router's process for cyclic garbage: where it delays few streams.

A stream is about 400 objects that Python's collector tracks. To look through those of 2,000 streams takes half a
second, in which no token is passed on, and Python does it each time their number has grown by a quarter. It frees
nothing that way: an answer leaves no cycle behind, and what is in none is freed at once. So Python looks by itself
through young objects only, and through all of them when this says so.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil

FEW_STREAMS: Final = 200
"""Looking through all objects of so many takes about 0.05 s."""
LOOK_EVERY_S: Final = 1.0
PAUSE_S: Final = 30.0
"""Least time between two looks through all objects."""
MOST_GROWTH_BYTES: Final = 256 << 20
"""Memory by which the process may grow before all objects are looked through, however many streams that delays."""
NEVER: Final = 2**31 - 1
"""Threshold of a generation that Python then does not look through by itself."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """When to look through all objects; the times are in seconds."""

    few_streams: int = FEW_STREAMS
    look_every_s: float = LOOK_EVERY_S
    pause_s: float = PAUSE_S
    most_growth_bytes: int = MOST_GROWTH_BYTES


class GarbageWatch:
    """Takes Python's full collections over, for the whole process, from `start` to `stop`."""

    def __init__(self, streams: Callable[[], int], limits: Limits | None = None) -> None:
        """`streams` returns how many would stand still meanwhile."""
        self._streams = streams
        self._limits = limits or Limits()
        self._process = psutil.Process()
        self._thresholds = gc.get_threshold()
        self._grown_from_bytes = 0
        self._looked_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Freeze what there is, which stays, and watch from the running event loop.

        vLLM's modules are 600,000 objects: looking at them again and again would take 0.3 s each time.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        self._note()
        self._watching = asyncio.create_task(self._watch(), name="garbage")

    def stop(self) -> None:
        """Leave the full collections to Python again."""
        if self._watching is not None:
            self._watching.cancel()
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._limits.look_every_s)
            self._collect_if_due()

    def _collect_if_due(self) -> None:
        began_s, streams = time.monotonic(), self._streams()
        if not gc.get_count()[2] or began_s < self._looked_s + self._limits.pause_s:
            return  # nothing has grown old since the last time, or that was just now
        grown_bytes = self._rss_bytes() - self._grown_from_bytes
        if streams > self._limits.few_streams and grown_bytes <= self._limits.most_growth_bytes:
            return
        found = gc.collect()
        self._note()
        if streams > self._limits.few_streams:
            logger.warning(
                "%d streams stood still for %.1f s: the router had grown by %d MiB, and %d objects of it were garbage",
                streams,
                time.monotonic() - began_s,
                grown_bytes >> 20,
                found,
            )

    def _note(self) -> None:
        self._looked_s, self._grown_from_bytes = time.monotonic(), self._rss_bytes()

    def _rss_bytes(self) -> int:
        """Return the process's memory; as last known if it cannot be read, as without file descriptors."""
        try:
            return int(self._process.memory_info().rss)
        except (OSError, psutil.Error):
            return self._grown_from_bytes
