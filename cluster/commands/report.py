"""`ridgeline report`: shows one finished comparison again, or two side by side, or exports its rounds."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.export.saved_export import ExportFormat, export_rounds
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.saved import print_side_by_side, report_again


def report(folders: list[Path], console: Console, export: ExportFormat | None = None) -> None:
    """Write report.html of one run again or its rounds for export, or print two side by side. Raises LoadTestError."""
    first, *others = folders
    if export is not None:
        if others:
            raise LoadTestError(f"--export writes the rounds of one run: give one folder, not {len(folders)}")
        paths = export_rounds(first, export)
        console.print(
            f"wrote the valid rounds to {counted(len(paths), 'file')} in {first / export}",
            highlight=False,
            markup=False,
        )
        return
    if not others:
        console.print(f"wrote {report_again(first, console)}", highlight=False, markup=False)
    elif len(others) == 1:
        print_side_by_side(first, others[0], console)
    else:
        raise LoadTestError(f"give one folder, or two to see them side by side, not {len(folders)}")
