"""Serves the requests of a recording again, by a policy on modelled engines. What comes of it is simulated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle, islice

import msgspec

from ridgeline.contracts.vocabulary import RebalanceMode
from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.engines import ModelledRequest, ModelledWorker, modelled
from ridgeline.router.scheduler.features import FleetModel, WorkerSpec
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
from ridgeline.router.scheduler.simulation import Simulation
from ridgeline.router.scheduler.traffic import Seen, Traffic


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


def requests_of(served: Sequence[Served], ttft_slo_s: float | None, tpot_slo_s: float | None) -> list[ModelledRequest]:
    """Return requests to simulate, with these SLOs instead of their own if given."""
    return [
        ModelledRequest(
            number,
            one.arrival_s,
            one.prompt_tokens,
            one.output_tokens,
            one.ttft_slo_s if ttft_slo_s is None else ttft_slo_s,
            one.tpot_slo_s if tpot_slo_s is None else tpot_slo_s,
        )
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
