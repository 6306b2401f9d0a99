"""Mode `adaptive`: serve as the policy that would have served the latest requests best.

Every policy that it may serve by is simulated with the latest requests on modelled workers, whose step models the
engines have fitted. The best one serves from then on, until another one would have been better by `MARGIN`. So it is
meant to be as good as the better pure mode, as far as the models are right, and better where pacing, deadlines or
exceptions from a division help.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import Mode, Phase, RebalanceMode
from ridgeline.router.scheduler.engines import ModelledRequest, ModelledWorker, modelled
from ridgeline.router.scheduler.features import Assignment, FleetModel, RequestFeatures, WorkerSpec, WorkerState
from ridgeline.router.scheduler.policies import Policy, division_name, make_policy, shape_of
from ridgeline.router.scheduler.recorded_events import Arrived, Began, Chose, Compared, Options, Placed
from ridgeline.router.scheduler.simulation import Simulation
from ridgeline.router.scheduler.traffic import Seen, Traffic, arrival_of

SIMULATED: Final = 50
"""The latest requests that are simulated, for each worker."""
MARGIN: Final = 0.03
"""By how much of the requests another policy must be better."""
FIRST_COMPARISON: Final = 8
"""Requests before the first comparison; later ones are due after half as many as the policy has served of this kind."""
MOST_BETWEEN_COMPARISONS: Final = 15
"""The most requests between two comparisons, for each worker."""
NEWEST: Final = 4
"""Traffic has turned once so many requests in a row have lengths that were rare before."""
RARE: Final = 1.5
"""Such are so many times as long as, or shorter than, what nine of ten were."""
BEFORE: Final = 20
"""The requests before them that count."""
ERROR: Final = 0.1
"""The standard deviation of a prediction's relative error (as tolerated by `ridgeline.decode_worker.pacing.model`)."""
HEADROOM_WEIGHT: Final = 1e-3
"""Weight of the share of its SLO that a request takes: among policies by which all are in time, headroom decides."""
MOST_SLOS: Final = 5.0
"""The largest such share that counts."""
MOST_MODELLED: Final = 8
"""Of a larger fleet a part of this size is modelled, with its part of the requests: policies choose shares."""
SLOWDOWN_ROUNDS: Final = 3
"""Simulations that look for the slowdown. Each corrects by a square root, since near the knee latency grows faster."""
SLOWDOWN_FOUND: Final = 0.05
"""Latencies so near to those seen need no further round: it would change steps by half of that."""
MOST_SLOWDOWN: Final = 2.0
"""The most times that steps are taken to be slower, or faster, than their model says."""
UNTIL_COMPARED: Final = "colocated"
"""The policy until the first comparison."""


