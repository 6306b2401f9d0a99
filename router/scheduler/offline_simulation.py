"""Serves the requests of a recording again, by a policy on modelled engines. What comes of it is simulated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import RebalanceMode
from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.adaptive import ERROR, Adaptive
from ridgeline.router.scheduler.engines import ModelledRequest, ModelledWorker, modelled
from ridgeline.router.scheduler.features import WINDOW_STEPS, FleetModel, WorkerSpec
from ridgeline.router.scheduler.policies import Policy
from ridgeline.router.scheduler.recorded_events import (
    AnswerCompleted,
    AnyEvent,
    Arrived,
    BadRecording,
    Began,
    Chose,
    Compared,
    FleetSeen,
    ModeBecame,
    PromptComputed,
)
from ridgeline.router.scheduler.registry import ADAPTIVE, division_name, make_policy
from ridgeline.router.scheduler.simulation import Simulation
from ridgeline.router.scheduler.traffic import Seen, Traffic

PURE: Final = ("colocated", "disaggregated")
"""The policies that are modes too: in these, prompts go first come, first served."""


class Served(msgspec.Struct, frozen=True):
    """A request whose answer was recorded."""

    arrival_s: float
    prompt_tokens: int
    """Those that no prefix cache had."""
    output_tokens: int
    ttft_slo_s: float
    tpot_slo_s: float
    ttft_s: float | None
    """What its client saw."""
    tpot_s: float | None

    @property
    def in_time(self) -> bool:
        """Whether it met both SLOs."""
        return (self.ttft_s or 0.0) <= self.ttft_slo_s and (self.tpot_s or 0.0) <= self.tpot_slo_s


class Recorded(msgspec.Struct, frozen=True):
    """What a recording says of the traffic and of the workers."""

    requests: tuple[Served, ...]
    """Those that were answered, in the order of their arrivals; the first one arrives at 0."""
    unanswered: int
    """Requests that were cancelled, failed, or had not ended."""
    fleet: FleetModel
    """The workers as they were known last."""
    models: tuple[tuple[float, tuple[StepModel, ...]], ...]
    """The models of their steps, by the time of `requests` from which on they were known."""
    policies: tuple[str, ...]
    """The modes, and in mode adaptive the policies, that served, in their order."""


def recorded(events: Iterable[AnyEvent]) -> Recorded:
    """Return what a recording holds. Raises BadRecording if it has no answer, or no step of the engines is known."""
    fleets: list[tuple[float, FleetModel]] = []
    requests: dict[int, list[Arrived | PromptComputed | AnswerCompleted]] = {}
    policies: list[str] = []
    for event in events:
        if isinstance(event, Began | Compared | FleetSeen) and event.fleet is not None and event.fleet.workers:
            fleets.append((event.at_s, event.fleet))
        if isinstance(event, Arrived):
            requests[event.number] = [event]
        elif isinstance(event, PromptComputed | AnswerCompleted) and event.number in requests:
            requests[event.number].append(event)
        elif isinstance(event, Began | ModeBecame | Chose):
            policies.append(_serves(event))
    if not fleets:
        raise BadRecording("no engine's steps were known when it was recorded: record while the server has traffic")
    answered = [told for told in requests.values() if isinstance(told[-1], AnswerCompleted)]
    if not answered:
        raise BadRecording("it holds no complete answer: record for longer, while the server has traffic")
    answered.sort(key=lambda told: told[0].at_s)
    first_s, (_, last) = answered[0][0].at_s, fleets[-1]
    served = tuple(_served(told, first_s) for told in answered)
    models = tuple(
        (at_s - first_s, tuple(worker.model for worker in fleet.workers))
        for at_s, fleet in fleets
        if len(fleet.workers) == len(last.workers)
    )
    return Recorded(served, len(requests) - len(answered), last, models, tuple(policies))


def _serves(event: Began | ModeBecame | Chose) -> str:
    """Return the mode, or in mode adaptive the policy, that serves from this event on."""
    if isinstance(event, Chose):
        return event.policy
    if isinstance(event, Began) and event.mode == "adaptive":
        return event.policy
    return event.mode


def _served(told: Sequence[Arrived | PromptComputed | AnswerCompleted], first_s: float) -> Served:
    arrived, *computed, answer = told
    assert isinstance(arrived, Arrived)
    assert isinstance(answer, AnswerCompleted)
    cached_tokens = max((one.cached_tokens for one in computed if isinstance(one, PromptComputed)), default=0)
    return Served(
        arrived.at_s - first_s,
        max(1, arrived.prompt_tokens - cached_tokens),
        answer.output_tokens,
        arrived.ttft_slo_s,
        arrived.tpot_slo_s,
        answer.ttft_s,
        answer.tpot_s,
    )


def fleet_of(fleet: FleetModel, workers: int) -> FleetModel:
    """Return a fleet of so many workers: these, again and again."""
    known = fleet.workers
    specs = [_copy(spec, number // len(known)) for number, spec in enumerate(islice(cycle(known), workers))]
    return msgspec.structs.replace(fleet, workers=tuple(specs))


def _copy(spec: WorkerSpec, times: int) -> WorkerSpec:
    if not times:
        return spec
    device = f"{spec.device} {times}" if spec.device else ""
    return msgspec.structs.replace(spec, worker_id=f"{spec.worker_id}+{times}", device=device)


def with_slos(served: Sequence[Served], ttft_slo_s: float | None, tpot_slo_s: float | None) -> list[Served]:
    """Return the same requests with these SLOs instead of their own, if given."""
    given = {"ttft_slo_s": ttft_slo_s, "tpot_slo_s": tpot_slo_s}
    changed = {name: slo_s for name, slo_s in given.items() if slo_s is not None}
    return [msgspec.structs.replace(one, **changed) for one in served]


def requests_of(served: Sequence[Served]) -> list[ModelledRequest]:
    """Return requests to simulate."""
    return [
        ModelledRequest(number, one.arrival_s, one.prompt_tokens, one.output_tokens, one.ttft_slo_s, one.tpot_slo_s)
        for number, one in enumerate(served)
    ]


Models = Sequence[tuple[float, Sequence[StepModel]]]
"""Models of workers' steps, by the time from which on they were known."""


