"""Runs both modes on the same requests, in counterbalanced rounds, and writes the result.

Called by `cluster.commands.loadtest`.

The order A B B A makes a drift of the machine affect both modes alike. Round r sends the same prompts in both modes,
and no two rounds share a prompt's beginning, so a server that stays up for two rounds has a cold prefix cache in both.

What the plan leaves to be measured is measured once, at the first server, and holds for both modes and all rounds.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadtest.errors import NotDisaggregatedError
from loadtest.plan import COLOCATED, DISAGGREGATED, ComparePlan, Mode
from loadtest.report.page import write_report
from loadtest.report.pools import POOL_FORMULAS, describe_pools, disaggregated_fraction, recomputes, stage_seconds
from loadtest.report.summary import FORMULAS, summarise
from loadtest.report.tables import print_comparison
from loadtest.report.verdict import Verdict, judge
from loadtest.run.calibration import (
    Course,
    Load,
    Workers,
    beside_arrivals_s,
    fit_budget,
    given_load,
    minutes_text,
    settle,
)
from loadtest.run.machine import describe_machine
from loadtest.run.records import RequestRecord
from loadtest.run.replay import ReplayResult, run_replay
from loadtest.run.server_metrics import add_up
from loadtest.run.unloaded import measure_unloaded, sizes_of

MIN_DISAGGREGATED_FRACTION = 0.99
ONE_OF_EACH = Workers(prefill=1, decode=1)
Serve = Callable[[Mode], AbstractAsyncContextManager[str]]


@dataclass(frozen=True, slots=True)
class Round:
    """One replay in one mode; rounds of the two modes with equal `index` send the same requests."""

    mode: Mode
    index: int
    result: ReplayResult


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison; `summary` is the content of summary.json."""

    summary: dict[str, Any]
    records: dict[Mode, tuple[RequestRecord, ...]]
    verdict: Verdict
    report: Path


async def compare(
    serve: Serve,
    plan: ComparePlan,
    out: Path,
    console: Console,
    workers: Workers = ONE_OF_EACH,
    notes: tuple[str, ...] = (),
) -> Comparison:
    """Run all rounds, write summary.json, records.jsonl and report.html into `out`, print the table and the verdict.

    `serve(mode)` is entered once for each sequence of rounds in one mode and yields the server's base URL. `workers`
    are those of the disaggregated mode, in units of a colocated replica; `notes` are said with the load. Raises
    LoadTestError, and NotDisaggregatedError after the first disaggregated round that did not use both pools.
    """
    records_file = _fresh_records_file(out)
    rounds: list[Round] = []
    load: Load | None = None
    schedule = round_schedule(plan.rounds)
    stretches = [
        (mode, [index for _, index in steps]) for mode, steps in itertools.groupby(schedule, lambda step: step[0])
    ]
    began_s = time.monotonic()
    if plan.budget_s is not None:
        console.print(f"comparing both modes takes about {minutes_text(plan.budget_s)}", highlight=False)
    for mode, indices in stretches:
        entered_s = time.monotonic()
        async with serve(mode) as base_url:
            if load is None:
                start_s = time.monotonic() - entered_s
                plan, load = await _settled(base_url, plan, workers, len(stretches) - 1, start_s, began_s, console)
                load = msgspec.structs.replace(load, notes=(*notes, *load.notes))
            for index in indices:
                label = f"round {len(rounds) + 1} of {len(schedule)}, {mode}"
                result = await run_replay(base_url, plan, console, label=label, round_index=index)
                rounds.append(Round(mode, index, result))
                _append_records(records_file, rounds[-1])
                if mode == DISAGGREGATED:
                    require_disaggregated(result)
    comparison = _conclude(rounds, plan, load or given_load(plan, sizes_of(plan)), out)
    print_comparison(comparison.summary, console)
    return comparison


async def _settled(
    base_url: str,
    plan: ComparePlan,
    workers: Workers,
    starts_left: int,
    start_s: float,
    began_s: float,
    console: Console,
) -> tuple[ComparePlan, Load]:
    """Measure the first server if the plan asks for it; print rate, limits and how long the rest will take."""
    trace = sizes_of(plan)
    if not plan.measures_first:
        load = given_load(plan, trace)
        if load.rate is not None:
            seconds = min((len(trace.rows) - 1) / load.rate, plan.duration_s or float("inf"))
            console.print(f"{2 * plan.rounds} rounds of about {minutes_text(seconds)} each", highlight=False)
        return plan, load
    unloaded = await measure_unloaded(base_url, plan, console, round_index=plan.rounds)
    settled, load = settle(plan, trace, unloaded, workers)
    course = Course(2 * plan.rounds, starts_left, start_s, beside_arrivals_s(plan, trace, unloaded))
    settled, load = fit_budget(settled, load, trace, course, time.monotonic() - began_s)
    for sentence in load.sentences(settled.limits):
        console.print(sentence, highlight=False, markup=False)
    return settled, load


