"""How many prompt tokens per second one worker of a pool computes, measured while it has all it may have.

A worker with little to do shows its latency, not its rate, so only intervals between two finished prompts that began
with a full window count. The measurement is a ratio of sums, in which old intervals fade: prompts that finish in one
engine step, or were cached, weigh right.

A short prompt that finishes beside the first chunk of a long one ends an interval in which most of the work is not
counted yet: it comes with the long one. So nothing is said before several windows of tokens are counted.
"""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_S = 30.0
LEAST_MEASURED_S = 1.0
LEAST_MEASURED_WINDOWS = 2
"""Of each worker. Less than one or the other is chance: what is not counted yet is one engine step, half a window."""


class ServiceRate:
    """Of the workers of one pool, which are taken to be alike; each is given `window_tokens` at a time."""

    def __init__(self, clock: Callable[[], float], window_tokens: int) -> None:
        self._clock = clock
        self._least_tokens = LEAST_MEASURED_WINDOWS * window_tokens
        self._counted_tokens: dict[str, int] = {}
        """Of each worker, since the beginning."""
        self._intervals: dict[str, tuple[float, bool]] = {}
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of one worker; None before enough was measured."""
        enough = sum(self._counted_tokens.values()) >= self._least_tokens * len(self._counted_tokens)
        return self._tokens / self._seconds if enough and self._seconds >= LEAST_MEASURED_S else None

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
        self._counted_tokens[worker_id] = self._counted_tokens.get(worker_id, 0) + tokens

    def dropped(self, worker_id: str) -> None:
        """A prompt was given up: what was computed for it is unknown, so this interval says nothing."""
        self._intervals.pop(worker_id, None)
