"""`ridgeline trace inspect`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.report.tables import print_table
from ridgeline.loadtest.trace.inspection import TraceFigures, inspect_trace
from ridgeline.loadtest.trace.inspection_text import LENGTH_HEADER, facts, length_rows, title

MOST_NOTES = 10


def inspect_file(name: str, tokenizer: str | None, limit: int | None, out: Path | None, console: Console) -> None:
    """Print what a trace is, in at most 25 lines; with `out`, write it as a page too. Raises LoadTestError."""
    figures = inspect_trace(name, tokenizer, limit)
    _print(figures, console)
    if out is None:
        return
    from ridgeline.loadtest.report.trace_page import write_trace_page  # to import what draws takes half a second

    try:
        console.print(f"wrote {write_trace_page(out, figures)}", highlight=False, markup=False)
    except OSError as error:
        raise LoadTestError(f"--out {out} cannot be written: {error.strerror}: give another file") from error


def _print(figures: TraceFigures, console: Console) -> None:
    console.print(title(figures), style="bold", highlight=False, markup=False)
    print_table("", LENGTH_HEADER, length_rows(figures), console)
    for what, text in facts(figures):
        console.print(f"{what}: {text}", highlight=False, markup=False)
    for note in figures.notes[:MOST_NOTES]:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