class Adaptive:
    """A policy that becomes another one."""

    def __init__(
        self,
        fleet: Callable[[], FleetModel | None],
        traffic: Traffic,
        rebalance: RebalanceMode = "act",
        always: tuple[str, Options] | None = None,
    ) -> None:
        """`fleet` returns None while the steps of no worker are known.

        `rebalance`: `act` serves by any policy, `none` by those alone by which every worker does both phases, and
        `advise` as `none`, while `scores` has all of them. `always` is the one policy to serve by, if given, with its
        options.
        """
        self._fleet = fleet
        self._traffic = traffic
        self._rebalance = rebalance
        self._always = always
        self._next_comparison = FIRST_COMPARISON
        self._compared: Sequence[Seen] = ()
        """The requests of the last comparison."""
        self._serves_since = 0
        """The number of the first request that came after the present policy began to serve."""
        self.name, options = always or (UNTIL_COMPARED, {})
        self._policy: Policy = make_policy(self.name, options)
        self.advised = self.name
        """The policy that was better enough in the last comparison, also if it must not serve."""
        self.scores: Mapping[str, float] = {}
        """Of the last comparison, by policy."""

    def state(self, mode: Mode) -> Began:
        """Return all that the next decisions depend on, but for the workers."""
        return Began(
            self._traffic.clock(),
            mode,
            self.name,
            self._always[1] if self._always else {},
            self._rebalance,
            self._always is not None,
            self._traffic.arrived_requests,
            self._next_comparison,
            [(arrival_of(seen), seen.made_tokens, seen.ended, seen.latency_s) for seen in self._traffic.latest],
            self._fleet(),
        )

    @classmethod
    def restored(cls, began: Began, fleet: Callable[[], FleetModel | None], traffic: Traffic) -> Adaptive:
        """Return the one whose state this was; `traffic` gets what it remembered."""
        made = cls(fleet, traffic, began.rebalance, (began.policy, began.options) if began.always else None)
        if not began.always:
            made.serve_by(began.policy)
        made._next_comparison = began.next_comparison
        traffic.latest.extend(_seen(*request) for request in began.requests)
        traffic.arrived_requests = began.arrived
        return made

    @property
    def paced(self) -> bool:
        """Whether engines bound their steps by the TPOT SLOs of requests that are placed now."""
        return self._policy.paced

    def serve_by(self, name: str) -> None:
        """Serve by this policy until a comparison finds a better one. Raises ValueError for one that is unknown."""
        self.name, self._policy = name, make_policy(name, {})
        self.serves_since(self._traffic.arrived_requests)

    def serves_since(self, number: int) -> None:
        """Note that requests before this one were not served by the present policy."""
        self._serves_since = number

    def chose(self, event: Chose) -> None:
        """Take over the result of a comparison that was made elsewhere."""
        self.scores = event.scores
        self.serve_by(event.policy)

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return what the policy says that serves now."""
        assigned = self._policy.assign(request, workers)
        if assigned is None:
            return None
        if self._traffic.listeners:
            now_s = self._traffic.clock()
            self._traffic.tell(Placed.of(now_s, self.name, request, workers, assigned))
        return msgspec.structs.replace(assigned, policy=self.name)

    def affinities(self, workers: int) -> list[Phase | None]:
        """Return the phase that each of so many workers is for; None for one that does both."""
        shape = shape_of(self._policy)
        if shape is None or workers < 2:
            return [None] * workers
        number = shape.prefill_workers(workers)
        phases: list[Phase | None] = ["prefill"] * number
        return phases + ["decode"] * (workers - number)

    def is_due(self) -> bool:
        """Whether so many requests have come since the last comparison, or so different ones, that it may not hold."""
        if self._always is not None:
            return False
        arrived, latest = self._traffic.arrived_requests, self._traffic.latest
        if arrived >= self._next_comparison:
            return True
        if not self._compared or arrived <= self._compared[-1].number + NEWEST:
            return False
        return _turned([latest[-number] for number in range(1, NEWEST + 1)], self._compared[-BEFORE:])

    def compare(self) -> Iterator[None]:
        """Compare the policies, and serve by the best one from then on; yields now and then."""
        fleet = self._fleet()
        arrived = self._traffic.arrived_requests
        self._next_comparison = arrived + FIRST_COMPARISON
        if fleet is None or not self._traffic.latest:
            return
        if self._traffic.listeners:
            self._traffic.tell(Compared(self._traffic.clock(), fleet, self._serves_since))
        workers = fleet.workers[:MOST_MODELLED]
        seen = self._latest(len(fleet.workers), len(workers))
        self._compared = _since_it_turned(seen)
        known_since = max(self._serves_since, self._compared[0].number)
        most, half = MOST_BETWEEN_COMPARISONS * len(fleet.workers), (arrived - known_since) // 2
        self._next_comparison = arrived + max(FIRST_COMPARISON, min(most, half))
        slowdown = yield from self._slowdown(fleet, workers, seen)
        requests = _requests(self._compared, SIMULATED * len(workers))
        scores: dict[str, float] = {}
        scale_s = math.inf
        while (name := self._next(len(workers), scores)) is not None:
            served = [make() for make in requests]
            trial = _Trial(modelled(workers, slowdown), make_policy(name, {}), fleet, served, scale_s)
            enough = max(scores[self.name] + MARGIN, *scores.values()) if scores else -math.inf
            for _ in trial.steps(served):
                if trial.most < enough:
                    break
                yield
            if not scores:  # what serves comes first
                trial.scale_s = scale_s = sum(one.latency_s for one in served) / len(served)
            scores[name] = trial.score
        self._choose(scores)

    def _latest(self, of_workers: int, workers: int) -> list[Seen]:
        """Return the requests to simulate, as they are known now, on so many of the workers."""
        latest = self._traffic.latest
        part = islice(latest, max(0, len(latest) - SIMULATED * of_workers), None, max(1, of_workers // workers))
        return [replace(seen) for seen in part]

    def _slowdown(
        self, fleet: FleetModel, workers: Sequence[WorkerSpec], seen: Sequence[Seen]
    ) -> Generator[None, None, float]:
        """Return how many times as long as modelled steps take now.

        That is the factor by which the policy that serves takes as long in the simulation as clients have seen.
        """
        known = [
            (index, one.latency_s)
            for index, one in enumerate(seen)
            if one.number >= self._serves_since and one.latency_s is not None
        ]
        slowdown = 1.0
        if len(known) < FIRST_COMPARISON:
            return slowdown
        for _ in range(SLOWDOWN_ROUNDS):
            served = [make() for make in _requests(seen)]
            yield from Simulation(modelled(workers, slowdown), self._policy, fleet.handover_s).steps(served)
            off = median((served[index].latency_s + fleet.overhead_s) / latency_s for index, latency_s in known)
            slowdown = min(MOST_SLOWDOWN, max(1 / MOST_SLOWDOWN, slowdown / math.sqrt(off)))
            if abs(off - 1.0) < SLOWDOWN_FOUND:
                break
        return slowdown

    def _choose(self, scores: Mapping[str, float]) -> None:
        """Serve by the best policy, if it is better enough than what serves now."""
        self.scores = scores
        allowed = [name for name in scores if self._rebalance == "act" or not _divides(name)]
        enough = scores[self.name] + MARGIN
        self.advised, best = (max(names, key=scores.__getitem__) for names in (scores, allowed))
        if scores[self.advised] <= enough:  # those that were broken off have a part of their score
            self.advised = self.name
        if scores[best] > enough:
            self.serve_by(best)
        if self._traffic.listeners:
            self._traffic.tell(Chose(self._traffic.clock(), self.name, scores))

    def _next(self, workers: int, scores: Mapping[str, float]) -> str | None:
        """Return the next policy to simulate, by the scores of the others; None when they are enough.

        These are: what serves; one worker for both phases, paced or not; divisions, from the one that serves or half of
        the workers on, as long as a neighbour is better; the best division and its neighbours with exceptions.
        """
        wanted = [self.name, "colocated", "colocated, paced"]
        if self._rebalance != "none":
            shape = shape_of(self._policy)
            first = shape.prefill_workers(workers) if shape else workers // 2
            known = {number: scores.get(division_name(number, workers)) for number in range(1, workers)}
            tried = {number: score for number, score in known.items() if score is not None}
            best = max(tried, key=lambda number: (tried[number], number == first), default=first)
            near = [number for number in (best, best - 1, best + 1) if number in known]
            wanted += [division_name(number, workers) for number in near]
            wanted += [division_name(number, workers, slack=True) for number in near]
        return next((name for name in wanted if name not in scores), None)


def _divides(name: str) -> bool:
    """Return whether a policy has workers for prompts and others for decode."""
    return shape_of(make_policy(name, {})) is not None


def _seen(arrived: Arrived, made_tokens: int, ended: bool, latency_s: float | None) -> Seen:
    return Seen(
        arrived.number,
        arrived.at_s,
        arrived.prompt_tokens,
        arrived.ttft_slo_s,
        arrived.tpot_slo_s,
        arrived.expected_tokens,
        made_tokens,
        ended,
        latency_s,
    )


def _turned(newest: Sequence[Seen], before: Sequence[Seen]) -> bool:
    """Return whether all prompts, or all expected answers, are of lengths that were rare before, on one side."""
    tenth = len(before) // 10
    for lengths, known in (
        ([one.sent_tokens for one in newest], sorted(one.sent_tokens for one in before)),
        ([one.expected_tokens for one in newest], sorted(one.expected_tokens for one in before)),
    ):
        if min(lengths) > RARE * known[-1 - tenth] or RARE * max(lengths) < known[tenth]:
            return True
    return False


def _since_it_turned(seen: Sequence[Seen]) -> Sequence[Seen]:
    """Return the requests since the traffic turned last; all if it has not."""
    for first in range(len(seen) - NEWEST, 0, -1):
        if _turned(seen[first : first + NEWEST], seen[max(0, first - BEFORE) : first]):
            return seen[first:]
    return seen


def _requests(seen: Sequence[Seen], at_least: int = 0) -> list[Callable[[], ModelledRequest]]:
    """Return what makes the requests to simulate; those that have not ended are taken to become as long as expected.

    A few requests are repeated until there are enough, since a fleet that cannot keep up shows that only after a while.
    """
    first_s = seen[0].arrival_s
    period_s = (seen[-1].arrival_s - first_s) * len(seen) / max(1, len(seen) - 1)
    return [
        partial(
            ModelledRequest,
            turn * len(seen) + number,
            turn * period_s + one.arrival_s - first_s,
            one.prompt_tokens,
            one.made_tokens if one.ended else max(1, round(one.expected_tokens)),
            one.ttft_slo_s,
            one.tpot_slo_s,
        )
        for turn in range(max(1, math.ceil(at_least / len(seen))))
        for number, one in enumerate(seen)
    ]


class _Trial(Simulation):
    """A simulation that scores a policy: by requests in time, and of those without an SLO by how short they take."""

    def __init__(
        self,
        workers: Sequence[ModelledWorker],
        policy: Policy,
        fleet: FleetModel,
        requests: Sequence[ModelledRequest],
        scale_s: float,
    ) -> None:
        """`scale_s`: the mean latency by what serves."""
        super().__init__(workers, policy, fleet.handover_s)
        self.scale_s = scale_s
        self._overhead_s = fleet.overhead_s
        self._requests = len(requests)
        self._with_slo = sum(min(one.ttft_slo_s, one.tpot_slo_s) < math.inf for one in requests)
        self._ended = 0
        self._in_time = self._without_slo_s = 0.0

    @property
    def score(self) -> float:
        """What those that have ended are worth: all of them, unless it was broken off; then `most` at most."""
        if not self._ended:
            return self.most
        return min(self.most, (self._in_time - self._without_slo_s / self.scale_s) / self._ended)

    @property
    def most(self) -> float:
        """The score if all the others came in time."""
        return (self._in_time + self._with_slo - self._without_slo_s / self.scale_s) / self._requests

    def _finish(self, request: ModelledRequest, worker: ModelledWorker) -> None:
        super()._finish(request, worker)
        self._ended += 1
        part = max((request.ttft_s + self._overhead_s) / request.ttft_slo_s, request.tpot_s / request.tpot_slo_s)
        if part == 0.0:
            self._without_slo_s += request.latency_s
            return
        self._with_slo -= 1
        self._in_time += math.erfc((part - 1.0) / ERROR / math.sqrt(2.0)) / 2 - HEADROOM_WEIGHT * min(part, MOST_SLOS)
