"""Simulated regret: how many fewer of 100 requests are in time than by the best mode, which trying all of them finds.

A cell is a number of workers, a shape of requests, SLOs and a load; at load 1 the better fixed mode has 90 % in time.
`plan` sees the first half of the requests, as recorded in mode adaptive, and recommends a mode. Colocated, every
division of the workers, adaptive and what was recommended then serve the second half, each from idle engines. Steps
scatter by a tenth; in one run all take a tenth less than their models say, in another one a tenth longer.

usage: python -m tools.bench.regret [--workers 2,4,8,32] [--shapes 512/64,code] [--processes 1]
    [--out docs/results/regret.json]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Final, NamedTuple

import msgspec

from ridgeline.router.scheduler.engines import ModelledRequest
from ridgeline.router.scheduler.offline_simulation import Served, ranked
from ridgeline.router.scheduler.policies import ADAPTIVE, division_name
from tests.support.simulated_serving import (
    ADAPTIVE_STEP_TOKENS,
    KNEES,
    fixed_modes,
    fleet_model,
    in_time,
    requests_of,
)
from tools.docs.measurements import RESULTS, Record, Section, Value

SHAPES: Final = ("512/64", "128/128", "1024/24", "conv", "code")
SLOS: Final = ("tight", "balanced")
LOADS: Final = (0.7, 1.0, 1.3)


class Size(NamedTuple):
    """The cells of so many workers."""

    shapes: Sequence[str]
    slos: Sequence[str]
    loads: Sequence[float]
    requests: int
    """Of each half."""
    seeds: Sequence[int]


SHORT: Final = ("512/64", "128/128", "1024/24", "code")
SIZES: Final = {
    2: Size(SHAPES, SLOS, LOADS, 200, (1, 2)),
    4: Size(SHORT, SLOS, LOADS, 200, (1, 2)),
    8: Size(SHORT, SLOS[:1], LOADS[1:], 240, (2,)),
    32: Size(SHORT, SLOS[:1], LOADS[1:2], 640, (2,)),
}
"""By workers. More have fewer cells: from eight on each takes half a minute of CPU time, conversations more."""
SPEEDS: Final = {1: 0.9, 2: 1.1}
"""What steps take over what their models say, by seed."""
GOAL: Final = 0.95
"""Of `plan`: among modes that keep it with steps a fifth longer, the one with most requests in time."""
MEASURED: Final = {"adaptive": "adaptive", "plan": "plan", "colocated": "colocated", "division": "best division"}
"""What has a regret, as fields of `Cell` and as the page calls it."""
INTRO: Final = (
    "Simulated, each worker with the steps of SmolLM2-135M on one core. Regret: of 100 requests, how many fewer are "
    "in time than by the best mode, which trying all of them finds. The three figures are median, mean and worst "
    "over cells. A cell is a shape (tokens in / out; conv and code as in public traces), SLOs and a load. Tight "
    "SLOs are x2.5 TTFT and x1.5 TPOT of one request alone, balanced ones x5 and x2. At load 1 the better fixed "
    "mode has 90 percent in time if steps take as long as modelled. Two and four workers ran with steps a tenth "
    "shorter and longer. Eight and 32 ran with longer ones only, so that 16 to 91 percent are in time at load 1. "
    "`plan` sees the first half of the requests, and the mode that it recommends serves the second half. The best "
    "division is the best P:D ratio. The rows by workers and those by shape are the same 66 cells."
)
Asked = tuple[int, str, str, float]
"""Workers, shape, SLOs and load."""


class Cell(msgspec.Struct, frozen=True):
    """The parts of the requests that were in time."""

    workers: int
    shape: str
    slos: str
    load: float
    colocated: float
    division: float
    adaptive: float
    plan: float

    def regret(self, of: str) -> float:
        """Return what is lost, in requests of 100."""
        return 100 * float(max(getattr(self, name) for name in MEASURED) - getattr(self, of))

    @property
    def named(self) -> str:
        """All that it is."""
        return f"{self.workers} workers, {self.shape}, {self.slos} SLOs, load {self.load}"


def recommended(recorded: Sequence[ModelledRequest], workers: int) -> str:
    """Return the mode that `plan` recommends for so many workers, by requests that were recorded."""
    served = [
        Served(one.arrival_s, one.prompt_tokens, one.output_tokens, one.ttft_slo_s, one.tpot_slo_s) for one in recorded
    ]
    best = ranked(served, fleet_model(workers, step_tokens=ADAPTIVE_STEP_TOKENS), GOAL)[0]
    mode, _, division = best.policy.partition(" ")
    return division_name(int(division.partition(":")[0]), workers) if division else mode


def measure(asked: Asked, requests: int = 0) -> Cell:
    """Serve so many requests (0: as many as usual) by every mode, and have `plan` see as many before."""
    workers, shape, slos, load = asked
    number = requests or SIZES[workers].requests
    rate = load * KNEES[workers][shape][slos]
    parts: dict[str, list[float]] = {mode: [] for mode in (*fixed_modes(workers), ADAPTIVE)}
    plan = []
    for seed in SIZES[workers].seeds:

        def second_half(mode: str, seed: int = seed) -> float:
            second = requests_of(shape, slos, rate, 2 * number, seed)[number:]
            return in_time(second, workers, mode, seed, SPEEDS[seed])

        for mode, kept in parts.items():
            kept.append(second_half(mode))
        of_plan = recommended(requests_of(shape, slos, rate, number, seed), workers)
        plan.append(parts[of_plan][-1] if of_plan in parts else second_half(of_plan))
    colocated, *divisions, adaptive = map(mean, parts.values())
    return Cell(*asked, colocated, max(divisions), adaptive, mean(plan))


def cells(workers: Sequence[int], shapes: Sequence[str] = SHAPES) -> list[Asked]:
    """Return those to measure, of these shapes alone."""
    return [
        (number, shape, slos, load)
        for number in workers
        for shape, slos, load in product(SIZES[number].shapes, SIZES[number].slos, SIZES[number].loads)
        if shape in shapes
    ]


def section(found: Sequence[Cell], command: str) -> Section:
    """Return the figures of the cells, by workers, then by shape; and all cells."""
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    groups = {f"{number} workers": [one for one in found if one.workers == number] for number in SIZES}
    groups |= {shape: [one for one in found if one.shape == shape] for shape in SHAPES}
    figures = []
    for name, those in groups.items():
        if not those:
            continue
        worst = max(those, key=lambda one: one.regret("adaptive"))
        adaptive, *beside = (summary(label, [one.regret(of) for one in those]) for of, label in MEASURED.items())
        figures.append(
            Record(
                what="regret",
                shape=f"{name}, {len(those)} cells",
                unit="of 100",
                figure=adaptive,
                beside=tuple(beside),
                machine="simulated",
                date=datetime.now(UTC).date().isoformat(),
                commit=commit,
                command=command,
                note=f"adaptive is worst at {worst.named}" if worst.regret("adaptive") >= 1 else "",
            )
        )
    return Section("Regret", INTRO, tuple(figures), raw={"cells": [msgspec.structs.asdict(one) for one in found]})


def summary(of: str, regrets: Sequence[float]) -> Value:
    """Return the median, the mean and the worst."""
    return Value(of, tuple(round(one, 1) for one in (median(regrets), mean(regrets), max(regrets))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cells, tell each on stderr, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=lambda text: [*map(int, text.split(","))], default=[*SIZES])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[*SHAPES])
    parser.add_argument("--requests", type=int, default=0, help="of each half; 0: 200 to 640, by workers")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "regret.json")
    asked = parser.parse_args(arguments)
    todo, found, began_s = cells(asked.workers, asked.shapes), [], time.monotonic()
    with ProcessPoolExecutor(asked.processes) as pool:
        for cell in pool.map(partial(measure, requests=asked.requests), todo):
            found.append(cell)
            told = ", ".join(f"{label} {getattr(cell, of):.1%}" for of, label in MEASURED.items())
            at = f"{len(found)} of {len(todo)}, {time.monotonic() - began_s:.0f} s"
            print(f"{at}: {cell.named}: {told}", file=sys.stderr, flush=True)  # noqa: T201
    made = section(found, "python -m tools.bench.regret")
    asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


if __name__ == "__main__":
    main()
