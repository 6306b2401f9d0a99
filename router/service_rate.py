"""How many prompt tokens per second one worker of a pool computes, measured while it has all it may have.

A worker with little to do shows its latency, not its rate, so only intervals between two finished prompts that began
with a full window count. The measurement is a ratio of sums, in which old intervals fade: prompts that finish in one
engine step, or were cached, weigh right.
"""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_S = 30.0
LEAST_MEASURED_S = 1.0
"""Less than this is chance."""


class ServiceRate:
    """Of the workers of one pool, which are taken to be alike."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._intervals: dict[str, tuple[float, bool]] = {}
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of one worker; None before enough was measured."""
        return self._tokens / self._seconds if self._seconds >= LEAST_MEASURED_S else None

    def begin(self, worker_id: str, full: bool) -> None:
        """A worker begins to compute, or goes on after a finished prompt; `full` if it was given all it may have."""
        self._intervals[worker_id] = (self._clock(), full)

    def finished(self, worker_id: str, tokens: int) -> None:
        """A prompt of so many tokens is computed; `begin` comes next."""
        began_s, full = self._intervals.pop(worker_id, (0.0, False))
        if not full:
            return
        elapsed_s = self._clock() - began_s
        fade = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + elapsed_s

    def dropped(self, worker_id: str) -> None:
        """A prompt was given up: what was computed for it is unknown, so this interval says nothing."""
        self._intervals.pop(worker_id, None)
