"""Rates that the router measures: prompt tokens of a fully loaded worker, and amounts that fade.

`ServiceRate` is how many prompt tokens per second one worker of a pool computes while it is fully loaded.

A worker with little to do shows its latency rather than its rate, so only intervals between two finished prompts that
began with a full window count. The rate is a ratio of sums in which old intervals fade, so that prompts that finish in
one engine step, or were cached, get the right weight.

If a short prompt finishes beside the first chunk of a long one, most of the work in that interval is counted only
later, with the long prompt. So no rate is given until several windows of tokens are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

HALF_LIFE_S = 30.0
LEAST_MEASURED_S = 1.0
LEAST_MEASURED_WINDOWS = 2
"""Windows to count on each worker before a rate is given. With less, it is chance: a step can be half a window."""


class ServiceRate:
    """The rate of the workers of one pool, assumed to be alike; each gets `window_tokens` at a time."""

    def __init__(self, clock: Callable[[], float], window_tokens: int) -> None:
        self._clock = clock
        self._least_tokens = LEAST_MEASURED_WINDOWS * window_tokens
        self._counted_tokens: dict[str, int] = {}
        """Tokens counted on each worker since the start."""
        self._intervals: dict[str, tuple[float, bool]] = {}
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens per second of one worker; None until enough was measured."""
        enough = sum(self._counted_tokens.values()) >= self._least_tokens * len(self._counted_tokens)
        return self._tokens / self._seconds if enough and self._seconds >= LEAST_MEASURED_S else None

    def begin(self, worker_id: str, full: bool) -> None:
        """Start an interval: a worker begins to compute, or continues after a prompt. `full`: its window was full."""
        self._intervals[worker_id] = (self._clock(), full)

    def finished(self, worker_id: str, tokens: int) -> None:
        """Record that a prompt of this many tokens is computed; call `begin` next."""
        began_s, full = self._intervals.pop(worker_id, (0.0, False))
        if not full:
            return
        elapsed_s = self._clock() - began_s
        fade = 0.5 ** (elapsed_s / HALF_LIFE_S)
        self._tokens = self._tokens * fade + tokens
        self._seconds = self._seconds * fade + elapsed_s
        self._counted_tokens[worker_id] = self._counted_tokens.get(worker_id, 0) + tokens

    def forget_all_but(self, worker_ids: Sequence[str]) -> None:
        """Forget the workers that are none of these; their ids are never used again."""
        if len(self._counted_tokens) > len(worker_ids):
            self._counted_tokens = {one: self._counted_tokens[one] for one in worker_ids if one in self._counted_tokens}

    def dropped(self, worker_id: str) -> None:
        """Record that a prompt was aborted: how much of it was computed is unknown, so the interval does not count."""
        self._intervals.pop(worker_id, None)


class FadingAmount:
    """An amount that decays exponentially with a time constant of `window_s` seconds."""

    def __init__(self, clock: Callable[[], float], window_s: float) -> None:
        self._clock = clock
        self._window_s = window_s
        self._value = 0.0
        self._at_s = clock()

    def add(self, amount: float) -> None:
        """Add to the amount; what was added earlier has decayed since."""
        self._value = self.amount + amount
        self._at_s = self._clock()

    @property
    def per_s(self) -> float:
        """The rate at which it was added within about the window."""
        return self.amount / self._window_s

    @property
    def amount(self) -> float:
        """What is left of all that was added."""
        return self._value * math.exp((self._at_s - self._clock()) / self._window_s)
