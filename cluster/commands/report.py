"""`ridgeline report`: shows one finished comparison again, or exports its rounds."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.export.saved_export import ExportFormat, export_rounds
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.saved import report_again


def report(folder: Path, console: Console, export: ExportFormat | None = None) -> None:
    """Write report.html of a run again, or its rounds for export. Raises LoadTestError."""
    if export is None:
        console.print(f"wrote {report_again(folder, console)}", highlight=False, markup=False)
        return
    paths = export_rounds(folder, export)
    console.print(
        f"wrote the valid rounds to {counted(len(paths), 'file')} in {folder / export}", highlight=False, markup=False
    )
