"""Requests of known shapes served by modelled fleets: the gate of mode adaptive, and its regret. All is simulated."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.engines import ModelledRequest, ModelledWorker, modelled
from ridgeline.router.scheduler.features import WINDOW_STEPS, FleetModel, WorkerSpec, window_tokens
from ridgeline.router.scheduler.offline_simulation import AdaptiveSimulation, part_of
from ridgeline.router.scheduler.policies import ADAPTIVE, division_name, make_policy
from ridgeline.router.scheduler.simulation import Simulation
from ridgeline.router.watching import LOOK_EVERY_S, PAUSE_S

BF16: Final = StepModel(
    base_s=0.030,
    per_prefill_token_s=0.0014,
    per_sequence_s=0.003,
    per_context_token_s=1e-6,
    per_attended_token_s=0.0014 / 18_000,
    steps=100,
)
"""About what SmolLM2-135M takes on one core with AVX-512 in bfloat16."""
SLOS: Final = {"tight": (2.5, 1.5), "balanced": (5.0, 2.0), "loose": (12.0, 4.0)}
"""TTFT over the time of the prompt's step (of the 90th percentile), TPOT over that of a lone decode step."""
HANDOVER_S: Final = 0.03
NOISE: Final = 0.1
"""Of the steps' times, as a standard deviation: what machines change by."""
COLOCATED_STEP_TOKENS: Final = 2048
STEP_TOKENS: Final = 512
ADAPTIVE_STEP_TOKENS: Final = STEP_TOKENS + 80
"""As `PoolsConfig.for_adaptive` has it: beside 80 sequences a prompt of 512 tokens takes one step."""
PART_S: Final = 0.0005
"""What a part of a comparison takes."""
Draw = Callable[[random.Random], tuple[int, int]]


def fixed(prompt_tokens: int, output_tokens: int) -> Draw:
    return lambda draw: (prompt_tokens, output_tokens)


def about(draw: random.Random, median: float, sigma: float, least: int, most: int) -> int:
    return int(min(most, max(least, median * math.exp(draw.gauss(0, sigma)))))


