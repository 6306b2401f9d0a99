"""The first part: for each workload the idle server, then blocks of rounds until its share of the time is up.

A block has a round of each pure mode at each rate, and one of the adaptive mode for each cell, in random order. It is
followed by climbs: rounds of the adaptive mode alone, in cells where another rate may serve more, with the arrivals
that the other modes had at that rate. What the journal has is not run again; the course follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.rate_search import Ratio, Round
from ridgeline.loadtest.run.calibration import minutes_text, most_rate, workers_of
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import fit_context
from ridgeline.loadtest.trace.trace import Trace
from ridgeline.loadtest.trace.windows import PairTraces
from tools.bench.modes.cells import Cell, Goodput, cell_of, counted, mean_ratio, next_cell_rate
from tools.bench.modes.fleet import Fleet, hopeless_after_s, round_plan, shuffled
from tools.bench.modes.journal import Clock, Ended, Journal, Limits, Measured, Place, RoundEnded, RoundSpec, limits_of
from tools.bench.modes.settings import ADAPTIVE, FROM_FILES, Settings

POISSON: Final = "poisson:rate=1,input=512,output=64,n={rows},seed={seed}"
ROWS: Final = 600
"""Requests of a workload; rounds take windows of it in turn."""
SCALES: Final = {"conversation": (0.25, 0.25), "code": (0.25, 0.5)}
"""The factors of prompt and answer lengths."""
CALCULATED_TPOT: Final = 2.0
"""The middle rate is for a TPOT of this many unloaded steps."""
CALCULATED_SHARE: Final = 0.8
"""The middle rate is this share of what the workers are calculated to hold."""
WARM_UP_REQUESTS: Final = 10
TRIES: Final = 3
"""Of a round in which a worker was lost; then the run goes on without it."""


def requests_of(name: str, settings: Settings, folder: Path, max_model_tokens: int | None) -> ComparePlan:
    """Return the plan of a workload; the scaled slice of a trace is written to the folder. Raises TraceError."""
    if name not in FROM_FILES:
        return settings.plan_of(POISSON.format(rows=ROWS, seed=settings.seed))
    whole, (inputs, outputs) = load_trace(settings.traces[name]), SCALES[name]
    rows = tuple(
        replace(
            row,
            input_tokens=max(1, round(row.input_tokens * inputs)),
            output_tokens=max(1, round(row.output_tokens * outputs)),
        )
        for row in whole.rows[:ROWS]
    )
    lines = [
        {"timestamp": row.arrival_s * 1e3, "input_length": row.input_tokens, "output_length": row.output_tokens}
        for row in fit_context(replace(whole, rows=rows), max_model_tokens).rows
    ]
    path = folder / "traces" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return settings.plan_of(str(path))


async def run_map(fleet: Fleet, settings: Settings, journal: Journal, clock: Clock, console: Console) -> None:
    """Run the workloads that are left, each with its share of the time left; write and print what was found."""
    left = [name for name in settings.workloads if journal.ended(name) is None]
    for place, name in enumerate(left):
        ends_s = clock.spent_s + clock.left_s / (len(left) - place)
        plan = requests_of(name, settings, journal.folder, fleet.max_model_tokens)
        try:
            await Course(name, plan, settings, fleet, journal, clock, ends_s, console).run()
        finally:
            cells = {each: cells_of(each, journal, settings) for each in settings.workloads}
            rows = [cell.as_row(each, settings.variants) for each, found in cells.items() for cell in found]
            means = {each: mean_ratio(found) for each, found in cells.items()}
            journal.write_summary({"cells": rows, "mean_ratio": means}, settings, fleet.setup)
        console.print(table_of(cells[name], settings.variants, name))
        if means[name] is not None:
            sentence = f"{name}: adaptive / better of the others, geometric mean {means[name]:.3f}"
            console.print(sentence, highlight=False)


def cells_of(name: str, journal: Journal, settings: Settings) -> list[Cell]:
    """Return the cells of a workload; none before it was measured."""
    measured, rounds = journal.measured(name), journal.rounds(name)
    if measured is None:
        return []
    places = {place: limits_at(settings, measured, place) for place in settings.cells}
    return [cell_of(rounds, settings.variants, place, limits) for place, limits in places.items()]


def limits_at(settings: Settings, measured: Measured, place: Place) -> Limits:
    """Return the limits of a cell."""
    return limits_of(measured.unloaded, settings.ttft_factors[place[0]], settings.tpot_factors[place[1]])


@dataclass
class Course:
    """The rounds of one workload."""

    name: str
    plan: ComparePlan
    settings: Settings
    fleet: Fleet
    journal: Journal
    clock: Clock
    ends_s: float
    """The time of the clock at which this workload has had its share."""
    console: Console

    async def run(self) -> None:
        """Measure, and run blocks. Raises LoadTestError if the server cannot be reached."""
        settings = self.settings
        measured = self.journal.measured(self.name)
        if measured is None:
            unloaded = await self.fleet.measure(settings.pure_variants[0], self.plan)
            measured = Measured(self.name, unloaded, self.clock.spent_s)
            self.journal.add(measured)
        unloaded = measured.unloaded
        limits = {place: limits_at(settings, measured, place) for place in settings.cells}
        calculated, _ = most_rate(unloaded, workers_of(unloaded.workers), CALCULATED_TPOT * unloaded.median_tpot_s)
        middle = settings.rates.get(self.name) or float(f"{CALCULATED_SHARE * calculated:.3g}")
        rates = sorted({float(f"{middle * factor:.3g}") for factor in settings.rate_factors})
        self._say(
            f"unloaded TTFT {unloaded.median_ttft_s:.3g} s, step {unloaded.median_tpot_s * 1e3:.3g} ms; "
            f"rates {', '.join(f'{rate:g}' for rate in rates)} requests/s"
        )
        longest = max(row.output_tokens for row in load_trace(self.plan.trace).rows)
        plan = round_plan(self.plan, limits[min(limits)], hopeless_after_s(limits[max(limits)], longest))
        for variant in settings.pure_variants:
            await self.fleet.warm_up(variant, self._window(0, WARM_UP_REQUESTS, 1.0), plan)
        note = await self._blocks(rates, min(rates, key=lambda rate: abs(rate - middle)), limits, plan)
        self.journal.add(Ended(self.name, note, self.clock.spent_s))

    async def _blocks(
        self, rates: Sequence[float], middle: float, limits: dict[Place, Limits], plan: ComparePlan
    ) -> str | None:
        """Run blocks while there is time, each followed by climbs; return a sentence if one was cut."""
        number, tried, settings = 0, set[tuple[Place | None, float]](), self.settings
        for block in range(settings.most_blocks):
            windows = {rate: block * len(rates) + place for place, rate in enumerate(rates)}
            specs = [
                self._spec(number, variant, rate, windows[rate]) for variant in settings.pure_variants for rate in rates
            ]
            specs += self._adaptive(number, windows, middle, limits)
            while specs:
                tried |= {(spec.cell, spec.rate) for spec in specs}
                for spec in shuffled(specs, f"{settings.seed} {self.name} {number}"):
                    if not await self._run(spec, limits, plan):
                        return f"the time was up in block {block + 1}: its other rounds were left out"
                number += 1
                climbs = self._adaptive(number, windows, middle, limits)
                specs = [spec for spec in climbs if (spec.cell, spec.rate) not in tried]
        return None

    def _spec(self, number: int, variant: str, rate: float, window: int, cell: Place | None = None) -> RoundSpec:
        return RoundSpec(self.name, number, variant, rate, window, self.settings.requests, cell)

    def _adaptive(
        self, number: int, windows: dict[float, int], middle: float, limits: dict[Place, Limits]
    ) -> list[RoundSpec]:
        """Return a round of the adaptive mode for each cell, at the rate that earlier rounds make worth one."""
        if ADAPTIVE not in self.settings.variants:
            return []
        before = [each for each in self.journal.rounds(self.name) if each.spec.block < number]
        found = []
        for place, limit in limits.items():
            of_variant = {variant: counted(before, variant, place, limit) for variant in self.settings.pure_variants}
            others: dict[str, list[Round]] = {variant: each for variant, each in of_variant.items() if each}
            rate = next_cell_rate(list(windows), middle, counted(before, ADAPTIVE, place, limit), others)
            found.append(self._spec(number, ADAPTIVE, rate, windows[rate], place))
        return found

    async def _run(self, spec: RoundSpec, limits: dict[Place, Limits], plan: ComparePlan) -> bool:
        """Run a round, again if it is void; return False if it would end after this workload's time."""
        if self.journal.done(spec) is not None:
            return True
        if self.clock.spent_s + spec.requests / spec.rate > self.ends_s:
            return False
        told = None if spec.cell is None else limits[spec.cell]
        for _ in range(TRIES):
            trace = self._window(spec.window, spec.requests, spec.rate)
            ended = await self.fleet.round(spec, trace, plan, told, self.journal, self.clock)
            self._tell(ended, told or limits[max(limits)])
            if ended.void is None:
                break
        return True

    def _window(self, window: int, requests: int, rate: float) -> Trace:
        """Return a window of the requests, scaled so that its own mean rate is the one asked for."""
        traces = PairTraces(self.plan.model_copy(update={"limit": requests}), self.fleet.max_model_tokens)
        return traces.at_rate(window, rate)

    def _tell(self, ended: RoundEnded, limits: Limits) -> None:
        met = sum(one.meets(limits) for one in ended.outcomes)
        told = [
            f"{ended.spec.variant} at {ended.spec.rate:.3g} requests/s: {met} of {len(ended.outcomes)} within "
            f"{limits.ttft_ms:g} and {limits.tpot_ms:g} ms, {ended.took_s:.0f} s"
        ]
        told += [f"VOID: {ended.void}"] if ended.void else [f"disturbed: {each}" for each in ended.disturbed]
        self._say(", ".join(told))

    def _say(self, sentence: str) -> None:
        left = minutes_text(max(0.0, self.clock.left_s))
        self.console.print(f"[{left} left] {self.name}: {sentence}", highlight=False, markup=False)


def table_of(cells: Sequence[Cell], variants: Sequence[str], title: str) -> Table:
    """Return the table of one workload, a row for each pair of limits."""
    columns = [
        "TTFT <= s",
        "TPOT <= ms",
        *(f"{variant}, requests/s" for variant in variants),
        "winner",
        "adaptive / better",
    ]
    table = Table(*columns, title=title)
    for cell in cells:
        shown = [_goodput_text(cell.variants.get(variant)) for variant in variants]
        limits = cell.limits
        table.add_row(f"{limits.ttft_ms / 1e3:.3g}", f"{limits.tpot_ms:g}", *shown, cell.winner, ratio_text(cell.ratio))
    return table


def ratio_text(ratio: Ratio | None) -> str:
    """Return a ratio with its interval; an open end is a question mark."""
    if ratio is None:
        return "-"
    told, low, high = (f"{end:.2f}" if end is not None else "?" for end in (ratio.ratio, ratio.low, ratio.high))
    return f"{told} ({low} to {high})"


def _goodput_text(goodput: Goodput | None) -> str:
    if goodput is None:
        return "-"
    return f"{goodput.requests_per_s:.3f} ({goodput.low:.2f} to {goodput.high:.2f}) at {goodput.rate:.3g}"
