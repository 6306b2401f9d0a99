"""Tells an engine that stands still from one that is idle.

Kept by `engine.vllm_engine`, which feeds it; `worker_runtime.host` asks it.

An engine process can hang without ending: stopped by a signal, waiting for a device or a lock. From outside it shows
only in that steps are no longer reported while there is work. Work may leave before the engine is taken for stalled,
since clients do not wait for ever; so the time is added up over all work until a step is reported. An engine that runs
reports one for any work it is given, and rest counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StallWatch:
    """How long work has been waiting for a step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited_s = 0.0
        """Before `_since_s`, by work that has gone without a step."""
        self._since_s = clock()

    def moved(self) -> None:
        """The engine has reported a step."""
        self._waited_s = 0.0
        self._since_s = self._clock()

    def work_begins(self) -> None:
        """The engine gets its first work after a rest."""
        self._since_s = self._clock()

    def work_ends(self) -> None:
        """The last work has gone, done or not."""
        self._waited_s += self._clock() - self._since_s

    def stalled_s(self, *, has_work: bool) -> float:
        """Seconds with work since the last step, those of now included if there `has_work`."""
        return self._waited_s + (self._clock() - self._since_s if has_work else 0.0)
