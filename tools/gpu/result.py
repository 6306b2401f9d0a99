"""Rows of the table that `tools.gpu.check` prints: a measurement, or a check that holds or does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line. `ok` is None for a measurement, which nothing is demanded of."""

    section: str
    what: str
    value: float | None = None
    unit: str = ""
    note: str = ""
    ok: bool | None = None


def table(rows: Iterable[Row]) -> str:
    """Return the rows as text, one a line, with a heading for each section."""
    lines: list[str] = []
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", section]
        mark = {None: " ", True: "✓", False: "✗"}[row.ok]
        value = "" if row.value is None else f"{row.value:,.4g} {row.unit}"
        lines.append(f"  {mark} {row.what:<58} {value:>18}  {row.note}".rstrip())
    return "\n".join(lines)
