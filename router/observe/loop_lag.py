"""Measures how late the router's event loop is: while it is blocked, all streams stand still."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LOOK_EVERY_S = 0.1
WINDOW_S = 60.0


class LoopLag(Collector):
    """The longest delay of the last minute, as a gauge; `watch` must run in the loop."""

    def __init__(self) -> None:
        self._lags_s: deque[tuple[float, float]] = deque()
        self._looked_s: float | None = None

    async def watch(self) -> None:
        """Measure every tenth of a second, until cancelled."""
        try:
            while True:
                self._looked_s = time.monotonic()
                due_s = self._looked_s + LOOK_EVERY_S
                await asyncio.sleep(LOOK_EVERY_S)
                self.note(time.monotonic(), time.monotonic() - due_s)
        finally:
            self._looked_s = None

    def note(self, now_s: float, lag_s: float) -> None:
        """Record a delay; forget those that are older than a minute, or shorter than this one."""
        while self._lags_s and (self._lags_s[0][0] < now_s - WINDOW_S):
            self._lags_s.popleft()
        while self._lags_s and self._lags_s[-1][1] <= lag_s:
            self._lags_s.pop()
        self._lags_s.append((now_s, lag_s))

    @property
    def silent_s(self) -> float:
        """Seconds that the loop is late now; 0 if nothing watches.

        Any thread may ask, since a stuck loop cannot answer.
        """
        looked_s = self._looked_s
        return 0.0 if looked_s is None else max(0.0, time.monotonic() - looked_s - LOOK_EVERY_S)

    @property
    def worst_s(self) -> float:
        """Longest delay of the last minute, in seconds; 0 before the first measurement."""
        return self._lags_s[0][1] if self._lags_s else 0.0

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge; prometheus-client calls it at each scrape."""
        yield GaugeMetricFamily(
            "ridgeline_loop_lag_seconds",
            "Longest time that the router's event loop was blocked within the last minute; every stream stands still "
            "meanwhile",
            value=self.worst_s,
        )
