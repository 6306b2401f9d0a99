"""`ridgeline bench transfer`: measures hand-offs between two processes of this host."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cluster.doctor.facts import memory_available_bytes
from ridgeline.kv_transfer.measure import MeasureError, MeasureReport, MeasureSettings, measure

__all__ = ["MeasureError", "MeasureSettings", "bench_transfer", "problems_of", "render"]


def problems_of(settings: MeasureSettings, file: Path | None) -> list[str]:
    """Return why the measurement is not possible here, a sentence with its fix each."""
    problems = settings.problems(memory_available_bytes())
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a", encoding="utf-8").close()  # before a measurement of minutes, not after it
        except OSError as error:
            problems.append(f"json: {file} cannot be written ({error.strerror}): name a file in a folder of your own")
    return problems


def bench_transfer(settings: MeasureSettings, file: Path | None, console: Console) -> None:
    """Measure, print the table, write JSON to `file`. Raises MeasureError."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or gRPC tells of every connection that ends, in both processes
    report = measure(settings, lambda sentence: console.print(sentence, highlight=False, markup=False))
    console.print(render(report))
    for transport, why in report.refused.items():
        console.print(f"[yellow]not measured:[/] {transport}: {escape(why)}", highlight=False)
    if file is not None:
        file.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {escape(str(file))}", highlight=False)


def render(report: MeasureReport) -> Table:
    """Build the table: one row for each transport, and memcpy last."""
    settings, memcpy = report.settings, report.figures[-1]
    pinned = f"cores {report.cores[0]} and {report.cores[1]}" if report.cores else "not pinned"
    table = Table(
        title=f"{settings.num_bytes / 1e6:.1f} MB per hand-off: {settings.num_blocks} scattered blocks of 32 tokens, "
        f"{settings.layers} layers of {settings.block_bytes} bytes\n{settings.rounds} rounds, {pinned}",
        title_justify="left",
    )
    table.add_column("transport")
    for name in ("GB/s", "of memcpy", "median ms", "p90 ms", "CPU s/GB"):
        table.add_column(name, justify="right")
    for row in report.figures:
        table.add_row(
            row.transport,
            f"{row.gb_s:.2f}",
            f"{row.gb_s / memcpy.gb_s:.0%}",
            f"{row.median_ms:.1f}",
            f"{row.p90_ms:.1f}",
            f"{row.cpu_s_per_gb:.2f}",
            end_section=row is report.figures[-2],
        )
    return table
