"""Serves the requests of a recording again, by a policy on modelled engines. What comes of it is simulated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, cycle, islice
from typing import Final, TypeVar

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool, RebalanceMode
from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.adaptive import ERROR, MOST_SLOWDOWN, UNTIL_COMPARED, Adaptive
from ridgeline.router.scheduler.engines import ModelledRequest, ModelledWorker, modelled
from ridgeline.router.scheduler.features import WINDOW_STEPS, FleetModel, PoolLimits, WorkerSpec
from ridgeline.router.scheduler.policies import ADAPTIVE, Policy, division_name, make_policy, shape_of
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

PURE: Final[tuple[Mode, ...]] = ("colocated", "disaggregated")
"""The policies that are modes too: in these, prompts go first come, first served."""
APART_S: Final = 1e5
"""From one arrival to the next where each request is served alone."""
WARMING: Final = 50
"""Requests that mode adaptive has served before, to begin by its policy for them: who asks has a server that runs."""
CALIBRATIONS: Final = 5
"""Simulations that look for what steps took."""
STEEPEST: Final = 20.0
BELIEVED: Final = 1.0 + ERROR
"""Step models are believed up to batches so many times as large as those they were fitted to: on a core of Zen 4
steps took twice as long as modelled at 1.2 times (96 tokens in and out)."""


class Served(msgspec.Struct, frozen=True):
    """A request whose answer was recorded, or which a trace has."""

    arrival_s: float
    prompt_tokens: int
    """Those that no prefix cache had."""
    output_tokens: int
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    ttft_s: float | None = None
    """What its client saw."""
    tpot_s: float | None = None

    @property
    def latency_s(self) -> float | None:
        """From its arrival to its last token."""
        return None if self.ttft_s is None else self.ttft_s + (self.tpot_s or 0.0) * (self.output_tokens - 1)

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
    served_by: tuple[str, Mapping[str, object]] | None = None
    """By what all of it is simulated, with options; None if the mode was changed."""


def recorded(events: Iterable[AnyEvent]) -> Recorded:
    """Return what a recording holds. Raises BadRecording if it has no answer, or no step of the engines is known."""
    fleets: list[tuple[float, FleetModel]] = []
    requests: dict[int, list[Arrived | PromptComputed | AnswerCompleted]] = {}
    policies: list[str] = []
    modes: list[Began | ModeBecame] = []
    for event in events:
        if isinstance(event, Began | Compared | FleetSeen) and event.fleet is not None and event.fleet.workers:
            fleets.append((event.at_s, _in_order(event.fleet)))
        if isinstance(event, Arrived):
            requests[event.number] = [event]
        elif isinstance(event, PromptComputed | AnswerCompleted) and event.number in requests:
            requests[event.number].append(event)
        elif isinstance(event, Began | ModeBecame | Chose):
            policies.append(_serves(event))
            modes += [event] if not isinstance(event, Chose) else []
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
    return Recorded(served, len(requests) - len(answered), last, models, tuple(policies), _served_by(modes, last))


def _serves(event: Began | ModeBecame | Chose) -> str:
    """Return the mode, or in mode adaptive the policy, that serves from this event on."""
    if isinstance(event, Chose):
        return event.policy
    if isinstance(event, Began) and event.mode == "adaptive":
        return event.policy
    return event.mode


def _in_order(fleet: FleetModel) -> FleetModel:
    """Return the fleet with step models by which more workers, with smaller batches, are not slower."""
    specs = (msgspec.structs.replace(spec, model=spec.model.in_order()) for spec in fleet.workers)
    return msgspec.structs.replace(fleet, workers=tuple(specs))


def _served_by(modes: Sequence[Began | ModeBecame], fleet: FleetModel) -> tuple[str, Mapping[str, object]] | None:
    """Return by what all requests of a recording are simulated; None if its mode was changed."""
    began = modes[0] if modes else None
    if not isinstance(began, Began) or len({event.mode for event in modes}) > 1:
        return None
    if began.mode == "adaptive":
        return (began.policy, began.options) if began.always else (ADAPTIVE, {})
    prefill = fleet.pools.get("prefill")
    return began.mode, {
        "prefill_part": prefill.workers / len(fleet.workers)
    } if prefill and began.mode != "colocated" else {}


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


class Tried(msgspec.Struct, frozen=True):
    """What became of the requests by a policy, seen or simulated."""

    policy: str
    workers: int
    in_time: float
    """The part of the requests with an SLO that met theirs; of all, if none has one."""
    late_first: float
    """The part that missed the SLO on TTFT."""
    late_tokens: float
    """The part that missed the SLO on TPOT."""
    ttft_s: tuple[float, float]
    """The median and the 90th percentile, as of TPOT."""
    tpot_s: tuple[float, float]
    tokens_per_s: float
    """Tokens of answers, from the first arrival to the last token."""
    least: float = math.nan
    """The part in time with steps that take as much longer as they may."""
    most: float = math.nan
    """The same with shorter ones."""
    beyond: str = ""
    """In what the batches exceed those that step models were fitted to."""
    devices: int = 0
    """Of all workers; 0: not known."""

    @property
    def usual(self) -> float:
        """The part in time, the mean over steps as long as expected, longer and shorter."""
        return (self.least + self.in_time + self.most) / 3


class Calibration(msgspec.Struct, frozen=True):
    """How a simulation of what was recorded differs from what clients saw; without both, that is not known."""

    slowdown: float = 1.0
    """Steps take so many times as long as their models say..."""
    prompts: float = 1.0
    """...and what prompts add to them so many times."""
    error: float = 2 * ERROR
    """They may take so many parts longer, or as much shorter."""
    simulated: Tried | None = None
    seen: Tried | None = None


AS_MODELLED: Final = Calibration()


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
    prompts: float | None = None,
) -> list[ModelledRequest]:
    """Serve the requests by a policy, which may be adaptive, with steps that take `slower` times as long.

    What prompts add to them takes `prompts` times as long, if that is given.

    Raises ValueError for a policy that is not there or has other options.
    """
    requests = requests_of(served)
    models = [(at_s, [model.times(slower, prompts) for model in known]) for at_s, known in models]
    specs = [msgspec.structs.replace(spec, model=spec.model.times(slower, prompts)) for spec in fleet.workers]
    fleet = msgspec.structs.replace(fleet, workers=tuple(specs))
    if policy != ADAPTIVE:
        made = make_policy(policy, options or {})
        fleet = _in_mode(fleet, made) if policy in PURE else fleet
        serve(requests, fleet, made, models=models, by_deadline=policy not in PURE)
    elif options:
        raise ValueError(f"{ADAPTIVE} has no options: leave out {', '.join(options)}")
    else:
        before = AdaptiveSimulation(modelled(fleet.workers), fleet, models=models)
        before.run(requests_of(served[:WARMING]))
        AdaptiveSimulation(modelled(fleet.workers), fleet, models=models, begins=before.adaptive.name).run(requests)
    for one in requests:
        one.first_s += fleet.overhead_s
        one.end_s += fleet.overhead_s
    return requests


def _in_mode(fleet: FleetModel, policy: Policy) -> FleetModel:
    """Return the fleet with the limits that its workers have in a fixed mode."""
    shape = shape_of(policy)
    prefill = shape.prefill_workers(len(fleet.workers)) if shape else 0
    specs = []
    for number, spec in enumerate(fleet.workers):
        pool: Pool = "colocated" if shape is None else "prefill" if number < prefill else "decode"
        known = fleet.pools.get(pool, PoolLimits(0, spec.step_tokens, spec.max_num_seqs))
        specs.append(
            msgspec.structs.replace(
                spec,
                step_tokens=known.step_tokens,
                window_tokens=WINDOW_STEPS * known.step_tokens,
                max_num_seqs=known.max_num_seqs,
            )
        )
    return msgspec.structs.replace(fleet, workers=tuple(specs))


def outcome(policy: str, workers: int, requests: Sequence[Served | ModelledRequest]) -> Tried:
    """Return what became of the requests."""
    judged = with_slo(requests)
    ends_s = [one.arrival_s + one.latency_s for one in requests if one.latency_s is not None]
    return Tried(
        policy,
        workers,
        part_of([one.in_time for one in judged]),
        part_of([(one.ttft_s or 0.0) > one.ttft_slo_s for one in judged]),
        part_of([(one.tpot_s or 0.0) > one.tpot_slo_s for one in judged]),
        percentiles(one.ttft_s for one in requests if one.ttft_s is not None),
        percentiles(one.tpot_s for one in requests if one.tpot_s is not None and one.output_tokens > 1),
        sum(one.output_tokens for one in requests) / max(ends_s, default=math.inf),
    )


class _Factor:
    """How many times as long something takes as modelled, by medians that were simulated and seen.

    Near the knee a latency grows by a multiple of what steps do. How steeply, the last two simulations say.
    """

    def __init__(self) -> None:
        self.value = 1.0
        self._grows, self._last = 2.0, (0.0, 0.0)

    def correct(self, simulated_of_seen: Sequence[float]) -> None:
        """Take the next value, by what was simulated with this one."""
        if not simulated_of_seen:
            return
        now, before = (math.log(self.value), math.log(percentiles(simulated_of_seen)[0])), self._last
        if now[0] != before[0]:
            self._grows = min(STEEPEST, max(1.0, (now[1] - before[1]) / (now[0] - before[0])))
        self._last = now
        self.value = min(MOST_SLOWDOWN, max(1 / MOST_SLOWDOWN, math.exp(now[0] - now[1] / self._grows)))


def calibrated(known: Recorded, ttft_slo_s: float | None = None, tpot_slo_s: float | None = None) -> Calibration:
    """Compare what was recorded with its simulation, whose steps become as long as clients have seen them.

    Both are judged by these SLOs, if given; they are served by those that were recorded.
    """
    if known.served_by is None:
        return AS_MODELLED
    policy, options = known.served_by
    slowdown, prompts = _Factor(), _Factor()
    try:
        for left in reversed(range(1 + CALIBRATIONS)):
            again = simulated(known.requests, known.fleet, policy, known.models, options, slowdown.value, prompts.value)
            if left:
                both = [*zip(again, known.requests, strict=True)]
                slowdown.correct([one.tpot_s / seen.tpot_s for one, seen in both if seen.tpot_s])
                prompts.correct([one.ttft_s / seen.ttft_s for one, seen in both if seen.ttft_s])
    except ValueError:  # a policy that is installed elsewhere
        return AS_MODELLED
    workers = len(known.fleet.workers)
    judged = with_slos(known.requests, ttft_slo_s, tpot_slo_s)
    for one, by in zip(again, judged, strict=True):
        one.ttft_slo_s, one.tpot_slo_s = by.ttft_slo_s, by.tpot_slo_s
    made, was = outcome(policy, workers, again), outcome(policy, workers, judged)
    medians = ((made.ttft_s[0], was.ttft_s[0]), (made.tpot_s[0], was.tpot_s[0]))
    off = [one_s / seen_s for one_s, seen_s in medians if one_s > 0.0 and seen_s > 0.0]
    error = max([ERROR, *(max(one, 1 / one) - 1.0 for one in off)])
    return Calibration(slowdown.value, prompts.value, error, made, was)


def tried(
    served: Sequence[Served],
    fleet: FleetModel,
    policy: str,
    models: Models = (),
    options: Mapping[str, object] | None = None,
    calibration: Calibration = AS_MODELLED,
) -> Tried:
    """Return what a policy makes of the requests. Raises ValueError, see `simulated`."""
    longer = 1.0 + calibration.error
    slower, requests, faster = (
        simulated(served, fleet, policy, models, options, calibration.slowdown * factor, calibration.prompts * factor)
        for factor in (longer, 1.0, 1 / longer)
    )
    parts = [part_of([one.in_time for one in with_slo(each)]) for each in (slower, requests, faster)]
    made = outcome(policy, len(fleet.workers), requests)
    return msgspec.structs.replace(made, least=min(parts), most=max(parts), beyond=_beyond(requests, fleet))


def _beyond(requests: Sequence[ModelledRequest], fleet: FleetModel) -> str:
    """Return in what the largest batches of the workers exceed those that their step models were fitted to."""
    changes: dict[str, list[tuple[float, int, float]]] = {}
    for one in requests:
        assert one.decode_worker is not None
        of_worker = changes.setdefault(one.decode_worker.worker_id, [])
        of_worker += [(one.first_s, 1, one.context_tokens), (one.end_s, -1, -one.context_tokens)]
    model, spec = max((one.model for one in fleet.workers), key=lambda one: one.most_decode_tokens), fleet.workers[0]
    largest = [[0, 0.0]]
    for of_worker in changes.values():
        sums = accumulate(sorted(of_worker), lambda before, change: (0.0, before[1] + change[1], before[2] + change[2]))
        largest += [[sequences, tokens] for _, sequences, tokens in sums]
    decoding = min(spec.max_num_seqs, max(one[0] for one in largest)) * model.computed_per_sequence
    context_tokens = min(spec.kv_tokens, max(one[1] for one in largest))  # others wait
    for most, fitted, what in (
        (decoding, model.most_decode_tokens, "tokens a step"),
        (context_tokens, model.most_context_tokens, "tokens of context"),
    ):
        if most > BELIEVED * fitted > 0:
            return f"batches of {most:,.0f} {what}, and step models were fitted to {fitted:,} at most"
    return ""


def ranked(
    served: Sequence[Served],
    fleet: FleetModel,
    goal: float,
    models: Models = (),
    calibration: Calibration = AS_MODELLED,
    *,
    thrifty: bool = False,
) -> list[Tried]:
    """Return what each mode makes of the requests, the best one first; of divisions, one that no neighbour betters.

    If `thrifty`, mode adaptive is tried only if no other keeps `goal`: it simulates its own simulations.
    """
    workers = len(fleet.workers)

    def rank(one: Tried) -> tuple[bool, float, float]:
        return one.least >= goal, one.usual, -one.ttft_s[1]

    def made(policy: str, prefill: int = 0) -> Tried:
        options = {"prefill_part": prefill / workers} if prefill else {}
        found = tried(served, fleet, policy, models, options, calibration)
        return msgspec.structs.replace(found, policy=f"{policy} {prefill}:{workers - prefill}") if prefill else found

    modes, split = [made("colocated")], dict[int, Tried]()
    wanted = [round(part * workers) for part in (0.5, 0.25, 0.75)]
    while near := [number for number in wanted if 0 < number < workers and number not in split]:
        split[near[0]] = made("disaggregated", near[0])
        if not near[1:]:
            best = max(split, key=lambda number: rank(split[number]))
            wanted += [best - 1, best + 1]
    modes += [max(split.values(), key=rank)] if split else []
    if not thrifty or all(one.least < goal for one in modes):
        modes.append(made(ADAPTIVE))
    return sorted(modes, key=rank, reverse=True)


def fewest_workers(
    served: Sequence[Served],
    fleet: FleetModel,
    goal: float,
    most: int,
    models: Models = (),
    calibration: Calibration = AS_MODELLED,
) -> list[Tried]:
    """Return the best mode of each number of workers that was tried; the last has the fewest that keep `goal`.

    They keep it even with steps as much longer as they may be. Of the last, nobody keeps it if `most` do not. More
    workers are taken to be no worse than fewer.
    """
    found: dict[int, Tried] = {}

    def keeps(workers: int) -> bool:
        found[workers] = ranked(served, fleet_of(fleet, workers), goal, models, calibration, thrifty=True)[0]
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


AnyRequest = TypeVar("AnyRequest", Served, ModelledRequest, Served | ModelledRequest)


def with_slo(requests: Sequence[AnyRequest]) -> Sequence[AnyRequest]:
    """Return the requests that have an SLO, by which others are judged; all of them, if none has one."""
    return [one for one in requests if min(one.ttft_slo_s, one.tpot_slo_s) < math.inf] or requests


def in_time_alone(served: Sequence[Served], fleet: FleetModel, calibration: Calibration) -> Tried:
    """Return what becomes of the requests one after the other, each alone, on the best worker or two workers."""
    apart = [msgspec.structs.replace(one, arrival_s=number * APART_S) for number, one in enumerate(served)]
    longer = calibration.slowdown, calibration.prompts
    alone = [msgspec.structs.replace(fleet, workers=(spec,)) for spec in fleet.workers]
    found = [simulated(apart, one, "colocated", (), None, *longer) for one in alone]
    found += [simulated(apart, fleet_of(fleet, 2), "disaggregated", (), {"prefill_part": 0.5}, *longer)]
    return max((outcome("alone", 1, each) for each in found), key=lambda one: one.in_time)


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
        begins: str = UNTIL_COMPARED,
    ) -> None:
        """`begins`: the policy until the first comparison."""
        self.traffic = Traffic(lambda: self.now_s)
        self.adaptive = Adaptive(lambda: self.fleet, self.traffic, rebalance)
        self.adaptive.serve_by(begins)
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
