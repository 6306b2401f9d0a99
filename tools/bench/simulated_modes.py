"""Simulates workers in each of the three modes, to choose the weights of mode adaptive in seconds instead of hours.

Everything that it prints is simulated. Its steps take what a step model says, times a random factor; the choice of
workers, the order of late prompts, the bound of a step and the fit of a worker's model to its steps are the product's
own code (`ridgeline.router.fleet.adaptive`, `ridgeline.decode_worker.pacing`). `make bench-modes` measures the same on
real engines. Of disaggregated fleets with more than two workers, the one with the best number of prefill workers is
shown. With
--without-limits the mean latency of each mode is shown, at several loads. With --per-device 2, every two workers take
turns on one device: while both compute, each goes at half of its speed.

usage: python -m tools.bench.simulated_modes [--machine avx2] [--workers 2] [--prompt-tokens 512] [--output-tokens 64]
                                             [--requests 150] [--seeds 3] [--noise 0.1] [--without-limits]
                                             [--per-device 2]
"""

from __future__ import annotations

import argparse
import heapq
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import count
from statistics import mean
from typing import Final

import msgspec

from ridgeline.contracts.vocabulary import Mode, Phase
from ridgeline.contracts.workers import StepModel
from ridgeline.decode_worker.pacing.bound import Prompt, most_prefill_tokens
from ridgeline.decode_worker.pacing.model import StepFit, StepLoad
from ridgeline.decode_worker.pacing.slack import DecodeSteps, TpotSlack
from ridgeline.router.fleet.adaptive import Decision, Wanted, choose
from ridgeline.router.fleet.corrections import Corrections
from ridgeline.router.fleet.prediction import Load, idle_prompt_s, taking_turns, with_prompts
from ridgeline.router.fleet.rebalance import Rebalancer
from ridgeline.router.fleet.shape import Workers
from ridgeline.router.fleet.short_list import short_list
from ridgeline.router.fleet.worker import Outstanding
from ridgeline.router.flow.choice import PROMPTS_WINDOW_S
from ridgeline.router.flow.learned import Learned
from ridgeline.router.flow.rates import FadingAmount


def _model(base_s: float, per_prefill_token_s: float, per_sequence_s: float, per_context_token_s: float) -> StepModel:
    return StepModel(
        base_s=base_s,
        per_prefill_token_s=per_prefill_token_s,
        per_sequence_s=per_sequence_s,
        per_context_token_s=per_context_token_s,
        per_attended_token_s=per_prefill_token_s / 18_000,
        steps=100,
    )


MACHINES: Final = {
    "avx2": _model(0.045, 0.0036, 0.003, 1e-6),
    "bf16": _model(0.030, 0.0014, 0.003, 1e-6),
    "h100": msgspec.structs.replace(_model(0.0067, 20e-6, 35e-6, 1e-9), corrections=(*[1.0] * 8, 2.3, 1.6, 1.2)),
}
"""About what SmolLM2-135M takes on one core, in float32 with AVX2 alone and in bfloat16 with AVX-512, and what an 8B in
bfloat16 took on one H100 80GB HBM3, where a step with a prompt, having no CUDA graph, took 22 ms at least."""
HANDOVER_S: Final = 0.03
STEP_TOKENS: Final[Mapping[Mode, int]] = {"colocated": 2048, "disaggregated": 512, "adaptive": 512}
WINDOW_STEPS: Final = 2
PLACES: Final = 64
KV_TOKENS: Final = 1_000_000
TTFT_FACTORS: Final = (2.0, 3.5, 5.0, 12.0)
TPOT_FACTORS: Final = (1.3, 2.0, 3.0, 4.0)
LOADS: Final = (0.35, 0.5, 0.7, 0.85, 1.05, 1.2, 1.4)
"""Rates, as parts of the one at which half of the workers would be busy with prompts all the time."""
MODES: Final[tuple[Mode, ...]] = ("colocated", "disaggregated", "adaptive")


