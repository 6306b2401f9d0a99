"""Decides now and then how many workers of mode `adaptive` should favour which phase. No clock and no I/O of its own.

Told of prompts by `router.flow.choice`, which asks for the workers' favours, and of answers by `router.flow.placement`.
The loop is slow and lazy: at most once in `INTERVAL_S`, when a prompt is to be placed, it compares what the fleet holds
in its present shape with what it would hold in the best one (`router.fleet.shape`). What keeps it from changing its
mind:

- nothing is changed while all is well: the load is below `LEAST_USE` of what the present shape holds, and at least
  `LEAST_KEPT` of the answers kept their limits;
- another shape must hold `MORE` times as much, at `AGREEING` readings one after the other.
"""

from __future__ import annotations

import logging
import math
from typing import Final

import msgspec

from contracts.vocabulary import Phase, RebalanceMode
from router.fleet.shape import Traffic, Workers, best_shape, held_per_s

logger = logging.getLogger(__name__)


INTERVAL_S: Final = 10.0
AGREEING: Final = 2
LEAST_USE: Final = 0.5
LEAST_KEPT: Final = 0.9
MORE: Final = 1.15
LEAST_COUNTED: Final = 8
"""Prompts in an interval, or answers, below which it says nothing."""
WEIGHT: Final = 0.05
"""The weight of the newest request in a mean."""


class Change(msgspec.Struct, frozen=True):
    """Another number of workers should favour prefill."""

    prefill_workers: int
    workers: int
    reason: str

    @property
    def sentence(self) -> str:
        """What should be, and the numbers that led to it."""
        if not self.prefill_workers:
            return f"no worker favours a phase: {self.reason}"
        decode_workers = self.workers - self.prefill_workers
        return (
            f"{self.prefill_workers} of {self.workers} workers favour prefill, {decode_workers} decode: {self.reason}"
        )


class _Mean(msgspec.Struct):
    """The mean request of late; the limits by their inverses, which are 0 without a limit."""

    requests: int = 0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    per_ttft_limit: float = 0.0
    per_tpot_limit: float = 0.0

    def add(self, prompt_tokens: float, output_tokens: float, ttft_limit_s: float, tpot_limit_s: float) -> None:
        self.requests += 1
        weight = max(WEIGHT, 1 / self.requests)
        self.prompt_tokens += weight * (prompt_tokens - self.prompt_tokens)
        self.output_tokens += weight * (output_tokens - self.output_tokens)
        self.per_ttft_limit += weight * (1 / ttft_limit_s - self.per_ttft_limit)
        self.per_tpot_limit += weight * (1 / tpot_limit_s - self.per_tpot_limit)

    def traffic(self, requests_per_s: float) -> Traffic:
        return Traffic(
            requests_per_s,
            self.prompt_tokens,
            max(1.0, self.output_tokens),
            1 / self.per_ttft_limit if self.per_ttft_limit else math.inf,
            1 / self.per_tpot_limit if self.per_tpot_limit else math.inf,
        )


