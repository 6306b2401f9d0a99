"""Write docs/measurements.md from the figures in docs/results/: `make measurements`.

Each file is a section of the page and each record in it a figure; `Record` is the schema. `machines.json` describes the
machines. A test holds that the committed page is the one that this writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill, shorten
from typing import Annotated, Any

import msgspec

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "docs" / "results"
PAGE = REPOSITORY / "docs" / "measurements.md"
SECTIONS = (
    "modes.json",
    "regret-engines.json",
    "regret.json",
    "h200-2026-11-27.json",
    "h100-2026-11-27.json",
    "features.json",
    "transfer.json",
    "router.json",
    "faults.json",
    "comparisons.json",
)
"""Files of figures, in the order of the page."""

LINE = 120
COMMAND_CHARS = 60
"""The page shows a command as far as this; the files have it whole."""

HEAD = """\
<!-- Written by `make measurements` from docs/results/*.json. -->
# Measurements

Current figures with machine, date, commit (where kept) and command. To rerun a figure, check out its commit,
or `617c68f` where none was kept. Values side by side are runs, or what the row names; brackets hold 95 % intervals.
[`docs/results/`](results/) has more figures, and long commands whole.
"""
MACHINES = """\
## Machines

All but the GPUs' are two cores of a virtual machine, whose full processor name was not kept. Beside a GPU are 16 cores.

"""
FOOT = """\
## Add a figure

Add a record to a file in [`docs/results/`](results/) (`Record` in `tools/docs/measurements.py` is the schema), then run
`make measurements`. If commit or command were not kept, they are null, and `method` says how it was measured.
"""

Text = Annotated[str, msgspec.Meta(min_length=1)]


Interval = tuple[int | float | None, int | float | None]
Run = tuple[str | None, ...]
"""Machine, date, commit, command and method of one or more figures."""


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of one thing, in one run or several."""

    of: Text
    values: Annotated[tuple[int | float, ...], msgspec.Meta(min_length=1)]
    interval: Interval | None = None


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure, what it is compared with, and how to get it again."""

    what: Text
    shape: Text
    unit: Text
    figure: Value
    beside: tuple[Value, ...]
    machine: Text
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d\d(-\d\d)?$")]
    commit: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{7,40}$")] | None
    command: Text | None
    method: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse a figure of which nothing says how it was measured."""
        if bool(self.command) == bool(self.method):
            raise ValueError("a record has a command, or null and a method")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of one file: those on the page, `more` that are not, and what a run wrote, `raw`."""

    title: Text
    intro: Text
    figures: tuple[Record, ...]
    more: tuple[Record, ...] = ()
    raw: dict[str, Any] = {}


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine, and what the page says of it."""

    name: Text
    description: Text


def load(results: Path = RESULTS) -> tuple[list[Section], dict[str, Machine]]:
    """Read all sections and machines; an unknown field or machine is an error."""
    machines = msgspec.json.decode((results / "machines.json").read_bytes(), type=dict[str, Machine])
    sections = [msgspec.json.decode((results / name).read_bytes(), type=Section) for name in SECTIONS]
    used = {record.machine for section in sections for record in (*section.figures, *section.more)}
    if used != set(machines):
        raise ValueError(f"machines.json and the figures differ in {sorted(used ^ set(machines))}")
    return sections, machines


def page(sections: Iterable[Section], machines: dict[str, Machine]) -> str:
    """Return the page: a table for each section, its runs below it, then the machines."""
    runs: dict[Run, int] = {}
    parts = [HEAD, *(_section(section, machines, runs) for section in sections)]
    parts.append(MACHINES + "".join(f"- {one.name}: {one.description}.\n" for one in machines.values()))
    return "\n".join([*parts, FOOT])


def _section(section: Section, machines: dict[str, Machine], runs: dict[Run, int]) -> str:
    rows, previous, new = [], "", []
    for record in section.figures:
        run = record.machine, record.date, record.commit, record.command, record.method
        if run not in runs:
            runs[run] = len(runs) + 1
            new.append(f"- [{runs[run]}] {_how(record, machines)}")
        what = "… " if record.what == previous else f"{record.what}: "
        previous = record.what
        rows.append(_row(record, what, runs[run]))
    table = ["| what | figure | run |", "|---|---|---|", *rows]
    intro = fill(section.intro, LINE, break_on_hyphens=False)
    return "\n".join([f"## {section.title}\n", intro, "", *table, "", *new, ""])


def _row(record: Record, what: str, run: int) -> str:
    beside = "".join(f"; {_value(one)}" for one in record.beside)
    note = f". {record.note[0].upper()}{record.note[1:]}." if record.note else ""
    return f"| {what}{record.shape} | {_value(record.figure, f' {record.unit}', '**')}{beside}{note} | {run} |"


def _value(value: Value, unit: str = "", mark: str = "") -> str:
    numbers = ", ".join(f"{one:,}" for one in value.values)
    return f"{value.of} {mark}{numbers}{unit}{mark}{_interval(value.interval)}"


def _interval(interval: Interval | None) -> str:
    match interval:
        case None | (None, None):
            return ""
        case (None, high):
            return f" (below {high:,})"
        case (low, None):
            return f" (above {low:,})"
        case (low, high):
            return f" ({low:,} to {high:,})"


def _how(record: Record, machines: dict[str, Machine]) -> str:
    commit = f", `{record.commit}`" if record.commit else ""
    how = _shortened(record.command) if record.command else record.method
    return f"{machines[record.machine].name}, {record.date}{commit}: {how}"


def _shortened(command: str) -> str:
    shown = shorten(command, COMMAND_CHARS, placeholder="", break_on_hyphens=False)
    if shown == command:
        return f"`{command}`"
    closing = '"' if shown.count('"') % 2 else ""
    return f"`{shown}{closing}` …"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(*load()))


if __name__ == "__main__":
    main()
