"""Writes and prints the result of one replay."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.report.pools import (
    POOL_FORMULAS,
    describe_pools,
    disaggregated_fraction,
    recomputes,
    stage_seconds,
)
from ridgeline.loadtest.report.record_table import write_replay_table
from ridgeline.loadtest.report.summary import FORMULAS, summarise
from ridgeline.loadtest.report.tables import DASH, print_replay
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.machine import describe_machine
from ridgeline.loadtest.run.replay import ReplayResult


def replay_summary(result: ReplayResult, plan: ReplayPlan, load: Load) -> dict[str, Any]:
    """Return the summary: vLLM bench's names at the top; pools and stages only if the server publishes them."""
    summary = summarise(result.counted_records, result.window_s, plan.slos)
    if result.metrics is not None:
        summary |= {
            "disaggregated_fraction": disaggregated_fraction(result.metrics),
            "pools": describe_pools(result.metrics),
            "stage_seconds": stage_seconds(result.metrics),
            "recomputes": recomputes(result.metrics),
        }
    return summary | {
        "offered_rate": len(result.counted_records) / result.window_s if result.trace.mean_rate else None,
        "client": msgspec.to_builtins(result.client),
        "warnings": result.warnings,
        "trace": {"name": result.trace.name, "requests": len(result.trace.rows), "changes": result.trace.notes},
        "slo": plan.slos.model_dump(),
        "load": load.as_summary(plan.slos),
        "plan": plan.model_dump(),
        "machine": describe_machine(),
        "formulas": FORMULAS | POOL_FORMULAS,
    }


def report_replay(
    result: ReplayResult, plan: ReplayPlan, load: Load, out: Path | None, console: Console
) -> dict[str, Any]:
    """Print the table; with `out`, write summary.json, records.jsonl and records.parquet there. Return the summary."""
    summary = replay_summary(result, plan, load)
    print_replay(summary, summary["formulas"], console)
    console.print(f"{DASH}.", style="dim", highlight=False)
    for change in result.trace.notes:
        console.print(f"trace: {change}", style="dim", highlight=False, markup=False)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        (out / "records.jsonl").write_bytes(b"".join(record.as_line() for record in result.records))
        write_replay_table(out / "records.parquet", result.records, result.trace.mean_rate, plan.slos)
        files = "summary.json, records.jsonl and records.parquet"
        console.print(f"wrote {files} in {out}", highlight=False, markup=False)
    return summary
