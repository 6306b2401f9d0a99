"""How many workers each pool needs: the latest requests, served again on modelled fleets of other sizes.

A pure function of what was seen, for `autoscale`. A pool is to grow while its present size is expected to miss the
goal, and to shrink if one worker fewer keeps it even with steps that take twice `ERROR` longer than modelled.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.scheduler.adaptive import ERROR
from ridgeline.router.scheduler.engines import ModelledRequest
from ridgeline.router.scheduler.features import FleetModel, WorkerSpec
from ridgeline.router.scheduler.offline_simulation import APART_S, Served, fleet_of, part_of, simulated
from ridgeline.router.scheduler.policies import division_name
from ridgeline.router.scheduler.recorded_events import Options

FEWEST_REQUESTS: Final = 20
"""Requests with an SLO; of fewer, a late one is no reason to grow."""
MOST_ADAPTIVE: Final = 1_000
"""The latest requests that are simulated in mode adaptive, where four policies take up to a second each of overload."""
HELPS: Final = 0.05
"""What a worker more has to gain, divided by how many there are."""
MOST_MORE: Final = 4
"""Workers more than now that are tried at a time."""
SLOWER: Final = 1.0 + 2 * ERROR
DIVISIONS: Final = (0.25, 0.5, 0.75)
"""The parts of the workers that compute prompts, among which mode adaptive is taken to choose."""
Sizes = dict[Pool, int]
"""How many workers each pool has."""


class Bounds(NamedTuple):
    """How few and how many workers a pool may be ordered to have."""

    min_workers: int
    max_workers: int


class LatestLoad(msgspec.Struct, frozen=True):
    """What workers had to do lately, and what is known of them."""

    mode: Mode
    pools: tuple[Pool, ...]
    """The pool of each worker that serves."""
    fleet: FleetModel | None
    """These workers; None while it is not known how long their steps take."""
    requests: tuple[Served, ...]
    """Those of the window. One without an answer has the length that is expected."""
    is_whole: bool
    """Whether requests were watched for the whole window."""
    waiting_prompts: int = 0
    """Those that no engine has computed yet, in the router or at a worker."""
    waiting_tokens: int = 0
    policy: tuple[str, Options] | None = None
    """In mode adaptive: the one that always serves, if there is but one."""
    may_divide: bool = True
    """In mode adaptive: whether a policy may have workers for prompts and others for decode."""


class Sizing(msgspec.Struct, frozen=True):
    """How many workers there should be."""

    sizes: Sizes
    """Those that there are, if no better ones are known."""
    change: tuple[Pool, int] | None = None
    """The first step there: a pool, and 1 or -1."""
    why: str = ""
    """Of a change, or why there can be none; empty if all is well."""


class Kept(NamedTuple):
    """How requests fare; the larger one is better."""

    in_time: float
    """The part that meets all SLOs."""
    headroom: float = 0.0
    """Tells sizes apart with which hardly a request is in time: how small a part of SLOs each takes, in logarithms."""

    def helps(self, before: Kept, number: int) -> bool:
        """Return whether one worker more, beside so many of its pool, made a difference to speak of."""
        return max(self.in_time - before.in_time, self.headroom - before.headroom) > HELPS / number


def wanted(load: LatestLoad, now: Sizes, bounds: Mapping[Pool, Bounds], goal: float) -> Generator[None, None, Sizing]:
    """Return how many workers would keep `goal` of the requests in time; yields before each simulation.

    `now`: how many there are, those that are lost and come back included.
    """
    trial = _Trial(load, goal)
    if not {*now} <= {*load.pools}:
        return Sizing(now, why="a pool has no worker that serves")
    if load.requests and load.fleet is None:
        return Sizing(now, why="it is not known yet how long engine steps take, which shows under load")
    if load.requests and not any(map(_has_slo, load.requests)):
        return Sizing(now, why="no request has an SLO: set router.slo, or have clients send theirs")
    kept = yield from trial.kept(now)
    if load.requests and not trial.judged:
        return Sizing(now, why="no number of workers helps: requests miss their SLOs on idle workers too")
    if kept.in_time < goal:
        return (yield from trial.more(now, kept, bounds)) if len(trial.judged) >= FEWEST_REQUESTS else Sizing(now)
    return (yield from trial.fewer(now, kept, bounds)) if load.is_whole else Sizing(now)


class _Trial:
    """Serves the requests by other numbers of workers."""

    def __init__(self, load: LatestLoad, goal: float) -> None:
        self._load, self._goal = load, goal
        self._requests = load.requests[-MOST_ADAPTIVE if load.mode == "adaptive" else 0 :]
        self._queue = _queue(load, self._requests)
        self._alone: dict[float, list[int]] = {}
        """By factor on the steps: the requests with an SLO that idle workers serve in time; nothing helps others."""

    @property
    def judged(self) -> Sequence[int]:
        """The requests by which sizes are judged."""
        return self._alone.get(1.0, ())

    def more(self, now: Sizes, kept: Kept, bounds: Mapping[Pool, Bounds]) -> Generator[None, None, Sizing]:
        """Add one worker after the other where it helps most, until the goal is kept."""
        tried = [(kept, now)]
        while tried[-1][0].in_time < self._goal and len(tried) <= MOST_MORE:
            (last, sizes), found = tried[-1], list[tuple[Kept, Sizes]]()
            for pool, number in sizes.items():
                if pool in bounds and number < bounds[pool].max_workers:
                    larger = {**sizes, pool: number + 1}
                    kept = yield from self.kept(larger)
                    found += [(kept, larger)] if kept.helps(last, number) else []
            if not found:
                break
            tried.append(max(found, key=lambda one: (min(round(one[0].in_time, 2), self._goal), one[0].headroom)))
        if len(tried) == 1:
            if any(now[pool] < bounds[pool].max_workers for pool in now if pool in bounds):
                return Sizing(now, why="SLOs are missed, and one worker more in any pool helps too little")
            full = " and ".join(f"autoscale.{pool}.max_workers" for pool in now if pool in bounds)
            return Sizing(now, why=f"the SLOs take more workers than {full} allows: raise it where workers are short")
        first = next(pool for pool in now if tried[1][1][pool] > now[pool])
        return Sizing(tried[-1][1], (first, 1), self._why(tried[0], tried[-1]))

    def fewer(self, now: Sizes, kept: Kept, bounds: Mapping[Pool, Bounds]) -> Generator[None, None, Sizing]:
        """Take away the worker without which the goal is kept best, if there is one."""
        found = list[tuple[Kept, int, Pool]]()
        for pool, number in now.items():
            if pool in bounds and number > bounds[pool].min_workers:
                smaller = {**now, pool: number - 1}
                slower = yield from self.kept(smaller)
                if slower.in_time >= self._goal:
                    slower = yield from self.kept(smaller, SLOWER)
                    # With no request left that idle slower workers serve in time, nothing says that fewer are enough.
                    sure = slower.in_time >= self._goal and (self._alone.get(SLOWER) or not self._requests)
                    found += [(slower, number, pool)] if sure else []
        if not found:
            return Sizing(now)
        slower, number, pool = max(found)
        smaller = {**now, pool: number - 1}
        why = self._why((kept, now), (slower, smaller))
        return Sizing(smaller, (pool, -1), f"{why}, the latter with steps {SLOWER - 1:.0%} longer")

    def kept(self, sizes: Sizes, slower: float = 1.0) -> Generator[None, None, Kept]:
        """Return how the requests fare with so many workers, by the best policy of the mode."""
        requests, best = self._requests, Kept(-1.0)
        if not requests:
            return Kept(1.0)
        policies = _policies(self._load, sizes)
        if slower not in self._alone:
            yield
            apart = [msgspec.structs.replace(one, arrival_s=number * APART_S) for number, one in enumerate(requests)]
            served = self._served(apart, sizes, policies[0], slower)
            with_slos = (number for number, one in enumerate(requests) if _has_slo(one))
            self._alone[slower] = [number for number in with_slos if served[number].in_time]
        for policy in policies:
            if best.in_time < self._goal:
                yield
                served = self._served([*requests, *self._queue], sizes, policy, slower)
                best = max(best, _kept([served[number] for number in self._alone[slower]]))
        return best

    def _served(
        self, requests: Sequence[Served], sizes: Sizes, policy: tuple[str, Options], slower: float
    ) -> list[ModelledRequest]:
        known, workers = self._load.fleet, list[WorkerSpec]()
        assert known is not None
        for pool, number in sizes.items():
            of_pool = tuple(spec for spec, of in zip(known.workers, self._load.pools, strict=True) if of == pool)
            workers += fleet_of(msgspec.structs.replace(known, workers=of_pool), number).workers
        name, options = policy
        fleet = msgspec.structs.replace(known, workers=tuple(workers))
        return simulated(requests, fleet, name, (), options, slower)

    def _why(self, now: tuple[Kept, Sizes], then: tuple[Kept, Sizes]) -> str:
        before, after = (
            f"{kept.in_time:.0%} with {' '.join(f'{pool}={number}' for pool, number in sizes.items())}"
            for kept, sizes in (now, then)
        )
        waits = f", and {self._load.waiting_prompts} prompts wait" if self._load.waiting_prompts else ""
        requests = f"{len(self._requests)} requests{waits}"
        return (
            f"{requests}; {before} would meet their SLOs, and {after}, the target (autoscale.goal is {self._goal:.0%})"
        )


def _policies(load: LatestLoad, sizes: Sizes) -> list[tuple[str, Options]]:
    """Return by what the mode may serve with so many workers; in mode adaptive, the best of these serves."""
    number = sum(sizes.values())
    if load.mode == "disaggregated":
        return [("disaggregated", {"prefill_part": sizes["prefill"] / number})]
    if load.mode == "colocated":
        return [("colocated", {})]
    if load.policy is not None:
        return [load.policy]
    parts = sorted({round(part * number) for part in DIVISIONS} & {*range(1, number)}) if load.may_divide else ()
    return [("colocated, paced", {}), *((division_name(part, number, slack=True), {}) for part in parts)]


def _queue(load: LatestLoad, requests: Sequence[Served]) -> list[Served]:
    """Return what waits now as requests that come first, without SLOs: others have to be in time in spite of them."""
    if not load.waiting_prompts or not requests:
        return []
    prompt_tokens = max(1, round(load.waiting_tokens / load.waiting_prompts))
    output_tokens = max(1, round(sum(one.output_tokens for one in requests) / len(requests)))
    one = Served(requests[0].arrival_s, prompt_tokens, output_tokens, math.inf, math.inf, None, None)
    return [one] * load.waiting_prompts


def _has_slo(one: Served) -> bool:
    return min(one.ttft_slo_s, one.tpot_slo_s) < math.inf


def _kept(served: Sequence[ModelledRequest]) -> Kept:
    if not served:
        return Kept(1.0)
    taken = (math.log1p(one.ttft_s / one.ttft_slo_s) + math.log1p(one.tpot_s / one.tpot_slo_s) for one in served)
    return Kept(part_of([one.in_time for one in served]), -sum(taken) / len(served))
