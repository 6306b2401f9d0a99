"""How soon something that died is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

FIRST_REST_S = 30.0
WINDOW_S = 300.0
"""Of service, in which `supervision.max_restarts` are counted."""
LONGEST_REST_S = 300.0
"""Something that cannot run is tried again every five minutes at the least, as Kubernetes restarts a container that
crashes in a loop (CrashLoopBackOff): seldom enough to harm nobody, and soon enough after its cause is gone."""

ENOUGH_RESTS = 8
"""After fewer, the longest one is reached."""


class RestartBudget:
    """When one worker or router may be started again; it serves when this is made.

    Time counts only while it serves: one that takes minutes to start and dies at its first request dies as often within
    the window as one that starts at once.
    """

    def __init__(
        self,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        longest_rest_s: float = LONGEST_REST_S,
    ) -> None:
        self._longest_rest_s = longest_rest_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._starts_s: deque[float] = deque(maxlen=max_restarts + ENOUGH_RESTS)
        """By the time it had served before each."""
        self._served_s = 0.0
        self._serves_since_s: float | None = clock()

    def serves(self) -> None:
        """Note that the worker serves again."""
        self._serves_since_s = self._clock()

    @property
    def used_up(self) -> bool:
        """Whether it was lost, or could not start, more often of late than `max_restarts`."""
        return len(self._starts_s) > self._max_restarts

    def next_delay_s(self) -> float:
        """Note that the worker is lost, or could not start, and return how long to wait before the next start.

        0, 1, 2, 4, ... seconds; once it is used up, 30 s, 1 min, ... up to `longest_rest_s`.
        """
        if self._serves_since_s is not None:
            self._served_s += self._clock() - self._serves_since_s
            self._serves_since_s = None
        now_s = self._served_s
        while self._starts_s and now_s - self._starts_s[0] >= WINDOW_S:
            self._starts_s.popleft()
        already = len(self._starts_s)
        self._starts_s.append(now_s)
        if already >= self._max_restarts:
            return min(FIRST_REST_S * 2.0 ** (already - self._max_restarts), self._longest_rest_s)
        return 0.0 if already == 0 else min(2.0 ** (already - 1), FIRST_REST_S)
