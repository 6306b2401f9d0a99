"""How late the router's event loop is: while it is blocked, every stream of every client stands still."""

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
    """The worst of the last minute, as a gauge; `watch` must run in the loop."""

    def __init__(self) -> None:
        self._lags_s: deque[tuple[float, float]] = deque()

    async def watch(self) -> None:
        """Look every tenth of a second, until cancelled."""
        while True:
            due_s = time.monotonic() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self.note(time.monotonic(), time.monotonic() - due_s)

    def note(self, now_s: float, lag_s: float) -> None:
        """The loop came so late; what is older than a minute, or was less bad than this, is forgotten."""
        while self._lags_s and (self._lags_s[0][0] < now_s - WINDOW_S):
            self._lags_s.popleft()
        while self._lags_s and self._lags_s[-1][1] <= lag_s:
            self._lags_s.pop()
        self._lags_s.append((now_s, lag_s))

    @property
    def worst_s(self) -> float:
        """0 before the first look."""
        return self._lags_s[0][1] if self._lags_s else 0.0

    def collect(self) -> Iterator[Metric]:
        """One gauge."""
        yield GaugeMetricFamily(
            "ridgeline_loop_lag_seconds",
            "Longest that the router's event loop was late within the last minute",
            value=self.worst_s,
        )