def serve(
    requests: Sequence[ModelledRequest],
    fleet: FleetModel,
    policy: Policy,
    *,
    models: Models = (),
    by_deadline: bool = True,
) -> None:
    """Serve them by one policy, on workers whose speed changes as their models did."""
    DriftingSimulation(modelled(fleet.workers), policy, fleet, models, by_deadline=by_deadline).run(requests)


def serve_adaptively(requests: Sequence[ModelledRequest], fleet: FleetModel, models: Models = ()) -> Adaptive:
    """Serve them as mode adaptive does; return what has chosen."""
    simulation = AdaptiveSimulation(modelled(fleet.workers), fleet, models=models)
    simulation.run(requests)
    return simulation.adaptive


class Tried(msgspec.Struct, frozen=True):
    """What so many workers made of the requests by a policy, with steps as long as modelled, longer and shorter."""

    policy: str
    workers: int
    in_time: float
    """The part of the requests that met both SLOs."""
    least: float
    most: float
    """The same with steps that take twice `ERROR` more or less."""
    late_first: float
    """The part that missed the SLO on TTFT."""
    late_tokens: float
    """The part that missed the SLO on TPOT."""
    ttft_s: tuple[float, float]
    """The median and the 90th percentile, as of TPOT."""
    tpot_s: tuple[float, float]
    took_s: float
    """From the first arrival to the last token."""


def grown(served: Sequence[Served], growth: float) -> list[Served]:
    """Return the same requests at `growth` times the rate."""
    return [msgspec.structs.replace(one, arrival_s=one.arrival_s / growth) for one in served]


def simulated(
    served: Sequence[Served],
    fleet: FleetModel,
    policy: str,
    models: Models = (),
    options: Mapping[str, object] | None = None,
    slower: float = 1.0,
) -> list[ModelledRequest]:
    """Serve the requests by a policy, which may be adaptive, with steps that take `slower` times as long.

    Raises ValueError for a policy that is not there or has other options.
    """
    requests = requests_of(served)
    models = [(at_s, [model.times(slower) for model in known]) for at_s, known in models]
    specs = [
        msgspec.structs.replace(
            spec,
            model=spec.model.times(slower),
            window_tokens=WINDOW_STEPS * spec.step_tokens if policy in PURE else spec.window_tokens,
        )
        for spec in fleet.workers
    ]
    fleet = msgspec.structs.replace(fleet, workers=tuple(specs))
    if policy != ADAPTIVE:
        serve(requests, fleet, make_policy(policy, options or {}), models=models, by_deadline=policy not in PURE)
    elif options:
        raise ValueError(f"{ADAPTIVE} has no options: leave out {', '.join(options)}")
    else:
        serve_adaptively(requests, fleet, models)
    for one in requests:
        one.first_s += fleet.overhead_s
        one.end_s += fleet.overhead_s
    return requests