SHAPES: Final[dict[str, Draw]] = {
    "512/64": fixed(512, 64),
    "1024/24": fixed(1024, 24),
    "2048/16": fixed(2048, 16),
    "128/128": fixed(128, 128),
    "64/128": fixed(64, 128),
    "128/512": fixed(128, 512),
    "conv": lambda draw: (about(draw, 1020, 0.9, 16, 4000) // 2, about(draw, 129, 0.9, 2, 700) // 2 + 1),
    "code": lambda draw: (about(draw, 1500, 0.8, 32, 6000) // 2, about(draw, 13, 1.0, 2, 300) // 2 + 2),
}
"""Tokens in and out; the last two are about Azure's traces of 2023, halved."""
KNEES: Final = {
    2: {
        "512/64": {"tight": 0.578, "balanced": 0.784, "loose": 1.238},
        "1024/24": {"tight": 0.27, "balanced": 0.374, "loose": 0.623},
        "2048/16": {"tight": 0.148, "balanced": 0.184, "loose": 0.296},
        "128/128": {"tight": 0.633, "balanced": 1.191, "loose": 2.532},
        "64/128": {"tight": 0.848, "balanced": 1.566, "loose": 3.262},
        "128/512": {"tight": 0.214, "balanced": 0.391, "loose": 0.856},
        "conv": {"tight": 0.736, "balanced": 0.889, "loose": 1.054},
        "code": {"tight": 0.5, "balanced": 0.609, "loose": 0.748},
    },
    4: {
        "512/64": {"tight": 1.486, "balanced": 1.982, "loose": 2.84},
        "1024/24": {"tight": 1.205, "balanced": 1.629, "loose": 2.127},
        "2048/16": {"tight": 0.613, "balanced": 0.85, "loose": 1.046},
        "128/128": {"tight": 1.713, "balanced": 2.83, "loose": 5.063},
        "64/128": {"tight": 2.088, "balanced": 3.392, "loose": 6.524},
        "128/512": {"tight": 0.558, "balanced": 0.894, "loose": 1.713},
        "conv": {"tight": 1.716, "balanced": 1.962, "loose": 2.55},
        "code": {"tight": 1.443, "balanced": 2.121, "loose": 2.893},
    },
    8: {
        "512/64": {"tight": 4.25, "balanced": 6.643, "loose": 7.348},
        "1024/24": {"tight": 3.524, "balanced": 4.701, "loose": 5.43},
        "2048/16": {"tight": 2.038, "balanced": 2.287, "loose": 2.642},
        "128/128": {"tight": 4.701, "balanced": 7.243, "loose": 11.16},
        "64/128": {"tight": 5.508, "balanced": 8.366, "loose": 14.258},
        "128/512": {"tight": 1.401, "balanced": 2.128, "loose": 3.733},
        "conv": {"tight": 3.68, "balanced": 4.701, "loose": 6.837},
        "code": {"tight": 3.575, "balanced": 5.352, "loose": 7.673},
    },
    32: {
        "512/64": {"tight": 21.101, "balanced": 27.747},
        "128/128": {"tight": 21.718, "balanced": 32.047},
        "1024/24": {"tight": 15.818, "balanced": 19.635},
        "conv": {"tight": 15.818, "balanced": 18.27},
        "code": {"tight": 16.048, "balanced": 23.007},
    },
}
"""Requests a second at which the better fixed mode has 90 % in time, by workers, shape and SLOs; found by `knee`."""


def fleet_model(
    workers: int = 2,
    model: StepModel = BF16,
    step_tokens: int = STEP_TOKENS,
    per_device: int = 1,
    handover_s: float = HANDOVER_S,
    **limits: int,
) -> FleetModel:
    """Workers that are alike, of which every `per_device` take turns on one device."""
    window = window_tokens(model, step_tokens)
    specs = [
        WorkerSpec(f"w{number}", model, step_tokens, window, device=f"d{number // per_device}", **limits)
        for number in range(workers)
    ]
    return FleetModel(tuple(specs), handover_s)


def requests_of(shape: str, slos: str, rate: float, number: int, seed: int) -> list[ModelledRequest]:
    """So many requests at random times, `rate` a second."""
    draw = random.Random(7)
    lengths = sorted(SHAPES[shape](draw)[0] for _ in range(400))
    long, (ttft, tpot) = lengths[360], SLOS[slos]
    ttft_slo_s, tpot_slo_s = ttft * BF16.step_s(long, 0, 0, long * long / 2), tpot * BF16.decode_s(1, long)
    draw, now_s, made = random.Random(seed), 0.0, []
    for index in range(number):
        now_s += draw.expovariate(rate)
        made.append(ModelledRequest(index, now_s, *SHAPES[shape](draw), ttft_slo_s, tpot_slo_s))
    return made


def fixed_modes(workers: int) -> list[str]:
    """Mode colocated, and mode disaggregated in each division of the workers, by eighths of more than eight."""
    grain = max(1, workers // 8)
    return ["colocated", *(division_name(number, workers) for number in range(grain, workers, grain))]


def in_time(requests: Sequence[ModelledRequest], workers: int, mode: str, seed: int, speed: float = 1.0) -> float:
    """Serve them by a fixed mode or by mode adaptive; steps take `speed` times as long as their models say."""
    step_tokens = {ADAPTIVE: ADAPTIVE_STEP_TOKENS, "colocated": COLOCATED_STEP_TOKENS}.get(mode, STEP_TOKENS)
    known = fleet_model(workers, step_tokens=step_tokens)
    engines = modelled(known.workers, speed)
    for engine in engines:
        engine.noise = NOISE
        engine.draw.seed(f"{engine.worker_id}{seed}")
        if mode != ADAPTIVE:
            engine.window_tokens = WINDOW_STEPS * step_tokens
    if mode == ADAPTIVE:
        ComparesMeanwhile(engines, known).run(requests)
    else:
        Simulation(engines, make_policy(mode, {}), HANDOVER_S, by_deadline=False).run(requests)
    return part_of([one.in_time for one in requests])


class ComparesMeanwhile(AdaptiveSimulation):
    """Looks as often as the router whether a comparison is due, and serves as before while it takes its time."""

    def __init__(self, engines: Sequence[ModelledWorker], fleet: FleetModel) -> None:
        super().__init__(engines, fleet)
        self._comparing: Iterator[None] = iter(())
        self._busy = False
        self._next_part_s = 0.0

    def _compare(self) -> None:
        if not self._busy and self.now_s >= self._next_part_s + LOOK_EVERY_S:
            self._comparing, self._busy, self._next_part_s = self.adaptive.compare(), True, self.now_s

    def _dispatch(self) -> None:
        while self._busy and self._next_part_s <= self.now_s:
            self._busy = next(self._comparing, self) is None
            self._next_part_s += PART_S + PAUSE_S
        super()._dispatch()


def knee(workers: int, shape: str, slos: str, seeds: Sequence[int] = (1, 2)) -> float:
    """The rate at which the better fixed mode has 90 % in time."""
    low, high = 0.05 * workers, 2.0 * workers
    number = 100 + 50 * workers
    for _ in range(8):
        rate = math.sqrt(low * high)
        best = max(
            sum(in_time(requests_of(shape, slos, rate, number, seed), workers, mode, seed) for seed in seeds)
            for mode in fixed_modes(workers)
        )
        low, high = (rate, high) if best >= 0.9 * len(seeds) else (low, rate)
    return low
