"""`ridgeline report`: shows one finished comparison again, or two side by side."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.report.saved import print_side_by_side, report_again


def report(folders: list[Path], console: Console) -> None:
    """Write report.html of one run again, or print two runs side by side. Raises LoadTestError."""
    first, *others = folders
    if not others:
        console.print(f"wrote {report_again(first, console)}", highlight=False, markup=False)
    elif len(others) == 1:
        print_side_by_side(first, others[0], console)
    else:
        raise LoadTestError(f"give one folder, or two to see them side by side, not {len(folders)}")
