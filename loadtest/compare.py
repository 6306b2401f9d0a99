"""Runs all variants on the same requests, in pairs of rounds at one rate or more, and judges them together.

The rounds of a pair have the same arrivals and lengths, and each pair has another window of the trace or another seed.
Rates are those that were given, in turn, or the ones that say most of the highest rate that each variant holds. All
rounds take about as long, as far as the trace has requests, so that a queue has time to grow at any rate. A request
that has taken twice as long as its SLOs allow is given up, so a round beyond what a variant can hold ends soon; its
requests are gone from the server before the next round begins.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import LoadTestError, UnequalError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import prepare
from ridgeline.loadtest.report.comparison import summarise_comparison
from ridgeline.loadtest.report.page import print_comparison, write_report
from ridgeline.loadtest.report.record_table import write_record_table
from ridgeline.loadtest.report.rounds import Interruption, interruptions_summary, labels_of
from ridgeline.loadtest.run.calibration import LEAST_REQUESTS, Workers
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_facts import unequal
from ridgeline.loadtest.run_folder import RECORD_TABLE, REPORT, Past, RunFolder, Settled, new_folder
from ridgeline.loadtest.statistics.attainment_curve import RoundCount, next_rate
from ridgeline.loadtest.valid_rounds import RoundRunner
from ridgeline.loadtest.variants import Variant


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison; `summary` is the content of summary.json."""

    summary: dict[str, Any]
    report: Path


async def compare(
    variants: Sequence[Variant],
    plan: ComparePlan,
    out: Path | RunFolder,
    console: Console,
    *,
    workers: Workers | None = None,
    notes: tuple[str, ...] = (),
    is_alone: bool = True,
    began_s: float | None = None,
) -> Comparison:
    """Run pairs of rounds, write summary.json, records and report.html into `out`, print tables and verdict.

    If `out` holds a run, another folder beside it is used.
    `workers` share the load, in units of the worker of variant a that is measured; without them its server says which.
    `notes`, which the caller has printed, are kept with the load. With `is_alone` work that this process did not start
    counts as a disturbance.
    Rate and SLOs are measured at variant a's first, if they are not given; a search starts at 80 % of what the unloaded
    server is calculated to hold. The plan's budget counts from `began_s`, on time.monotonic's scale; without it from
    now. Raises UnequalError before anything is sent, other kinds of LoadTestError, and NotDisaggregatedError after a
    round in that mode that did not use both pools.
    """
    began_s = time.monotonic() if began_s is None else began_s
    refuse_unequal(variants, plan)
    folder = new_folder(out if isinstance(out, RunFolder) else RunFolder(out), console)
    settled = await prepare(variants[0], plan, console, workers, notes, began_s, _context_tokens(variants))
    folder.start(msgspec.structs.replace(settled, setup=dict(folder.setup)))
    return await _to_the_end(variants, folder.past(), console, is_alone, began_s)


async def resume(
    variants: Sequence[Variant], past: Past, console: Console, *, is_alone: bool = True, began_s: float | None = None
) -> Comparison:
    """Continue an interrupted comparison after its valid rounds, with its settled plan; otherwise as `compare`.

    The budget counts the time that it ran, and not the interruption.
    """
    interruption = Interruption(past.stopped, datetime.now(UTC))
    RunFolder(past.folder).add_resumed(interruption)
    valid = sum(each.is_kept for each in past.rounds)
    console.print(
        f"going on after {counted(valid, 'valid round')}; it was interrupted at {past.stopped:%Y-%m-%d %H:%M:%S} UTC",
        highlight=False,
    )
    past = msgspec.structs.replace(past, interruptions=(*past.interruptions, interruption))
    began_s = (time.monotonic() if began_s is None else began_s) - past.spent_s
    return await _to_the_end(variants, past, console, is_alone, began_s)


async def _to_the_end(
    variants: Sequence[Variant], past: Past, console: Console, is_alone: bool, began_s: float
) -> Comparison:
    """Run the rounds that `past` has not, and write what all say."""
    runner = RoundRunner(variants, past, console, is_alone=is_alone, began_s=began_s)
    folder, settled = RunFolder(past.folder), past.settled
    pairs = _Pairs(settled, runner)
    try:
        await pairs.run()
    except (asyncio.CancelledError, LoadTestError):
        how = f"stopped before the end; to go on: ridgeline compare --resume {folder.path}"
        console.print(how, style="yellow", highlight=False, markup=False)
        raise
    summary = summarise_comparison(
        pairs.rates,
        [each for each in runner.rounds if each.pair < len(pairs.rates)],
        runner.labels,
        runner.plan,
        settled.load,
        runner.variants,
        time.monotonic() - began_s,
    )
    summary |= {"unequal": unequal_variants(variants)}
    summary |= {"setup": settled.setup, "interruptions": interruptions_summary(past.interruptions)}
    report = write_report(folder.path / REPORT, summary)
    write_record_table(folder.path / RECORD_TABLE, folder.record_lines(), runner.rounds, runner.plan.slos)
    folder.finish(summary)
    print_comparison(summary, console)
    return Comparison(summary, report)