def tried(served: Sequence[Served], fleet: FleetModel, policy: str, models: Models = ()) -> Tried:
    """Return what a policy makes of the requests. Raises ValueError, see `simulated`."""
    slower, requests, faster = (
        simulated(served, fleet, policy, models, slower=1.0 + error) for error in (2 * ERROR, 0.0, -2 * ERROR)
    )
    parts = [part_of([one.in_time for one in each]) for each in (slower, requests, faster)]
    return Tried(
        policy,
        len(fleet.workers),
        parts[1],
        min(parts),
        max(parts),
        part_of([one.ttft_s > one.ttft_slo_s for one in requests]),
        part_of([one.tpot_s > one.tpot_slo_s for one in requests]),
        percentiles(one.ttft_s for one in requests),
        percentiles(one.tpot_s for one in requests if one.output_tokens > 1),
        max(one.end_s for one in requests),
    )


def fewest_workers(
    served: Sequence[Served], fleet: FleetModel, goal: float, most: int, models: Models = ()
) -> list[Tried]:
    """Return the best policy of each number of workers that was tried; the last has the fewest that keep `goal`.

    They keep it even with steps that take twice `ERROR` longer. Of the last, nobody keeps it if `most` do not. More
    workers are taken to be no worse than fewer.
    """
    found: dict[int, Tried] = {}

    def keeps(workers: int) -> bool:
        of_them = fleet_of(fleet, workers)
        options = [tried(served, of_them, name, models) for name in usual_policies(workers)]
        found[workers] = max(options, key=lambda one: (min(one.least, goal), one.least + one.in_time))
        return found[workers].least >= goal

    low, high = 0, 1
    while not keeps(high) and high < most:
        low, high = high, min(2 * high, most)
    while high - low > 1 and found[high].least >= goal:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return [found[workers] for workers in sorted(found, key=lambda workers: (workers == high, workers))]


def usual_policies(workers: int) -> tuple[str, ...]:
    """Return the policies worth a try: the pure modes, the divisions, and mode adaptive."""
    divisions = {round(part * workers) for part in (0.25, 0.5, 0.75)} & {*range(1, workers)}
    return ("colocated", *(division_name(number, workers, slack=False) for number in sorted(divisions)), ADAPTIVE)


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile, each a value that was seen; nan of nothing."""
    each = sorted(values)
    if not each:
        return math.nan, math.nan
    return each[math.ceil(0.5 * (len(each) - 1))], each[math.ceil(0.9 * (len(each) - 1))]


def part_of(flags: Sequence[bool]) -> float:
    """Return the part that is true."""
    return sum(flags) / len(flags)


class DriftingSimulation(Simulation):
    """A simulation on workers whose speed changes."""

    def __init__(
        self,
        workers: Sequence[ModelledWorker],
        policy: Policy,
        fleet: FleetModel,
        models: Models = (),
        *,
        by_deadline: bool = True,
    ) -> None:
        """`fleet` is what is known of the workers."""
        super().__init__(workers, policy, fleet.handover_s, by_deadline=by_deadline)
        self.fleet = fleet
        self._models = deque(models)

    def arrives(self, request: ModelledRequest) -> None:
        """Queue a request."""
        while self._models and self._models[0][0] <= self.now_s:
            self._become(self._models.popleft()[1])
        super().arrives(request)

    def _become(self, models: Sequence[StepModel]) -> None:
        for worker, model in zip(self.workers, cycle(models), strict=False):
            worker.model = model
        specs = [
            msgspec.structs.replace(spec, model=model)
            for spec, model in zip(self.fleet.workers, cycle(models), strict=False)
        ]
        self.fleet = msgspec.structs.replace(self.fleet, workers=tuple(specs))


class AdaptiveSimulation(DriftingSimulation):
    """A simulation whose policy sees what it serves, and compares policies when that is due."""

    def __init__(
        self,
        workers: Sequence[ModelledWorker],
        fleet: FleetModel,
        rebalance: RebalanceMode = "act",
        models: Models = (),
    ) -> None:
        self.traffic = Traffic(lambda: self.now_s)
        self.adaptive = Adaptive(lambda: self.fleet, self.traffic, rebalance)
        super().__init__(workers, self.adaptive, fleet, models)
        self._seen: dict[int, Seen] = {}

    def arrives(self, request: ModelledRequest) -> None:
        """Queue a request."""
        self._seen[request.number] = self.traffic.arrived(
            request.prompt_tokens,
            request.ttft_slo_s,
            request.tpot_slo_s,
            request.expected_output_tokens or request.output_tokens,
        )
        if self.adaptive.is_due():
            self._compare()
        super().arrives(request)

    def _compare(self) -> None:
        for _ in self.adaptive.compare():
            pass

    def _finish(self, request: ModelledRequest, worker: ModelledWorker) -> None:
        super()._finish(request, worker)
        self.traffic.answered(self._seen.pop(request.number), request.output_tokens, request.ttft_s, request.tpot_s)
