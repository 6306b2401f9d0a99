"""How often, and after how long, something that died is started again. Used by `cluster.runtime.supervisor`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

LONGEST_DELAY_S = 30.0


class RestartBudget:
    """How often one worker may be started again; it serves when this is made.

    Time counts only while it serves: one that takes minutes to start and dies at its first request dies as often within
    the window as one that starts at once.
    """

    def __init__(self, max_restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._clock = clock
        self._starts_s: deque[float] = deque()
        """By the time it had served before each."""
        self._served_s = 0.0
        self._serves_since_s: float | None = clock()

    def serves(self) -> None:
        """Note that the worker serves again."""
        self._serves_since_s = self._clock()

    def next_delay_s(self) -> float | None:
        """Note that the worker is lost, or could not start, and return how long to wait before the next start: 0, 1, 2,
        4, ... seconds, or None if there were too many of late.

        0, 1, 2, 4, ... seconds; None if there were too many of late.
        """
        if self._serves_since_s is not None:
            self._served_s += self._clock() - self._serves_since_s
            self._serves_since_s = None
        now_s = self._served_s
        while self._starts_s and now_s - self._starts_s[0] >= self._window_s:
            self._starts_s.popleft()
        already = len(self._starts_s)
        if already >= self._max_restarts:
            return None
        self._starts_s.append(now_s)
        return 0.0 if already == 0 else min(2.0 ** (already - 1), LONGEST_DELAY_S)