def _fresh_records_file(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    path.unlink(missing_ok=True)
    return path


def round_schedule(rounds: int) -> list[tuple[Mode, int]]:
    """Return the counterbalanced order A B, B A, A B, ... with the pair's number as round index."""
    pairs = [(COLOCATED, DISAGGREGATED) if index % 2 == 0 else (DISAGGREGATED, COLOCATED) for index in range(rounds)]
    return [(mode, index) for index, pair in enumerate(pairs) for mode in pair]


def require_disaggregated(result: ReplayResult) -> None:
    """Raise NotDisaggregatedError if too few requests went through both pools."""
    if result.metrics is None:
        raise NotDisaggregatedError(
            "the server publishes no ridgeline_ metrics on /metrics, so nothing shows that this run was disaggregated"
        )
    fraction = disaggregated_fraction(result.metrics)
    if fraction is None:
        raise NotDisaggregatedError("no request finished in a disaggregated run, so there is nothing to report")
    if fraction < MIN_DISAGGREGATED_FRACTION:
        raise NotDisaggregatedError(
            f"only {fraction:.1%} of the eligible requests went through both pools and "
            f"{MIN_DISAGGREGATED_FRACTION:.0%} must: this run was not disaggregated and is not reported as such "
            f"(recomputed, by reason: {recomputes(result.metrics) or 'none'})"
        )


def _conclude(rounds: Sequence[Round], plan: ComparePlan, load: Load, out: Path) -> Comparison:
    records: dict[Mode, tuple[RequestRecord, ...]] = {
        mode: _records_of(rounds, mode) for mode in (COLOCATED, DISAGGREGATED)
    }
    verdict = judge(records[COLOCATED], records[DISAGGREGATED], plan.limits, plan.seed)
    trace = rounds[0].result.trace
    summary = {
        "verdict": msgspec.to_builtins(verdict),
        "slo": plan.limits.model_dump(),
        "load": load.as_summary(plan.limits),
        "modes": {mode: _mode_summary(rounds, mode, plan) for mode in records},
        "rounds": [_round_summary(each, plan) for each in rounds],
        "trace": {
            "name": trace.name,
            "requests": len(trace.rows),
            "span_s": trace.span_s,
            "mean_rate": trace.mean_rate,
            "changes": trace.notes,
        },
        "plan": plan.model_dump(),
        "machine": describe_machine(),
        "formulas": FORMULAS | POOL_FORMULAS,
    }
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    report = write_report(out / "report.html", summary, records)
    return Comparison(summary, records, verdict, report)


def _records_of(rounds: Sequence[Round], mode: Mode) -> tuple[RequestRecord, ...]:
    """Return one mode's records in the order of rounds, so that position i is the same request in both modes."""
    chosen = sorted((each for each in rounds if each.mode == mode), key=lambda each: each.index)
    return tuple(record for each in chosen for record in each.result.records)


def _mode_summary(rounds: Sequence[Round], mode: Mode, plan: ComparePlan) -> dict[str, Any]:
    chosen = [each.result for each in rounds if each.mode == mode]
    duration_s = sum(result.duration_s for result in chosen)
    summary = summarise(_records_of(rounds, mode), duration_s, plan.limits, plan.seed)
    deltas = [result.metrics for result in chosen if result.metrics is not None]
    delta = add_up(deltas)
    summary |= {
        "pools": describe_pools(delta),
        "stage_seconds": stage_seconds(delta),
        "recomputes": recomputes(delta),
        "warnings": [warning for result in chosen for warning in result.warnings],
    }
    if mode == DISAGGREGATED:
        summary["disaggregated_fraction"] = disaggregated_fraction(delta)
    return summary


def _round_summary(each: Round, plan: ComparePlan) -> dict[str, Any]:
    figures = summarise(each.result.records, each.result.duration_s, plan.limits, plan.seed)
    return {"mode": each.mode, "round": each.index, **figures, "warnings": each.result.warnings}


def _append_records(path: Path, each: Round) -> None:
    with path.open("ab") as lines:
        lines.writelines(record.as_line(mode=each.mode, round=each.index) for record in each.result.records)