@dataclass(frozen=True)
class Fleet:
    """Workers that are all alike."""

    machine: StepModel
    workers: int = 2
    prefill_workers: int = 1
    """Of them, in mode disaggregated."""
    rebalances: bool = True
    """Whether workers favour a phase in mode adaptive, when the product's loop says so."""
    noise: float = 0.0
    """Standard deviation of the logarithm of what a step takes, divided by what the model says."""
    per_device: int = 1
    """Workers that take turns on a device."""
    step_tokens: Mapping[Mode, int] = field(default_factory=lambda: STEP_TOKENS)
    handover_s: float = HANDOVER_S
    outside_s: float = 0.0
    """For which a prompt is on its way to its engine."""


SHARED_H100: Final = Fleet(
    MACHINES["h100"],
    per_device=2,
    step_tokens={"colocated": 8192, "disaggregated": 8192, "adaptive": 8192},
    handover_s=0.012,
)
"""Two engines on that GPU, with the limits of steps of `ridgeline.cluster.config.gpu_defaults`."""


@dataclass(frozen=True)
class Limits:
    """What a request must keep, in seconds."""

    ttft_s: float
    tpot_s: float


NO_LIMITS: Final = Limits(math.inf, math.inf)


@dataclass(eq=False)
class Request:
    """One request and what has become of it."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int = 0
    granted_s: float = 0.0
    reaches_s: float = 0.0
    """When it reaches its engine."""
    queued_s: float = math.inf
    """When its engine took it in."""
    first_s: float = math.inf
    end_s: float = math.inf
    made: int = 0
    decision: Decision | None = None
    """What was predicted for it, in mode adaptive."""

    @property
    def context_tokens(self) -> int:
        """Tokens of its context now."""
        return self.prompt_tokens + self.made

    def within(self, limits: Limits) -> bool:
        """Return whether it kept both limits."""
        tpot_s = (self.end_s - self.first_s) / max(1, self.output_tokens - 1)
        return self.first_s - self.arrival_s <= limits.ttft_s and tpot_s <= limits.tpot_s


@dataclass(eq=False)
class Device:
    """What computes the steps of one worker, or of several in turn: each of those goes at a part of its speed."""

    left_s: dict[str, float] = field(default_factory=dict)
    """Of each worker that computes a step, the seconds that it would still take alone."""
    since_s: float = 0.0
    changes: int = 0

    def begin(self, worker: str, step_s: float, now_s: float) -> None:
        """Compute a step of the worker too, which would take so long alone."""
        self._until(now_s)
        self.left_s[worker] = step_s

    def end(self, worker: str, now_s: float) -> None:
        """The worker's step has ended."""
        self._until(now_s)
        del self.left_s[worker]

    def _until(self, now_s: float) -> None:
        part = (now_s - self.since_s) / max(1, len(self.left_s))
        self.left_s = {worker: left_s - part for worker, left_s in self.left_s.items()}
        self.since_s, self.changes = now_s, self.changes + 1

    @property
    def next(self) -> tuple[str, float]:
        """The worker whose step ends first, and the seconds until then."""
        worker = min(self.left_s, key=self.left_s.__getitem__)
        return worker, max(0.0, self.left_s[worker]) * len(self.left_s)