class Rebalancer:
    """The shape that a fleet has, and the one that it should have."""

    def __init__(self, mode: RebalanceMode = "on") -> None:
        self._mode = mode
        self._mean = _Mean()
        self._prompts = 0
        """Since the last reading, as are the answers."""
        self._answers = 0
        self._kept = 0
        self._read_s: float | None = None
        self._agreed: tuple[int, int] = (0, 0)
        """The shape that the last readings wanted, and how many did."""
        self._of = 0
        """The number of workers that the shape is for."""
        self.prefill_workers = 0
        """How many favour prefill, the others decode; 0: none favours anything."""
        self.last: Change | None = None
        """The latest change, or what was advised."""
        self._favours: dict[str, Phase] = {}
        self._favours_of: tuple[int, list[str]] = (0, [])
        """The shape and the workers that `_favours` is for."""

    def asked(self, prompt_tokens: float, output_tokens: float, ttft_limit_s: float, tpot_limit_s: float) -> None:
        """Count a prompt that has been placed, with the expected length of its answer and its limits."""
        self._prompts += 1
        self._mean.add(prompt_tokens, output_tokens, ttft_limit_s, tpot_limit_s)

    def answered(self, *, kept: bool) -> None:
        """Count an answer, and whether it kept its limits."""
        self._answers += 1
        self._kept += kept

    def favours(self, worker_ids: list[str]) -> dict[str, Phase]:
        """Return the phase that each of these workers favours; empty if none favours anything.

        The same workers always get the same phases, and a change of shape moves as few as possible.
        """
        prefill_workers = self._fitted(len(worker_ids))
        if self._favours_of != (prefill_workers, worker_ids):
            self._favours_of = prefill_workers, [*worker_ids]
            self._favours = {
                name: "prefill" if place < prefill_workers else "decode"
                for place, name in enumerate(sorted(worker_ids) if prefill_workers else ())
            }
        return self._favours

    def read(self, now_s: float, workers: Workers) -> Change | None:
        """Return a change if one is due now, after making it in mode `on`."""
        if self._mode == "off":
            return None
        self.prefill_workers, self._of = self._fitted(workers.number), workers.number
        if self._read_s is None or now_s - self._read_s >= 10 * INTERVAL_S:  # nothing came for long: begin anew
            self._begin(now_s)
            return None
        if now_s - self._read_s < INTERVAL_S or self._prompts < LEAST_COUNTED:
            return None
        traffic = self._mean.traffic(self._prompts / (now_s - self._read_s))
        change = self._wanted(workers, traffic)
        self._begin(now_s)
        wanted, readings = self._agreed
        if change is None:
            self._agreed = (self.prefill_workers, 0)
            return None
        self._agreed = (change.prefill_workers, readings + 1 if wanted == change.prefill_workers else 1)
        if self._agreed[1] < AGREEING or (self._mode == "advise" and change.prefill_workers == self._advised):
            return None
        self.last = change
        if self._mode == "on":
            self.prefill_workers = change.prefill_workers
        # A change is rare and an operator's business, so it is shown by default.
        logger.warning("rebalancing %s %s", "advises" if self._mode == "advise" else "from now on", change.sentence)
        return change

    @property
    def _advised(self) -> int | None:
        return self.last.prefill_workers if self.last else None

    def _begin(self, now_s: float) -> None:
        self._read_s, self._prompts, self._answers, self._kept = now_s, 0, 0, 0

    def _fitted(self, workers: int) -> int:
        """Return the shape for another number of workers, of which some have come or gone."""
        if not self.prefill_workers or workers < 2:
            return 0
        if workers == self._of:
            return self.prefill_workers
        return min(workers - 1, max(1, round(self.prefill_workers * workers / self._of)))

    def _wanted(self, workers: Workers, traffic: Traffic) -> Change | None:
        now = held_per_s(workers, traffic, self.prefill_workers)
        best = best_shape(workers, traffic)
        most = held_per_s(workers, traffic, best)
        if best == self.prefill_workers or most < MORE * now:
            return None
        kept = self._kept / self._answers if self._answers >= LEAST_COUNTED else 1.0
        if traffic.requests_per_s < LEAST_USE * now and kept >= LEAST_KEPT:
            return None
        size = f"{traffic.prompt_tokens:.0f} tokens in and {traffic.output_tokens:.0f} out"
        answered = f", {kept:.0%} of answers within limits" if self._answers >= LEAST_COUNTED else ""
        reason = (
            f"{traffic.requests_per_s:.3g} requests/s of {size}{answered}; TTFT {traffic.ttft_limit_s:.3g} s and TPOT "
            f"{1e3 * traffic.tpot_limit_s:.3g} ms would hold up to {most:.3g} requests/s, and now {now:.3g}"
        )
        return Change(best, workers.number, reason)
