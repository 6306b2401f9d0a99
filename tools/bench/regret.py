"""Simulated regret: how many fewer of 100 requests are in time than by the best mode, which trying all of them finds.

A cell is a number of workers, a shape of requests, SLOs and a load; at load 1 the better fixed mode has 90 % in time.
`plan` sees the first half of the requests, as recorded in mode adaptive, and recommends a mode. Colocated, every
division of the workers, adaptive and what was recommended then serve the second half, each from idle engines. Steps
scatter by a tenth; in one run all take a tenth longer than their models say, in another one a tenth less.

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
from typing import Final

import msgspec

from ridgeline.router.scheduler.engines import ModelledRequest
from ridgeline.router.scheduler.offline_simulation import Served, tried, usual_policies
from ridgeline.router.scheduler.registry import ADAPTIVE
from tests.support.simulated_serving import (
    ADAPTIVE_STEP_TOKENS,
    KNEES,
    fixed_modes,
    fleet_model,
    in_time,
    requests_of,
)
from tools.docs.measurements import RESULTS, Record, Section, Value

WORKERS: Final = (2, 4, 8, 32)
SHAPES: Final = ("512/64", "128/128", "1024/24", "conv", "code")
SLOS: Final = ("tight", "balanced")
LOADS: Final = (0.7, 1.0, 1.3)
FEW_CELLS: Final = 32
"""So many workers take a minute a cell: they have tight SLOs and load 1 alone."""
REQUESTS: Final = {2: 200, 4: 200, 8: 240, 32: 640}
"""Of a half, by workers."""
SPEEDS: Final = {1: 0.9, 2: 1.1}
"""What steps take over what their models say, by seed."""
GOAL: Final = 0.95
"""Of `plan`: among modes that keep it with steps a fifth longer, the one with most requests in time."""
MEASURED: Final = {"adaptive": "adaptive", "plan": "plan", "colocated": "colocated", "division": "the best division"}
"""What has a regret, as fields of `Cell` and as the page calls it."""
INTRO: Final = (
    "Simulated, on step models of two CPU cores: how many fewer of 100 requests were in time than by the best of all "
    "modes, each tried; median, mean and worst over cells of shape, SLOs and load. `plan` recommends by the requests "
    "before. The best division is known only afterwards. Step models err by a tenth; of 32 workers, one SLO and load."
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
    best_division: str
    planned: tuple[str, ...]
    """What `plan` recommended, by seed."""

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
        Served(one.arrival_s, one.prompt_tokens, one.output_tokens, one.ttft_slo_s, one.tpot_slo_s, None, None)
        for one in recorded
    ]
    fleet = fleet_model(workers, step_tokens=ADAPTIVE_STEP_TOKENS)
    known = {*fixed_modes(workers), ADAPTIVE}
    options = [tried(served, fleet, name) for name in usual_policies(workers) if name in known]
    return max(options, key=lambda one: (min(one.least, GOAL), one.least + one.in_time)).policy


def measure(asked: Asked, number: int = 0) -> Cell:
    """Serve `number` requests, else as many as usual, by every mode, and have `plan` see as many before."""
    workers, shape, slos, load = asked
    number = number or REQUESTS[workers]
    rate = load * KNEES[workers][shape][slos]
    parts: dict[str, list[float]] = {mode: [] for mode in (*fixed_modes(workers), ADAPTIVE)}
    planned = []
    for seed, speed in SPEEDS.items():
        for mode, kept in parts.items():
            requests = requests_of(shape, slos, rate, 2 * number, seed)[number:]
            kept.append(in_time(requests, workers, mode, seed, speed))
        planned.append(recommended(requests_of(shape, slos, rate, number, seed), workers))
    found = {mode: mean(kept) for mode, kept in parts.items()}
    best = max(fixed_modes(workers)[1:], key=found.__getitem__)
    plan = mean(parts[mode][run] for run, mode in enumerate(planned))
    return Cell(*asked, found["colocated"], found[best], found[ADAPTIVE], plan, best, tuple(planned))


def cells(workers: Sequence[int], shapes: Sequence[str]) -> list[Asked]:
    """Return those to measure."""
    full, few = (*product(shapes, SLOS, LOADS),), (*product(shapes, SLOS[:1], LOADS[1:2]),)
    return [(number, *rest) for number in workers for rest in (few if number >= FEW_CELLS else full)]


def section(found: Sequence[Cell], command: str) -> Section:
    """Return the figures of the cells, by workers, then by shape; and all cells."""
    git = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    groups = {f"{number} workers": [one for one in found if one.workers == number] for number in WORKERS}
    groups |= {shape: [one for one in found if one.shape == shape] for shape in SHAPES}
    figures = []
    for name, those in groups.items():
        if not those:
            continue
        worst = max(those, key=lambda one: one.regret("adaptive"))
        adaptive, *beside = (summary(label, [one.regret(of) for one in those]) for of, label in MEASURED.items())
        figures.append(
            Record(
                what="requests of 100 that the best mode would have kept too",
                shape=f"{name}, {len(those)} cells",
                unit="fewer in time",
                figure=adaptive,
                beside=tuple(beside),
                machine="simulated",
                date=datetime.now(UTC).date().isoformat(),
                commit=commit,
                command=command,
                note=f"adaptive is worst at {worst.named}",
            )
        )
    return Section("Regret", INTRO, tuple(figures), raw={"cells": [msgspec.structs.asdict(one) for one in found]})


def summary(of: str, regrets: Sequence[float]) -> Value:
    """Return the median, the mean and the worst."""
    return Value(of, tuple(round(one, 1) for one in (median(regrets), mean(regrets), max(regrets))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cells, tell each on stderr, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=lambda text: [*map(int, text.split(","))], default=[*WORKERS])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=[*SHAPES])
    parser.add_argument("--requests", type=int, default=0, help="of each half; 0: 200 to 800, by workers")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "regret.json")
    asked = parser.parse_args(arguments)
    todo, found, began_s = cells(asked.workers, asked.shapes), [], time.monotonic()
    with ProcessPoolExecutor(asked.processes) as pool:
        for cell in pool.map(partial(measure, number=asked.requests), todo):
            found.append(cell)
            told = ", ".join(f"{label} {getattr(cell, of):.1%}" for of, label in MEASURED.items())
            at = f"{len(found)} of {len(todo)}, {time.monotonic() - began_s:.0f} s"
            print(f"{at}: {cell.named}: {told}", file=sys.stderr, flush=True)  # noqa: T201
    made = section(found, "python -m tools.bench.regret")
    asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


if __name__ == "__main__":
    main()
