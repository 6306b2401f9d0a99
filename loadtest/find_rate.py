"""Finds the maximum goodput rate at which a share of requests meets the SLOs, in every variant, by pairs of rounds.

All rounds have the same number of requests, so each says as much of attainment as another; a round at a higher rate is
shorter. A request that has taken twice as long as its limits allow is given up, so a round beyond what a variant can
hold ends soon; its requests are gone from the server before the next round begins.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import MOST_PAIRS_OF_A_SEARCH, ComparePlan
from ridgeline.loadtest.preparation import Prepared, prepare
from ridgeline.loadtest.rate_search import Bounds, Round, least_requests, search
from ridgeline.loadtest.report.rates import print_rates, summarise_rates, write_rate_report
from ridgeline.loadtest.report.record_table import write_record_table
from ridgeline.loadtest.run.calibration import Workers
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run_folder import RECORD_TABLE, RECORDS, REPORT, SUMMARY, RunFolder, new_folder
from ridgeline.loadtest.trace.windows import PairTraces
from ridgeline.loadtest.valid_rounds import RoundRunner, new_runner
from ridgeline.loadtest.variants import Variant

GIVEN_UP_AFTER = 2.0
"""A request is given up after this many times the time that the longest one has within its SLOs."""


@dataclass(frozen=True, slots=True)
class FoundRates:
    """The result of a search; `summary` is the content of summary.json."""

    summary: dict[str, Any]
    report: Path


async def find_rate(
    variants: Sequence[Variant],
    plan: ComparePlan,
    out: Path | RunFolder,
    console: Console,
    *,
    workers: Workers | None = None,
    notes: tuple[str, ...] = (),
    is_alone: bool = True,
    began_s: float | None = None,
) -> FoundRates:
    """Measure two or three variants, write summary.json, records and report.html into `out`, and print the rates.

    A search cannot be resumed. The parameters are those of `ridgeline.loadtest.compare.compare`. Without a rate the
    search starts at 80 % of what the unloaded server is calculated to hold. Raises LoadTestError.
    """
    began_s = time.monotonic() if began_s is None else began_s
    bounds = Bounds(attainment=plan.attainment, most_pairs=MOST_PAIRS_OF_A_SEARCH)
    folder = new_folder(out if isinstance(out, RunFolder) else RunFolder(out), console)
    prepared = await prepare(
        variants[0], plan.of_search(), console, workers, notes, began_s, least_requests(plan.attainment)
    )
    if prepared.load.rate is None:
        raise ServerError("all requests of this trace arrive at once, so there is no rate to start from: give --rate")
    deadline_s = bounded_deadline_s(prepared)
    console.print(f"a request is given up after {deadline_s:.3g} s", highlight=False)
    given_up = prepared.plan.model_copy(update={"deadline_s": deadline_s})
    runner = new_runner(
        variants,
        dataclasses.replace(prepared, plan=given_up),
        folder.path / RECORDS,
        console,
        is_alone=is_alone,
        began_s=began_s,
    )
    pairs = _Pairs(prepared, runner)
    found = await search(pairs.measure, prepared.load.rate, bounds, pairs.is_over)
    if not found:
        raise ServerError("no pair of rounds was finished, so no rate was found: give a larger --budget-s")
    devices = {side: variant.devices for side, variant in runner.variants.items()}
    summary = summarise_rates(found, pairs.rates, runner.rounds, runner.labels, runner.plan, prepared.load, devices)
    summary["setup"] = dict(folder.setup)
    (folder.path / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    report = write_rate_report(folder.path / REPORT, summary)
    write_record_table(folder.path / RECORD_TABLE, folder.record_lines(), runner.rounds, runner.plan.slos)
    print_rates(summary, console)
    return FoundRates(summary, report)


def bounded_deadline_s(prepared: Prepared) -> float:
    """Return the plan's deadline, or less if no request within its SLOs could take so long."""
    plan = prepared.plan
    ttft_s, tpot_s, _ = plan.slos.in_seconds()
    return min(plan.deadline_s, GIVEN_UP_AFTER * (ttft_s + tpot_s * prepared.traces.longest_output_tokens))


@dataclass
class _Pairs:
    """Runs pairs of rounds at the rates that the search asks for."""

    prepared: Prepared
    runner: RoundRunner
    rates: list[float] = field(default_factory=list)
    """The rate of each pair."""

    async def measure(self, rate: float) -> Mapping[str, Round]:
        """Run a pair at this rate, with requests of its own, and count those that met the SLOs."""
        pair, plan = len(self.rates), self.prepared.plan
        same_length = {"rate": rate, "limit": self.prepared.traces.requests, "duration_s": None}
        traces = PairTraces(plan.model_copy(update=same_length), self.prepared.max_model_tokens)
        trace = traces.at_rate(pair, rate)
        self.rates.append(rate)
        results = await self.runner.pair(pair, trace, f"pair {pair + 1}, {rate:.3g} requests/s")
        found = {side: self._counted(rate, result) for side, result in results.items()}
        shares = (
            f"{self.runner.labels[side]} {found[side].met / found[side].total:.0%}" for side in self.runner.variants
        )
        self.runner.console.print(
            f"pair {pair + 1} at {rate:.3g} requests/s: {', '.join(shares)} within the SLOs", highlight=False
        )
        return {str(side): one for side, one in found.items()}

    def is_over(self) -> bool:
        """Return whether another round of every variant, as long as the longest, would end after the budget."""
        budget_s = self.prepared.plan.budget_s
        if budget_s is None:
            return False
        next_s = len(self.runner.variants) * self.runner.longest_s
        return time.monotonic() - self.runner.began_s + next_s > budget_s

    def _counted(self, rate: float, result: ReplayResult) -> Round:
        limits = self.prepared.plan.slos.in_seconds()
        return Round(rate, sum(record.meets(*limits) for record in result.records), len(result.records))
