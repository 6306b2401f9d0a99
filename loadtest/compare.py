"""Runs both variants on the same requests, in pairs of rounds, until they can be told apart or cannot.

Both rounds of a pair have the same arrivals and lengths, and each pair has another window of the trace or another seed.
No two rounds share a prompt's beginning, so prefix caches are cold.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.preparation import Prepared, prepare, prepared_before
from ridgeline.loadtest.report.page import write_report
from ridgeline.loadtest.report.record_table import write_record_table
from ridgeline.loadtest.report.rounds import Interruption, interruptions_summary, summarise_comparison
from ridgeline.loadtest.report.tables import print_comparison
from ridgeline.loadtest.run.calibration import Workers
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run_folder import (
    RECORD_TABLE,
    RECORDS,
    REPORT,
    TUNING,
    Past,
    RunFolder,
    new_folder,
    saying_how_to_go_on,
)
from ridgeline.loadtest.statistics.looks import looks_until
from ridgeline.loadtest.statistics.outcome import Conclusion, conclude
from ridgeline.loadtest.statistics.pairs import PairDifference, pair_difference
from ridgeline.loadtest.tuning import Candidates, tune
from ridgeline.loadtest.valid_rounds import RoundRunner, new_runner, taken_up
from ridgeline.loadtest.variants import Variant


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison; `summary` is the content of summary.json."""

    summary: dict[str, Any]
    conclusion: Conclusion
    report: Path


async def compare(
    variants: tuple[Variant, Variant] | Candidates,
    plan: ComparePlan,
    out: Path | RunFolder,
    console: Console,
    *,
    workers: Workers | None = None,
    notes: tuple[str, ...] = (),
    is_alone: bool = True,
    began_s: float | None = None,
) -> Comparison:
    """Run pairs of rounds, write summary.json, records and report.html into `out`, print tables and outcome.

    If `out` holds a run, another folder beside it is used.
    `workers` share the load, in units of the worker of variant a that is measured; without them its server says which.
    `notes` are printed with the load. With `is_alone` work that this process did not start counts as a disturbance.
    Of candidates one of each variant is chosen before the first pair; rate and SLOs are measured at variant a's first.
    The plan's budget counts from `began_s`, on time.monotonic's scale; without it from now.
    Raises LoadTestError, and NotDisaggregatedError after the first round in that mode that did not use both pools.
    """
    began_s = time.monotonic() if began_s is None else began_s
    folder = new_folder(out if isinstance(out, RunFolder) else RunFolder(out), console)
    first = variants[0] if isinstance(variants, tuple) else variants["a"][0].variant
    prepared = await prepare(first, plan, console, workers, notes, began_s)
    tuning = None
    if not isinstance(variants, tuple):
        tuned = await tune(variants, prepared, folder.path / TUNING, console, is_alone=is_alone, began_s=began_s)
        variants, prepared, tuning = tuned.variants, tuned.prepared, tuned.summary
    folder.start(prepared.settled(plan, folder.setup, tuning))
    runner = new_runner(
        variants, prepared, folder.path / RECORDS, console, is_alone=is_alone, began_s=began_s, folder=folder
    )
    return await _to_the_end(prepared, runner, folder, (), tuning)


async def resume(
    variants: tuple[Variant, Variant],
    past: Past,
    console: Console,
    *,
    is_alone: bool = True,
    began_s: float | None = None,
) -> Comparison:
    """Continue an interrupted comparison after its valid rounds, with its settled plan; otherwise as `compare`.

    The budget counts the time that it ran, and not the interruption.
    """
    runner, folder, interruption = taken_up(variants, past, console, is_alone=is_alone, began_s=began_s)
    interruptions = (*past.interruptions, interruption)
    return await _to_the_end(prepared_before(past), runner, folder, interruptions, past.settled.tuning)


async def _to_the_end(
    prepared: Prepared,
    runner: RoundRunner,
    folder: RunFolder,
    interruptions: tuple[Interruption, ...],
    tuning: dict[str, Any] | None,
) -> Comparison:
    with saying_how_to_go_on(folder.path, runner.console):
        judged = await _judge_pairs(prepared, runner)
    return _finish(judged, prepared, runner, folder, interruptions, tuning)


@dataclass
class _Judged:
    """The pairs so far, and the result of the last look at them."""

    differences: list[PairDifference] = field(default_factory=list)
    looks: tuple[int, ...] = ()
    conclusion: Conclusion | None = None
    notes: Sequence[str] = ()

    def look(self, plan: ComparePlan, console: Console) -> None:
        """Judge the pairs that have been run."""
        done = len(self.differences)
        self.looks = (*self.looks, done)
        self.conclusion = conclude(self.differences, self.looks, plan.pairs, plan.margin)
        console.print(f"after {counted(done, 'pair')}: {self.conclusion.outcome}", highlight=False)


async def _judge_pairs(prepared: Prepared, runner: RoundRunner) -> _Judged:
    """Run pairs until a look settles the outcome, the plan's pairs are done, or the time is up."""
    judged, plan = _Judged(), prepared.plan
    looks = looks_until(plan.pairs)
    for pair in range(plan.pairs):
        found = await runner.pair(pair, prepared.traces.of_pair(pair), f"pair {pair + 1} of at most {plan.pairs}")
        judged.differences.append(pair_difference(found["a"].records, found["b"].records, plan.slos))
        done = pair + 1
        if done in looks:
            judged.look(plan, runner.console)
        if done == plan.pairs or (judged.conclusion is not None and judged.conclusion.is_settled):
            break
        if runner.has_begun(done):
            continue  # before an interruption: its time is spent
        if plan.budget_s is not None and time.monotonic() - runner.began_s + 2 * runner.longest_s > plan.budget_s:
            judged.notes = (f"ended after {counted(done, 'pair')}, since another would not fit into the time",)
            if done not in looks:
                judged.look(plan, runner.console)
            break
    return judged


def _finish(
    judged: _Judged,
    prepared: Prepared,
    runner: RoundRunner,
    folder: RunFolder,
    interruptions: tuple[Interruption, ...],
    tuning: dict[str, Any] | None,
) -> Comparison:
    """Write and print the result."""
    if judged.conclusion is None:
        raise ServerError("no pair of rounds was finished, so there is nothing to compare")
    devices = {side: variant.devices for side, variant in runner.variants.items()}
    summary, records = summarise_comparison(
        judged.conclusion, judged.differences, runner.rounds, runner.labels, prepared.plan, prepared.load, devices
    )
    for told in ("notes", "sentences"):
        summary["load"][told] = [*summary["load"][told], *judged.notes]
    summary |= {"setup": folder.setup, "interruptions": interruptions_summary(interruptions)}
    if tuning is not None:
        summary["tuning"] = tuning
    out = folder.path
    report = write_report(out / REPORT, summary, records)
    write_record_table(out / RECORD_TABLE, folder.record_lines(), runner.rounds, prepared.plan.slos)
    folder.finish(summary)
    print_comparison(summary, runner.console)
    return Comparison(summary, judged.conclusion, report)