@dataclass(eq=False)
class Worker:
    """One worker: prompts in order, and what decodes."""

    name: str
    machine: StepModel
    step_tokens: int
    noise: float = 0.0
    device: Device = field(default_factory=Device)
    fit: StepFit | None = None
    """What it learns of its steps; None: it knows them."""
    prompts: list[Request] = field(default_factory=list)
    decoding: list[Request] = field(default_factory=list)
    assigned: dict[int, Request] = field(default_factory=dict)
    """What decodes there or will."""
    slack: TpotSlack = field(default_factory=TpotSlack)
    head_since_s: float = 0.0
    favours: Phase | None = None
    steps: bool = False
    step_since_s: float = 0.0
    computes: StepLoad = field(default_factory=lambda: StepLoad(0, 0, 0, 0.0))
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.name)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens that it was given and whose first token has not come."""
        return sum(request.prompt_tokens for request in self.prompts)

    def computable(self, now_s: float) -> list[Request]:
        """Return the prompts that have reached it."""
        return [request for request in self.prompts if request.reaches_s <= now_s]

    def begin_step(self, now_s: float) -> tuple[float, list[Request]]:
        """Compute a step; return its seconds, and the requests whose prompts end in it."""
        context_tokens = sum(request.context_tokens for request in self.decoding)
        left, prefilled, attends, ended = self._prompt_tokens(now_s, context_tokens), 0, 0.0, []
        for request in self.computable(now_s):
            request.queued_s = min(request.queued_s, now_s)
            chunk = min(left, request.prompt_tokens - request.computed_tokens)
            if chunk <= 0:
                break
            attends += chunk * (request.computed_tokens + chunk / 2)
            request.computed_tokens += chunk
            left, prefilled = left - chunk, prefilled + chunk
            if request.computed_tokens == request.prompt_tokens:
                ended.append(request)
        noise = math.exp(self.draw.gauss(0.0, self.noise))
        self.computes = StepLoad(prefilled, len(self.decoding), context_tokens, attends)
        return noise * self.machine.step_s(prefilled, len(self.decoding), context_tokens, attends), ended

    @property
    def model(self) -> StepModel:
        """What it tells of its steps."""
        fit = self.fit
        return fit.model if fit is not None and fit.known and fit.model.is_whole else self.machine

    def _prompt_tokens(self, now_s: float, context_tokens: int) -> int:
        """Return how many prompt tokens the step may have, as `ridgeline.engine.step_scheduler` bounds them."""
        free, sequences = self.step_tokens - len(self.decoding), len(self.decoding)
        together_s = self.model.decode_s(sequences, context_tokens)
        allowances_s = (self._allowed_s(request, now_s, together_s) for request in self.assigned.values())
        allowed_s = min(allowances_s, default=math.inf)
        if allowed_s == math.inf:
            return free
        here = self.computable(now_s)
        prompts = [Prompt(one.computed_tokens, one.prompt_tokens - one.computed_tokens) for one in here]
        return min(free, most_prefill_tokens(self.model, allowed_s, sequences, context_tokens, prompts))

    def _allowed_s(self, request: Request, now_s: float, together_s: float) -> float:
        name = str(request.number)
        if request in self.decoding:
            bare = DecodeSteps(self.model.decode_s(1, request.context_tokens), together_s)
            return self.slack.allowance_s(name, request.made, request.output_tokens - request.made, now_s, bare)
        return math.inf if request in self.prompts else self.slack.arrival_s(name, together_s)

    @property
    def outstanding(self) -> Outstanding:
        """What the router would count."""
        return Outstanding(prompt_tokens=self.outstanding_tokens, decodes=len(self.assigned), favours=self.favours)

    def has_room(self, blocks: int) -> bool:
        """Return that there is room; KV blocks are not simulated."""
        return True

    def load(
        self,
        now_s: float,
        limits: Limits,
        corrections: Corrections,
        *,
        takes_prompt: bool,
        sharers: Sequence[Load] = (),
    ) -> Load:
        """Return what the router would know of it."""
        decoding = sum(one.made >= 1 for one in self.assigned.values())
        idle = Load(
            self.name,
            self.model,
            self.step_tokens,
            decoding=decoding,
            decodes=len(self.assigned),
            context_tokens=sum(one.prompt_tokens + one.output_tokens / 2 for one in self.assigned.values()),
            left_tokens=mean(one.output_tokens for one in self.assigned.values()) / 2 if self.assigned else 0.0,
            tpot_limit_s=limits.tpot_s if self.assigned else math.inf,
            takes_prompt=takes_prompt,
            favours=self.favours,
            slower=corrections.ratio(self.name, beside=decoding > 0),
            outside_s=corrections.outside_s(beside=decoding > 0),
        )
        begun_s = max(self.head_since_s, self.prompts[0].granted_s) if self.prompts else now_s
        prompts = [request.prompt_tokens for request in self.prompts]
        return with_prompts(taking_turns(idle, sharers), prompts, now_s - begun_s)


class Simulation:
    """Workers, one router, and requests at known times."""

    def __init__(self, fleet: Fleet, mode: Mode, limits: Limits) -> None:
        self._fleet = fleet
        self._mode = mode
        self._limits = limits
        self._alike = Workers(fleet.machine, fleet.workers, fleet.step_tokens[mode], PLACES, KV_TOKENS)
        self._workers: list[Worker] = []
        for number in range(fleet.workers):
            device = self._workers[-1].device if number % fleet.per_device else Device()
            fit = StepFit() if fleet.per_device > 1 else None
            self._workers.append(
                Worker(f"w{number}", fleet.machine, fleet.step_tokens[mode], fleet.noise, device=device, fit=fit)
            )
        self._by_name = {worker.name: worker for worker in self._workers}
        self._decodes_on: dict[int, Worker] = {}
        self._waiting: list[Request] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._ends: dict[str, Callable[[], None]] = {}
        """Of each worker that computes a step, what happens at its end."""
        self.rebalancer = Rebalancer("act" if fleet.rebalances and fleet.per_device == 1 else "none")
        self._now_s = 0.0
        self._learned = Learned(block_size_tokens=16)
        self._learned.corrections = Corrections(lambda: self._now_s)
        self._prompts_s = FadingAmount(lambda: self._now_s, PROMPTS_WINDOW_S)

    def run(self, requests: Sequence[Request]) -> None:
        """Serve all of them."""
        for request in requests:
            self._at(request.arrival_s, lambda request=request: self._arrives(request))  # type: ignore[misc]
        while self._events:
            self._now_s, _, happen = heapq.heappop(self._events)
            happen()
            for worker in self._workers:
                if not worker.steps and (worker.decoding or worker.computable(self._now_s)):
                    self._step(worker)

    def _at(self, when_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    def _arrives(self, request: Request) -> None:
        self._waiting.append(request)
        self._dispatch()

    def _step(self, worker: Worker) -> None:
        worker.steps, worker.step_since_s, decoding = True, self._now_s, list(worker.decoding)
        takes_s, ended = worker.begin_step(self._now_s)
        self._ends[worker.name] = lambda: self._step_ends(worker, decoding, ended)
        worker.device.begin(worker.name, takes_s, self._now_s)
        self._goes_on(worker.device)

    def _goes_on(self, device: Device) -> None:
        """Wait for the next end of a step, unless another one begins before."""
        if device.left_s:
            (worker, after_s), changes = device.next, device.changes
            self._at(self._now_s + after_s, lambda: self._ends[worker]() if changes == device.changes else None)

    def _step_ends(self, worker: Worker, decoding: list[Request], ended: list[Request]) -> None:
        worker.steps = False
        worker.device.end(worker.name, self._now_s)
        self._goes_on(worker.device)
        if worker.fit is not None:
            worker.fit.observe(worker.computes, self._now_s - worker.step_since_s)
        for request in decoding:
            request.made += 1
            if request.made >= request.output_tokens:
                self._finish(request, worker)
        for request in ended:
            worker.prompts.remove(request)
            worker.head_since_s = request.first_s = self._now_s
            request.made = 1
            if request.decision is not None:
                self._learned.prompt_took(request.decision, self._now_s - request.granted_s)
                self._learned.was_outside(request.decision, request.queued_s - request.granted_s)
            self._hand_over(request, worker)
        if ended:
            self._dispatch()

    def _hand_over(self, request: Request, worker: Worker) -> None:
        decode = self._decodes_on[request.number]
        if request.output_tokens == 1:
            self._finish(request, decode)
        elif decode is worker:
            decode.decoding.append(request)
        else:
            self._at(self._now_s + self._fleet.handover_s, lambda: decode.decoding.append(request))

    def _finish(self, request: Request, worker: Worker) -> None:
        request.end_s = self._now_s
        if request in worker.decoding:
            worker.decoding.remove(request)
        worker.assigned.pop(request.number)
        worker.slack.forget(str(request.number))
        self.rebalancer.answered(within_limits=request.within(self._limits))

    def _dispatch(self) -> None:
        window = WINDOW_STEPS * self._fleet.step_tokens[self._mode]
        while self._waiting:
            room = [worker for worker in self._workers if worker.outstanding_tokens < window]
            pick = {"colocated": self._least_loaded, "disaggregated": self._split, "adaptive": self._predicted}
            granted = pick[self._mode](room) if room else None
            if granted is None:
                return
            self._grant(*granted)

    def _least_loaded(self, room: list[Worker]) -> tuple[Request, Worker, Worker] | None:
        worker = min(room, key=lambda one: (one.outstanding_tokens, len(one.assigned)))
        return self._waiting[0], worker, worker

    def _split(self, room: list[Worker]) -> tuple[Request, Worker, Worker] | None:
        split = self._fleet.prefill_workers
        prefills = [worker for worker in self._workers[:split] if worker in room]
        if not prefills:
            return None
        prompt = min(prefills, key=lambda one: one.outstanding_tokens)
        return self._waiting[0], prompt, min(self._workers[split:], key=lambda one: len(one.assigned))

    def _predicted(self, room: list[Worker]) -> tuple[Request, Worker, Worker] | None:
        request = next((one for one in self._waiting if self._may_be_in_time(one)), self._waiting[0])
        favours = self.rebalancer.favours([*self._by_name])
        for worker in self._workers:
            worker.favours = favours.get(worker.name)
        looked_at = short_list(self._workers, request.prompt_tokens, 0, set(room))
        loads = [self._load(worker, takes_prompt=worker in room) for worker in looked_at]
        wanted = self._wanted(request, len(looked_at) / len(self._workers))
        decision = choose(wanted, loads, lambda _source, _sink: self._fleet.handover_s)
        assert decision is not None
        request.decision = decision
        prompt = self._by_name[decision.chosen.prompt_worker]
        return (request, prompt, self._by_name[decision.chosen.decode_worker]) if prompt in room else None

    def _load(self, worker: Worker, *, takes_prompt: bool) -> Load:
        now = self._now_s, self._limits, self._learned.corrections
        others = [one for one in self._workers if one.device is worker.device and one is not worker]
        sharers = [one.load(*now, takes_prompt=True) for one in others]
        return worker.load(*now, takes_prompt=takes_prompt, sharers=sharers)

    def _wanted(self, request: Request, part_of_workers: float = 0.0) -> Wanted:
        limits = self._limits
        return Wanted(
            request.prompt_tokens,
            request.output_tokens,
            limits.ttft_s,
            limits.tpot_s,
            waited_s=self._now_s - request.arrival_s,
            prompt_load=part_of_workers * self._prompts_s.per_s,
        )

    def _may_be_in_time(self, request: Request) -> bool:
        alone_s = idle_prompt_s(self._fleet.machine, request.prompt_tokens)
        return self._now_s - request.arrival_s + alone_s <= self._limits.ttft_s

    def _grant(self, request: Request, prompt: Worker, decode: Worker) -> None:
        self._waiting.remove(request)
        request.granted_s = self._now_s
        prompt.prompts.append(request)
        request.reaches_s = self._now_s + self._fleet.outside_s
        self._at(request.reaches_s, lambda: None)
        decode.assigned[request.number] = request
        self._decodes_on[request.number] = decode
        if self._mode == "adaptive":
            self._prompts_s.add(idle_prompt_s(self._fleet.machine, request.prompt_tokens))
            self.rebalancer.placed(self._wanted(request), self._now_s)
            if self.rebalancer.due(self._now_s):
                self.rebalancer.read(self._now_s, self._alike)
            decode.slack.expect(str(request.number), self._limits.tpot_s, sure_tokens=request.output_tokens)


def arrivals(rate: float, number: int, seed: int, prompt_tokens: int, output_tokens: int) -> list[Request]:
    """Return requests of one size at Poisson arrivals of `rate` a second."""
    draw, now_s, made = random.Random(seed), 0.0, []
    for index in range(number):
        now_s += draw.expovariate(rate)
        made.append(Request(index, now_s, prompt_tokens, output_tokens))
    return made


@dataclass(frozen=True)
class Workload:
    """What is asked of a fleet."""

    requests: int = 150
    seeds: int = 3
    prompt_tokens: int = 512
    output_tokens: int = 64


def serve(fleet: Fleet, mode: Mode, rate: float, limits: Limits, load: Workload) -> Iterator[list[Request]]:
    """Yield what has become of the requests of each seed."""
    for seed in range(1, load.seeds + 1):
        served = arrivals(rate, load.requests, seed, load.prompt_tokens, load.output_tokens)
        Simulation(fleet, mode, limits).run(served)
        yield served


def goodput(fleet: Fleet, mode: Mode, rate: float, limits: Limits, load: Workload) -> float:
    """Return the simulated requests/s within limits at a rate."""
    within, took_s = 0, 0.0
    for served in serve(fleet, mode, rate, limits, load):
        within += sum(request.within(limits) for request in served)
        took_s += served[-1].arrival_s
    return within / took_s


def mean_latency_s(fleet: Fleet, mode: Mode, rate: float, load: Workload) -> float:
    """Return the simulated mean latency without limits."""
    return mean(
        request.end_s - request.arrival_s for served in serve(fleet, mode, rate, NO_LIMITS, load) for request in served
    )


def unloaded(machine: StepModel, prompt_tokens: int) -> tuple[float, float]:
    """Return the seconds of a prompt and of a decode step on an idle worker."""
    return (
        idle_prompt_s(machine, prompt_tokens),
        machine.decode_s(1, prompt_tokens),
    )


def best(fleet: Fleet, mode: Mode, rates: Sequence[float], limits: Limits, load: Workload) -> float:
    """Return the most that is served within limits at any of the rates, by the best split if the mode has one."""
    return max(goodput(shape, mode, rate, limits, load) for shape in shapes(fleet, mode) for rate in rates)


def shapes(fleet: Fleet, mode: Mode) -> list[Fleet]:
    """Return the fleet with each number of prefill workers, if the mode has any."""
    splits = range(1, fleet.workers) if mode == "disaggregated" else (fleet.prefill_workers,)
    return [replace(fleet, prefill_workers=prefill_workers) for prefill_workers in splits]


def print_map(fleet: Fleet, load: Workload) -> None:
    """Print what each mode holds within each pair of limits."""
    prompt, step = unloaded(fleet.machine, load.prompt_tokens)
    rates = [part * fleet.workers / 2 / prompt for part in LOADS]
    for ttft in TTFT_FACTORS:
        for tpot in TPOT_FACTORS:
            limits = Limits(ttft * prompt, tpot * step)
            held = {mode: best(fleet, mode, rates, limits, load) for mode in MODES}
            ratio = held["adaptive"] / max(held["colocated"], held["disaggregated"])
            figures = "  ".join(f"{mode} {value:.3f}" for mode, value in held.items())
            print(f"TTFT <= {ttft:4g} TPOT <= {tpot:3g} unloaded: {figures} requests/s; {ratio:.2f} times")  # noqa: T201


def print_latencies(fleet: Fleet, load: Workload) -> None:
    """Print the mean latency of each mode without limits, at several loads."""
    prompt, _ = unloaded(fleet.machine, load.prompt_tokens)
    for part in LOADS:
        rate = part * fleet.workers / 2 / prompt
        took = {mode: min(mean_latency_s(shape, mode, rate, load) for shape in shapes(fleet, mode)) for mode in MODES}
        ratio = took["adaptive"] / min(took["colocated"], took["disaggregated"])
        figures = "  ".join(f"{mode} {value:.2f}" for mode, value in took.items())
        print(f"{rate:5.2f} requests/s, mean latency: {figures} s; {ratio:.2f} times")  # noqa: T201


def main() -> None:
    """Print the simulated map, or the latencies without limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, default="avx2", help="whose steps are taken")
    parser.add_argument("--workers", type=int, default=2, choices=range(2, 65), metavar="2..64")
    parser.add_argument("--rebalances", action=argparse.BooleanOptionalAction, default=True, help="roles in adaptive")
    parser.add_argument("--per-device", type=int, default=1, help="workers that take turns on a device")
    parser.add_argument("--without-limits", action="store_true", help="show mean latencies")
    parser.add_argument("--noise", type=float, default=0.0, help="of a step's time; 0.1 is about a tenth either way")
    for one in fields(Workload):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=int, default=one.default)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)  # every simulated fleet would say when it is rebalanced
    load = Workload(**{one.name: getattr(asked, one.name) for one in fields(Workload)})
    fleet = replace(
        SHARED_H100 if asked.machine == "h100" else Fleet(MACHINES[asked.machine]),
        workers=asked.workers,
        rebalances=asked.rebalances,
        noise=asked.noise,
        per_device=asked.per_device,
    )
    print(f"SIMULATED: {load.prompt_tokens} tokens in, {load.output_tokens} out, on {fleet.workers} workers")  # noqa: T201
    (print_latencies if asked.without_limits else print_map)(fleet, load)


if __name__ == "__main__":
    main()