def refuse_unequal(variants: Sequence[Variant], plan: ComparePlan) -> None:
    """Raise UnequalError if the variants differ in what can decide a comparison, unless the plan allows that."""
    differences = unequal_variants(variants)
    if differences and not plan.allow_unequal:
        raise UnequalError(differences)


def unequal_variants(variants: Sequence[Variant]) -> list[str]:
    """Say in what the variants are not equal, as far as it is known, a sentence each."""
    labels = labels_of(*(variant.mode for variant in variants)).values()
    named = dict(zip(labels, variants, strict=True))
    counts = {label: each.devices.count for label, each in named.items() if each.devices is not None}
    told = ", ".join(f"{count} in {label}" for label, count in counts.items())
    of_devices = [f"Number of devices: {told}"] if len(set(counts.values())) > 1 else []
    return [*of_devices, *unequal({label: each.facts for label, each in named.items()})]


def _context_tokens(variants: Sequence[Variant]) -> int | None:
    """Return the shortest context of the variants that say theirs."""
    return min((each.context_tokens for each in variants if each.context_tokens), default=None)


@dataclass
class _Pairs:
    """Runs pairs of rounds at the rates that were given, or at those that say most."""

    settled: Settled
    runner: RoundRunner
    rates: list[float] = field(default_factory=list)
    """The rate of each pair."""

    def __post_init__(self) -> None:
        assert self.settled.load.rate is not None, "checked when it was settled"
        self._start_rate, self._traces, self._plan = self.settled.load.rate, self.settled.traces, self.runner.plan

    async def run(self) -> None:
        """Measure until every interval is as narrow as a search asks for, or pairs or time are used up.

        After an interruption the same pairs come first, and those that were valid are not run again.
        """
        plan, found = self._plan, dict[str, list[RoundCount]]()
        rate = self._next(found)
        while rate is not None and len(self.rates) < plan.most_pairs and not self._is_over():
            for side, one in (await self._measure(rate)).items():
                found.setdefault(side, []).append(one)
            rate = self._next(found)

    def _next(self, found: dict[str, list[RoundCount]]) -> float | None:
        """Return the rate of the next pair; None if a search knows all."""
        plan, start_rate = self._plan, self._start_rate
        if plan.rates:
            return plan.rates[len(self.rates) % len(plan.rates)]
        return next_rate(found, start_rate, plan.attainment) if found else start_rate

    async def _measure(self, rate: float) -> dict[str, RoundCount]:
        """Run a pair at this rate, with requests of its own, and count those that met the SLOs."""
        pair = len(self.rates)
        trace = self._traces.at_rate(pair, rate, self._requests_at(rate))
        self.rates.append(rate)
        results = await self.runner.pair(pair, trace, f"pair {pair + 1}, {rate:.3g} requests/s")
        found = {side: self._counted(rate, result) for side, result in results.items()}
        shares = (
            f"{self.runner.labels[side]} {found[side].met / found[side].total:.0%}" for side in self.runner.variants
        )
        self.runner.console.print(
            f"pair {pair + 1} at {rate:.3g} requests/s: {', '.join(shares)} within the SLOs",
            highlight=False,
            markup=False,
        )
        return {str(side): one for side, one in found.items()}

    def _requests_at(self, rate: float) -> int:
        """Return the requests with which a round takes as long as one at the first rate.

        A fixed number would arrive at a high rate before the first answer ends, and never make a queue.
        """
        traces = self._traces
        wanted = round((traces.requests - 1) * rate / self._start_rate) + 1
        return max(min(traces.requests, LEAST_REQUESTS), min(traces.most_at_a_rate, wanted))

    def _is_over(self) -> bool:
        """Return whether another round of every variant, as long as the longest, would end after the budget."""
        budget_s = self._plan.budget_s
        if budget_s is None or not self.rates or self.runner.has_begun(len(self.rates)):
            return False  # the first pair runs in any case
        next_s = len(self.runner.variants) * self.runner.longest_s
        return time.monotonic() - self.runner.began_s + next_s > budget_s

    def _counted(self, rate: float, result: ReplayResult) -> RoundCount:
        limits = self._plan.slos.in_seconds()
        records = result.counted_records
        return RoundCount(rate, sum(record.meets(*limits) for record in records), len(records))
