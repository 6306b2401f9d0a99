"""`ridgeline replay`.

Apart from `ridgeline.cluster.commands.loadtest`, which imports the page of a comparison and all that draws it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.report.replay_output import report_replay
from ridgeline.loadtest.run.calibration import given_load, settle, workers_of
from ridgeline.loadtest.run.records import RecordFile
from ridgeline.loadtest.run.replay import check_client, run_replay
from ridgeline.loadtest.run.server import with_slo_headers
from ridgeline.loadtest.run.unloaded import measure_unloaded, sizes_of
from ridgeline.loadtest.run_folder import RunFolder, make_folder, new_folder


async def replay_command(url: str, plan: ReplayPlan, out: Path | None, console: Console) -> None:
    """Replay a trace against a running server and print the figures. Raises LoadTestError."""
    await asyncio.to_thread(check_client, plan)
    if out is not None:
        make_folder(out)
    trace = sizes_of(plan)
    load = given_load(plan, trace)
    if plan.measures_first:
        unloaded = await measure_unloaded(url, plan, console, round_index=1)
        plan, load = settle(plan, trace, unloaded, workers_of(unloaded.workers))
    for sentence in load.sentences(plan.slos):
        console.print(sentence, highlight=False, markup=False)
    out = new_folder(RunFolder(out), console).path if out else None
    record_file = RecordFile(out / "records.jsonl") if out else None
    told = with_slo_headers(url, plan.slo_ttft_ms, plan.slo_tpot_ms) if plan.named_slos else url
    result = await run_replay(told, plan, console, record_file=record_file)
    report_replay(result, plan, load, out, console)
