"""Runs both arms on the same requests, in pairs of rounds, until they can be told apart or cannot.

Called by `cluster.commands.loadtest`.

Both rounds of a pair have the same arrivals and lengths, and each pair has another window of the trace or another seed.
No two rounds share a prompt's beginning, so prefix caches are cold.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadtest.arms import Arm
from loadtest.errors import ServerError
from loadtest.plan import ComparePlan
from loadtest.preparation import Prepared, prepare
from loadtest.report.page import write_report
from loadtest.report.rounds import labels_of, summarise_comparison
from loadtest.report.tables import print_comparison
from loadtest.run.calibration import Workers
from loadtest.statistics.looks import looks_until
from loadtest.statistics.outcome import Conclusion, conclude
from loadtest.statistics.pairs import PairDifference, pair_difference
from loadtest.valid_rounds import SIDES, RoundRunner


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison; `summary` is the content of summary.json."""

    summary: dict[str, Any]
    conclusion: Conclusion
    report: Path


async def compare(
    arms: tuple[Arm, Arm],
    plan: ComparePlan,
    out: Path,
    console: Console,
    *,
    workers: Workers | None = None,
    notes: tuple[str, ...] = (),
    is_alone: bool = True,
    began_s: float | None = None,
) -> Comparison:
    """Run pairs of rounds, write summary.json, records.jsonl and report.html into `out`, print tables and outcome.

    `workers` share the load, in units of the worker of arm a that is measured; without them its server says which.
    `notes` are said with the load. With `is_alone` all work of this machine that this process did not start disturbs.
    The plan's budget counts from `began_s`, on time.monotonic's scale; without it from now.
    Raises LoadTestError, and NotDisaggregatedError after the first round in that mode that did not use both pools.
    """
    began_s = time.monotonic() if began_s is None else began_s
    records_file = _fresh_records_file(out)
    prepared = await prepare(arms[0], plan, console, workers, notes, began_s)
    runner = RoundRunner(
        arms=dict(zip(SIDES, arms, strict=True)),
        labels=labels_of(*(arm.mode for arm in arms)),
        plan=prepared.plan,
        ordinals_per_round=prepared.ordinals_per_round,
        next_round_index=prepared.first_round_index,
        cold={"a"} if prepared.is_a_cold else set(),
        is_alone=is_alone,
        records_file=records_file,
        console=console,
    )
    judged = await _judge_pairs(prepared, runner, began_s)
    return _finish(judged, prepared, runner, out)


@dataclass
class _Judged:
    """The pairs so far, and what the last look at them said."""

    differences: list[PairDifference] = field(default_factory=list)
    looks: tuple[int, ...] = ()
    conclusion: Conclusion | None = None
    notes: Sequence[str] = ()

    def look(self, plan: ComparePlan, console: Console) -> None:
        """Judge the pairs that there are."""
        done = len(self.differences)
        self.looks = (*self.looks, done)
        self.conclusion = conclude(self.differences, self.looks, plan.pairs, plan.margin)
        console.print(f"after {_pairs(done)}: {self.conclusion.outcome}", highlight=False)


async def _judge_pairs(prepared: Prepared, runner: RoundRunner, began_s: float) -> _Judged:
    """Run pairs until a look settles the outcome, the plan's pairs are done, or the time is up."""
    judged, plan = _Judged(), prepared.plan
    looks = looks_until(plan.pairs)
    for pair in range(plan.pairs):
        found = await runner.pair(pair, prepared.traces.of_pair(pair), f"pair {pair + 1} of at most {plan.pairs}")
        judged.differences.append(pair_difference(found["a"].records, found["b"].records, plan.limits))
        done = pair + 1
        if done in looks:
            judged.look(plan, runner.console)
        if done == plan.pairs or (judged.conclusion is not None and judged.conclusion.is_settled):
            break
        if plan.budget_s is not None and time.monotonic() - began_s + 2 * runner.longest_s > plan.budget_s:
            judged.notes = (f"ended after {_pairs(done)}, since another would not fit into the time",)
            if done not in looks:
                judged.look(plan, runner.console)
            break
    return judged


def _finish(judged: _Judged, prepared: Prepared, runner: RoundRunner, out: Path) -> Comparison:
    """Write and print the result."""
    if judged.conclusion is None:
        raise ServerError("no pair of rounds was finished, so there is nothing to compare")
    devices = {side: arm.devices for side, arm in runner.arms.items()}
    summary, records = summarise_comparison(
        judged.conclusion, judged.differences, runner.rounds, runner.labels, prepared.plan, prepared.load, devices
    )
    for told in ("notes", "sentences"):
        summary["load"][told] = [*summary["load"][told], *judged.notes]
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    report = write_report(out / "report.html", summary, records)
    print_comparison(summary, runner.console)
    return Comparison(summary, judged.conclusion, report)


def _fresh_records_file(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    path.unlink(missing_ok=True)
    return path


def _pairs(count: int) -> str:
    return f"{count} {'pair' if count == 1 else 'pairs'}"
