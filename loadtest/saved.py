"""Shows a finished comparison again from its folder."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import MALFORMED, LoadTestError
from ridgeline.loadtest.report.page import print_comparison, write_report
from ridgeline.loadtest.report.summary import SCHEMA
from ridgeline.loadtest.run_folder import REPORT, RUN, SUMMARY

Summary = dict[str, Any]


def report_again(folder: Path, console: Console) -> Path:
    """Write report.html of a finished comparison again and print its tables. Raises LoadTestError."""
    summary = saved_summary(folder)
    print_comparison(summary, console)
    return write_report(folder / REPORT, summary)


def saved_summary(folder: Path) -> Summary:
    """Read summary.json of a finished comparison. Raises LoadTestError."""
    try:
        summary: Summary = msgspec.json.decode((folder / SUMMARY).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        if (folder / RUN).exists():
            raise LoadTestError(
                f"the comparison in {folder} was interrupted: ridgeline compare --resume {folder} goes on with it"
            ) from None
        raise LoadTestError(f"{folder} holds no run: give a folder that compare has written") from None
    except (OSError, *MALFORMED) as error:
        raise LoadTestError(f"{folder / SUMMARY} cannot be read: {error}") from error
    if "variants" not in summary:
        raise LoadTestError(f"{folder} holds a replay and not a comparison, of which a page is made")
    if summary.get("schema") != SCHEMA:
        raise LoadTestError(
            f"{folder} was written by another version, which this one does not show: its {REPORT} is as it was written"
        )
    return summary
