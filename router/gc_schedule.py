"""Schedules full passes of Python's garbage collector for moments when few streams are active.

A stream is about 400 objects that the collector tracks. A pass over those of 2,000 streams takes half a second, in
which no token is sent, and Python begins one each time their number has grown by a quarter. It frees nothing that way:
a request leaves no cycle behind. So Python collects young generations only, and all objects when this says so.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import Final

import psutil

FEW_STREAMS: Final = 200
"""A pass over all objects of so many takes about 0.05 s."""
LOOK_EVERY_S: Final = 1.0
PAUSE_S: Final = 30.0
"""Least time between two passes."""
MOST_GROWTH_BYTES: Final = 256 << 20
"""Growth of the process's memory after which a pass is made, however many streams it delays."""
NEVER: Final = 2**31 - 1
"""Threshold of a generation that Python then does not collect by itself."""
logger = logging.getLogger(__name__)


class GcSchedule:
    """Takes full collections over from Python, for the whole process, from `start` to `stop`."""

    def __init__(
        self,
        streams: Callable[[], int],
        *,
        look_every_s: float = LOOK_EVERY_S,
        pause_s: float = PAUSE_S,
        most_growth_bytes: int = MOST_GROWTH_BYTES,
    ) -> None:
        """`streams` returns how many would stand still during a pass."""
        self._streams = streams
        self._look_every_s = look_every_s
        self._pause_s = pause_s
        self._most_growth_bytes = most_growth_bytes
        self._process = psutil.Process()
        self._thresholds = gc.get_threshold()
        self._grown_from_bytes = 0
        self._looked_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Freeze what there is, which stays, and watch from the running event loop.

        vLLM's modules are 600,000 objects: each pass over them would take 0.3 s.
        """
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        self._note()
        self._watching = asyncio.create_task(self._watch(), name="gc-schedule")

    def stop(self) -> None:
        """Leave the full collections to Python again."""
        if self._watching is not None:
            self._watching.cancel()
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            self._collect_if_due()

    def _collect_if_due(self) -> None:
        began_s, streams = time.monotonic(), self._streams()
        if not gc.get_count()[2] or began_s < self._looked_s + self._pause_s:
            return  # nothing has grown old since the last time, or that was just now
        grown_bytes = self._rss_bytes() - self._grown_from_bytes
        if streams > FEW_STREAMS and grown_bytes <= self._most_growth_bytes:
            return
        found = gc.collect()
        self._note()
        if streams > FEW_STREAMS:
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
