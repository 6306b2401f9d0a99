"""Tells an engine that stands still from one that is idle. Used by `engine.host`; fed by `engine.vllm_engine`.

An engine process can hang without ending: stopped by a signal, waiting for a device or a lock. From outside it shows
only in that steps are no longer reported while there is work.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StallWatch:
    """How long work has been waiting for a step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()

    def moved(self) -> None:
        """The engine has reported a step, or gets its first work after a rest."""
        self._since_s = self._clock()

    def stalled_s(self, *, has_work: bool) -> float:
        """Seconds since the last step while there is work; 0 without work."""
        return self._clock() - self._since_s if has_work else 0.0
