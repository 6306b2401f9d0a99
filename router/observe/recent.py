"""The sequences that ended within the last minute, so that latencies and attainment are exact and not from buckets."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ridgeline.router.observe.timeline import Outcome, RequestTimeline

WINDOW_S: Final = 60.0
MOST: Final = 20_000
"""Sequences that are kept, about 2 MB: more than 300 a second, of which the latest are enough for a quantile."""


class Ended(NamedTuple):
    """A sequence that has ended; None where there was no such latency, or no limit of it."""

    at_s: float
    finished: bool
    ttft_s: float | None
    tpot_s: float | None
    ttft_ok: bool | None
    tpot_ok: bool | None

    @property
    def met(self) -> bool | None:
        """Whether it has met each of its limits; None without any."""
        known = [ok for ok in (self.ttft_ok, self.tpot_ok) if ok is not None]
        return all(known) if known else None


@dataclass(frozen=True)
class Recent:
    """Sequences that ended within a while. A cancelled one counts by the latencies that it had."""

    seconds: float
    """How long it is that they ended in."""
    ended: Sequence[Ended]

    def ttft_s(self, quantile: float) -> float | None:
        """Return a quantile of TTFT; None without any."""
        return _quantile([one.ttft_s for one in self.ended if one.ttft_s is not None], quantile)

    def tpot_s(self, quantile: float) -> float | None:
        """Return a quantile of TPOT; None without any."""
        return _quantile([one.tpot_s for one in self.ended if one.tpot_s is not None], quantile)

    def attainment(self, met: Callable[[Ended], bool | None]) -> float | None:
        """Return the share of those with a limit that have met it; None without any."""
        known = [ok for one in self.ended if (ok := met(one)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def goodput_per_s(self) -> float | None:
        """Finished sequences a second that met each of their limits; None if none has a limit."""
        if all(one.met is None for one in self.ended):
            return None
        return sum(one.finished and one.met is not False for one in self.ended) / self.seconds


class RecentSequences:
    """Keeps them. `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ended: deque[Ended] = deque(maxlen=MOST)

    def add(self, timeline: RequestTimeline, outcome: Outcome) -> None:
        """Keep a sequence that has ended. One that failed has missed its limits; one that was cancelled, none."""
        failed = outcome == "failed"
        ttft_ok = _kept(timeline.ttft_s, timeline.ttft_limit_s, failed)
        tpot_ok = _kept(timeline.tpot_s, timeline.tpot_limit_s, failed)
        finished = outcome == "finished"
        self._ended.append(Ended(self._clock(), finished, timeline.ttft_s, timeline.tpot_s, ttft_ok, tpot_ok))

    def now(self) -> Recent:
        """Return those of the last minute."""
        now_s = self._clock()
        while self._ended and self._ended[0].at_s < now_s - WINDOW_S:
            self._ended.popleft()
        kept_s = now_s - self._ended[0].at_s if len(self._ended) == MOST else now_s - self._began_s
        return Recent(max(1.0, min(WINDOW_S, kept_s)), tuple(self._ended))


def _kept(seconds: float | None, limit_s: float, failed: bool) -> bool | None:
    if math.isinf(limit_s) or (seconds is None and not failed):
        return None
    return not failed and seconds is not None and seconds <= limit_s


def _quantile(values: list[float], quantile: float) -> float | None:
    """Return the smallest value that so large a part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(quantile * len(values)) - 1)] if values else None
