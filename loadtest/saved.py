"""Shows runs again from their folders: the page of one, or the figures of two side by side."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import MALFORMED, LoadTestError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.report.page import write_report
from ridgeline.loadtest.report.rates_page import print_rates, write_rate_report
from ridgeline.loadtest.report.tables import ROWS, figure_text, print_comparison, print_table
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run_folder import REPORT, RUN, SUMMARY, RunFolder, differences_of

NOT_PAIRED = (
    "Rounds of different runs are not paired: they ran at other times, on a machine in another state, so no verdict is "
    "given. Compare the two in one run to get one."
)
Summary = dict[str, Any]
FORMER_NAMES = {
    "arms": "variants",
    "arm": "variant",
    "knee": "max_goodput_rate",
    "knees": "max_goodput_rates",
    **{former: name for former, name in ComparePlan.renamed.items() if former != "arms"},
}
"""Keys of summary.json before version 0.2, with their names now."""


def report_again(folder: Path, console: Console) -> Path:
    """Write report.html of a finished comparison or search again and print its tables. Raises LoadTestError."""
    summary = saved_summary(folder)
    if "rates" in summary:
        if "verdict" not in summary["rates"]:
            raise LoadTestError(
                f"{folder} holds a search of a version before 0.2, which this one does not show: its {REPORT} is as it "
                "was written"
            )
        print_rates(summary, console)
        return write_rate_report(folder / REPORT, summary)
    _require_comparison(folder, summary)
    run = RunFolder(folder)
    records = run.records_by_round()
    found: dict[str, list[RequestRecord]] = {variant["label"]: [] for variant in summary["variants"].values()}
    for side, number in run.valid_rounds():
        found[summary["variants"][side]["label"]] += records.get(number, [])
    if not any(found.values()):
        raise LoadTestError(f"{folder} has no records of valid rounds, of which a page is made")
    print_comparison(summary, console)
    return write_report(folder / REPORT, summary, found)


def print_side_by_side(one: Path, other: Path, console: Console) -> None:
    """Print the figures of all variants of two runs, and what differs between their set-ups. Raises LoadTestError."""
    summaries = {name: _comparison(folder) for name, folder in _names(one, other)}
    columns = {
        f"{name}: {variant['label']}": variant
        for name, each in summaries.items()
        for variant in each["variants"].values()
    }
    rows = [
        [label, *(figure_text(variant, key, form) if key in variant else "-" for variant in columns.values())]
        for label, key, form in ROWS
    ]
    print_table("Two runs", ["", *columns], rows, console)
    for name, each in summaries.items():
        console.print(f"{name}: {each['outcome']['sentence']}", highlight=False, markup=False)
    first, second = summaries.values()
    differences = list(differences_of(_setting(first), _setting(second)))
    if differences:
        print_table("What differs between the runs", ["setting", *summaries], differences, console)
    else:
        console.print("The runs have the same plan, configuration, versions and machine.", highlight=False)
    console.print(NOT_PAIRED, style="bold", highlight=False)


def _names(one: Path, other: Path) -> list[tuple[str, Path]]:
    if one.resolve() == other.resolve():
        raise LoadTestError(f"{one} was given twice: give the folders of two runs, or one")
    is_clear = one.name != other.name
    return [(folder.name if is_clear else str(folder), folder) for folder in (one, other)]


def _setting(summary: Summary) -> Summary:
    return {"plan": summary["plan"], **summary.get("setup", {}), "machine": summary["machine"]}


def _comparison(folder: Path) -> Summary:
    summary = saved_summary(folder)
    _require_comparison(folder, summary)
    return summary


def _require_comparison(folder: Path, summary: Summary) -> None:
    if "rates" in summary:
        raise LoadTestError(
            f"{folder} holds a search for rates, and two runs are shown side by side only if both are comparisons: "
            f"ridgeline report {folder} shows it alone"
        )
    if "variants" not in summary or "outcome" not in summary:
        raise LoadTestError(f"{folder} holds a replay and not a comparison, of which a page is made")


def _with_current_names(value: Any) -> Any:
    """Rename what a run of an earlier version called otherwise."""
    if isinstance(value, dict):
        return {FORMER_NAMES.get(name, name): _with_current_names(each) for name, each in value.items()}
    return [_with_current_names(each) for each in value] if isinstance(value, list) else value


def saved_summary(folder: Path) -> Summary:
    """Read summary.json of a finished run, with the names that fields have now. Raises LoadTestError."""
    try:
        summary: Summary = _with_current_names(
            msgspec.json.decode((folder / SUMMARY).read_bytes(), type=dict[str, Any])
        )
    except FileNotFoundError:
        if (folder / RUN).exists():
            raise LoadTestError(
                f"the comparison in {folder} was interrupted: ridgeline compare --resume {folder} goes on with it"
            ) from None
        raise LoadTestError(f"{folder} holds no run: give a folder that compare has written") from None
    except (OSError, *MALFORMED) as error:
        raise LoadTestError(f"{folder / SUMMARY} cannot be read: {error}") from error
    return summary
