"""Decides now and then how many workers of mode `adaptive` should favour which phase. No clock and no I/O of its own.

Told of prompts by `ridgeline.router.flow.choice`, which asks for the workers' favours, and of answers by
`ridgeline.router.flow.placement`. The loop is slow and lazy: once in `INTERVAL_S`, when a prompt has been placed, it
compares what the fleet holds in its present shape with what it would hold in the best one
(`ridgeline.router.fleet.shape`). What keeps it from changing its mind:

- nothing is changed while all is well: the load is below `LEAST_USE` of what the present shape holds, and at least
  `LEAST_KEPT` of the answers kept their limits;
- a shape must hold `MORE` times as much as the present one at two readings, one after the other, and `LEAST_WORTH` of
  the load.

Without limits it compares how long requests take on average, and a shape must make that `MORE` times shorter.

A division is undone at two readings that say that limits have become so wide that it is of no use, or that without
limits none saves `LEAST_SAVED` of the time.

It is quick where waiting has no use: once the latest `TURNED_PROMPTS`, over `TURNED_S` at least, have limits alike that
hardly any of the `REMEMBERED` before them had, or come when nothing is known, no other limits count, and one reading is
enough. That happens once in `QUICK_AGAIN_S` at most.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import Phase, RebalanceMode
from ridgeline.router.fleet.adaptive import Wanted
from ridgeline.router.fleet.prediction import attended
from ridgeline.router.fleet.shape import Traffic, Workers, best_shape, held_per_s, mean_latency_s, needs_no_division

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0
LEAST_USE: Final = 0.7
LEAST_KEPT: Final = 0.9
MORE: Final = 1.15
LEAST_WORTH: Final = 0.2
"""The part of the load that a shape must hold to be worth a change. In a minute in which steps take hardly less than a
limit on TPOT, what shapes hold is next to nothing, and which one holds more of it is chance."""
LEAST_COUNTED: Final = 8
"""Prompts in an interval, or answers, below which it says nothing."""
KEPT_PART: Final = 0.75
"""The part with which what was counted before a reading still counts at the next one."""
ALIKE: Final = 1.25
"""Limits are alike if neither is more than this many times the other."""
TURNED_PROMPTS: Final = 6
TURNED_S: Final = 3.0
"""Prompts in a row with limits alike, and the time over which they have come, that say that the traffic has turned, if
their limits are new."""
REMEMBERED: Final = 32
NEW: Final = 1
"""Limits are new if at most so many of the `REMEMBERED` prompts before them had limits alike."""
QUICK_AGAIN_S: Final = 2 * INTERVAL_S
"""Time after a turn in which no other one counts, so that a client that changes its limits again and again does not
change the fleet each time."""
LEAST_DIVIDED: Final = 3
"""The fewest workers that are divided without limits: of two, prompts go to the one with fewer answers anyway."""
LEAST_SAVED: Final = 0.05
"""The part of the mean latency that a division without limits must save to be kept."""
LEAST_LIMITED: Final = (0.05, 0.15)
"""From the second of these parts of the requests on that have limits, what limits allow counts, and no longer the mean
latency; below the first it is the mean latency again. In between it stays, so that chance does not change it."""
LEAST_SPLIT: Final = 0.5
"""With fewer requests that may be split than this part, workers that favour a phase would be of no use."""


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


class _Counted(msgspec.Struct):
    """Sums over requests, the older ones with less weight; limits by their inverses, which are 0 without a limit."""

    seconds: float = 0.0
    """The time in which they came, as far as readings have ended it."""
    requests: float = 0.0
    limited: float = 0.0
    may_split: float = 0.0
    prompt_tokens: float = 0.0
    computed_tokens: float = 0.0
    attended_tokens: float = 0.0
    output_tokens: float = 0.0
    per_ttft_limit: float = 0.0
    per_tpot_limit: float = 0.0

    def add(self, wanted: Wanted, cached_tokens: float) -> None:
        self.requests += 1
        self.limited += wanted.limited
        self.may_split += wanted.may_split
        self.prompt_tokens += wanted.prompt_tokens
        self.computed_tokens += wanted.prompt_tokens - cached_tokens
        self.attended_tokens += attended(wanted.prompt_tokens, cached_tokens)
        self.output_tokens += wanted.output_tokens
        self.per_ttft_limit += 1 / wanted.ttft_limit_s
        self.per_tpot_limit += 1 / wanted.tpot_limit_s

    def age(self) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, KEPT_PART * getattr(self, name))

    def take_limits(self, latest: _Counted) -> None:
        """Forget all limits but those of the latest requests, which are counted already."""
        part = self.requests / latest.requests
        self.limited = part * latest.limited
        self.per_ttft_limit, self.per_tpot_limit = part * latest.per_ttft_limit, part * latest.per_tpot_limit

    @property
    def splits(self) -> bool:
        """Whether enough requests may be split for workers to be divided."""
        return self.may_split >= LEAST_SPLIT * self.requests

    def is_limited(self, before: bool) -> bool:
        """Return whether enough requests have limits for these to count; `before`: at the last reading."""
        return self.limited >= LEAST_LIMITED[not before] * self.requests

    def traffic(self, requests_per_s: float, *, limited: bool) -> Traffic:
        return Traffic(
            requests_per_s=requests_per_s,
            prompt_tokens=self.prompt_tokens / self.requests,
            computed_tokens=self.computed_tokens / self.requests,
            attended_tokens=self.attended_tokens / self.requests,
            output_tokens=max(1.0, self.output_tokens / self.requests),
            ttft_limit_s=self.requests / self.per_ttft_limit if limited and self.per_ttft_limit else math.inf,
            tpot_limit_s=self.requests / self.per_tpot_limit if limited and self.per_tpot_limit else math.inf,
        )


PerLimits = tuple[float, float]
"""1 / TTFT limit and 1 / TPOT limit of a request."""


def _are_alike(one: PerLimits, other: PerLimits) -> bool:
    (ttft, tpot), (other_ttft, other_tpot) = one, other
    return (
        ttft <= ALIKE * other_ttft
        and other_ttft <= ALIKE * ttft
        and tpot <= ALIKE * other_tpot
        and other_tpot <= ALIKE * tpot
    )


class _Turn:
    """The latest requests, as long as the limits of all of them are alike, and what limits there were before."""

    def __init__(self) -> None:
        self.latest = _Counted()
        self._limits: PerLimits = (0.0, 0.0)
        """Those of the first of the latest requests."""
        self._are_new = False
        self._since_s = math.inf
        self._taken_s = -math.inf
        self._before: deque[PerLimits] = deque(maxlen=REMEMBERED)

    def add(self, wanted: Wanted, now_s: float) -> None:
        """Count a request."""
        limits = 1 / wanted.ttft_limit_s, 1 / wanted.tpot_limit_s
        if not self.latest.requests or not _are_alike(limits, self._limits):
            self._before.extend([self._limits] * min(REMEMBERED, int(self.latest.requests)))
            self.latest, self._limits, self._since_s = _Counted(), limits, now_s
            self._are_new = sum(_are_alike(limits, before) for before in self._before) <= NEW
        self.latest.add(wanted, 0)

    def is_done(self, now_s: float) -> bool:
        """Return whether these are enough to say that the traffic has turned."""
        enough = self.latest.requests >= TURNED_PROMPTS and now_s - self._since_s >= TURNED_S
        return self._are_new and enough and now_s - self._taken_s >= QUICK_AGAIN_S

    def take(self, now_s: float) -> float:
        """Note that the turn has been read; return its requests/s."""
        self._are_new, self._taken_s = False, now_s
        return (self.latest.requests - 1) / (now_s - self._since_s)


class Rebalancer:
    """The shape that a fleet has, and the one that it should have."""

    def __init__(self, mode: RebalanceMode = "act") -> None:
        self._mode = mode
        self._counted = _Counted()
        self._turn = _Turn()
        self._prompts = 0
        """Since the last reading, as are the answers."""
        self._answers = 0
        self._within_limits = 0
        self._read_s = -math.inf
        self._limited = False
        """Whether limits counted at the last reading."""
        self._candidate: int | None = None
        """The shape that the last reading wanted."""
        self._advised: int | None = None
        self._decided: tuple[int, int] = (0, 0)
        """How many workers favour prefill, and of how many that was decided."""
        self._favours: dict[str, Phase] = {}
        self._favours_of: tuple[int, list[str]] = (0, [])
        """The shape and the workers that `_favours` is for."""

    def placed(self, wanted: Wanted, now_s: float, cached_tokens: float = 0) -> None:
        """Count a prompt that has been placed on a worker that is expected to have so many of its tokens.

        Neither limit may be less than an idle worker takes, or one request would weigh like thousands.
        """
        self._prompts += 1
        self._turn.add(wanted, now_s)
        self._counted.add(wanted, cached_tokens)

    def answered(self, *, within_limits: bool) -> None:
        """Count an answer, and whether it kept its limits."""
        self._answers += 1
        self._within_limits += within_limits

    def prefill_workers(self, workers: int) -> int:
        """Return how many of so many workers favour prefill, the others decode; 0: none favours anything.

        With more or fewer of them than when it was decided, about the same share does, and each phase has one.
        """
        prefill_workers, of = self._decided
        if not prefill_workers or workers < 2:
            return 0
        return min(workers - 1, max(1, round(prefill_workers * workers / of)))

    def favours(self, worker_ids: list[str]) -> dict[str, Phase]:
        """Return the phase that each of these workers favours; empty if none favours anything.

        The same workers always get the same phases: the first ones by their names favour prefill.
        """
        prefill_workers = self.prefill_workers(len(worker_ids))
        if self._favours_of != (prefill_workers, worker_ids):
            self._favours_of = prefill_workers, [*worker_ids]
            self._favours = {
                name: "prefill" if place < prefill_workers else "decode"
                for place, name in enumerate(sorted(worker_ids) if prefill_workers else ())
            }
        return self._favours

    @property
    def divides(self) -> bool:
        """Whether it has decided that workers favour phases."""
        return self._decided[0] > 0

    def due(self, now_s: float) -> bool:
        """Return whether it is time for a reading. After a long pause it begins anew."""
        if self._mode == "none":
            return False
        if now_s - self._read_s >= 10 * INTERVAL_S:
            self._counted, self._turn = _Counted(), _Turn()
            self._begin(now_s)
        waited = now_s - self._read_s >= INTERVAL_S and self._prompts >= LEAST_COUNTED
        return waited or self._turn.is_done(now_s)

    def read(self, now_s: float, workers: Workers) -> Change | None:
        """Return the change that is due now, if any, after making it in mode `act`. Call it only when a reading is."""
        self._counted.seconds += now_s - self._read_s
        if turned := self._turn.is_done(now_s):
            requests_per_s = self._turn.take(now_s)
            self._counted.take_limits(self._turn.latest)
            self._candidate, self._answers = None, 0
        else:
            requests_per_s = self._prompts / (now_s - self._read_s)
        self._limited = self._counted.is_limited(self._limited)
        if not (self._limited or turned):  # a queue grows so fast with the rate that one interval is too little
            requests_per_s = self._counted.requests / self._counted.seconds
        better = self._better(workers, self._counted.traffic(requests_per_s, limited=self._limited))
        candidate = self._candidate
        self._counted.age()
        self._begin(now_s)
        self._candidate = better.prefill_workers if better else None
        if better is None:
            self._advised = None
            return None
        confirmed = turned or better.prefill_workers == candidate
        if not confirmed or better.prefill_workers == self._advised:
            return None
        if self._mode == "advise":
            self._advised = better.prefill_workers
        else:
            self._decided, self._candidate = (better.prefill_workers, workers.number), None
        # A change is rare and an operator's business, so it is shown by default.
        logger.warning("rebalancing %s %s", "advises" if self._mode == "advise" else "from now on", better.sentence)
        return better

    def _begin(self, now_s: float) -> None:
        self._read_s, self._prompts, self._answers, self._within_limits = now_s, 0, 0, 0

    def _better(self, workers: Workers, traffic: Traffic) -> Change | None:
        """Return a shape that holds `MORE` times as much as the present one, if it is needed.

        The last reading's candidate if it is one of them, else the best.
        """
        present = self.prefill_workers(workers.number)
        if not self._counted.splits:
            return self._undone(workers, f"fewer than half of the requests of {_size(traffic)} may be split")
        if not traffic.limited:
            return self._faster(workers, traffic)
        now = held_per_s(workers, traffic, present)
        if present and needs_no_division(workers, traffic, present):
            tpot_ms = 1e3 * traffic.tpot_limit_s
            return self._undone(
                workers, f"steps leave prompts time within TPOT {tpot_ms:.3g} ms, so nothing is divided"
            )
        best = best_shape(workers, traffic)
        if self._candidate is not None and self._candidate < workers.number:
            candidate = held_per_s(workers, traffic, self._candidate)
            best = self._candidate if candidate > MORE * now else best
        most = held_per_s(workers, traffic, best)
        if most <= MORE * now or most < LEAST_WORTH * traffic.requests_per_s:
            return None
        kept = self._within_limits / self._answers if self._answers >= LEAST_COUNTED else 1.0
        if traffic.requests_per_s < LEAST_USE * now and kept >= LEAST_KEPT:
            return None
        answered = f", {kept:.0%} of answers within limits" if self._answers >= LEAST_COUNTED else ""
        reason = (
            f"{traffic.requests_per_s:.3g} requests/s of {_size(traffic)}{answered}; TTFT {traffic.ttft_limit_s:.3g} s "
            f"and TPOT {1e3 * traffic.tpot_limit_s:.3g} ms would hold up to {most:.3g} requests/s, and now {now:.3g}"
        )
        return Change(best, workers.number, reason)

    def _faster(self, workers: Workers, traffic: Traffic) -> Change | None:
        """Return a shape that makes the mean latency `MORE` times shorter than the present one.

        The last reading's candidate if it is one of them, else the best. A division is undone where none saves
        `LEAST_SAVED` of it.
        """
        if workers.number < LEAST_DIVIDED:
            return self._undone(workers, f"without limits fewer than {LEAST_DIVIDED} workers are not divided")

        def latency_s(prefill_workers: int) -> float:
            return mean_latency_s(workers, traffic, prefill_workers)

        best = best_shape(workers, traffic)
        now_s, together_s, best_s = (latency_s(shape) for shape in (self.prefill_workers(workers.number), 0, best))
        if best_s == math.inf:  # more than any shape can serve: none is known to be better
            return None
        takes = f"{traffic.requests_per_s:.3g} requests/s of {_size(traffic)} without limits take about"
        if together_s * (1 - LEAST_SAVED) <= best_s:
            return self._undone(
                workers,
                f"{takes} {together_s:.3g} s on average if all do all, and no division saves {LEAST_SAVED:.0%} of that",
            )
        if self._candidate and self._candidate < workers.number and MORE * latency_s(self._candidate) < now_s:
            best = self._candidate
        if MORE * latency_s(best) >= now_s:
            return None
        now = f"now {now_s:.3g} s" if now_s < math.inf else "now wait longer and longer"
        return Change(best, workers.number, f"{takes} {latency_s(best):.3g} s on average, and {now}")

    def _undone(self, workers: Workers, reason: str) -> Change | None:
        return Change(0, workers.number, reason) if self.prefill_workers(workers.number) else None


def _size(traffic: Traffic) -> str:
    return f"{traffic.prompt_tokens:.0f} tokens in and {traffic.output_tokens:.0f} out"
