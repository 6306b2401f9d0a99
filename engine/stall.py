"""Distinguishes a hung engine from an idle one.

`engine.vllm_engine` feeds the watch; `worker_runtime.host` reads it.

An engine process can hang without ending: stopped by a signal, or waiting for a device or a lock. From outside this
shows only as work without reported steps. Work may leave before the engine counts as stalled, since clients give up, so
the time is added up over all work until a step is reported. A running engine reports a step for any work it is given,
and idle time does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class StallWatch:
    """Measures how long work has been waiting for a step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited_s = 0.0
        """Seconds before `_since_s` in which work got no step."""
        self._since_s = clock()

    def moved(self) -> None:
        """Record that the engine has reported a step."""
        self._waited_s = 0.0
        self._since_s = self._clock()

    def work_begins(self) -> None:
        """Record that the engine gets its first work after being idle."""
        self._since_s = self._clock()

    def work_ends(self) -> None:
        """Record that the last work has left, finished or not."""
        self._waited_s += self._clock() - self._since_s

    def stalled_s(self, *, has_work: bool) -> float:
        """Return the seconds with work since the last step, including the time until now if it `has_work`."""
        return self._waited_s + (self._clock() - self._since_s if has_work else 0.0)
