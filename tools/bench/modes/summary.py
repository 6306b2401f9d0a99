"""Writes summary.json and the pictures of a run, and prints its table; after each workload, so that none waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.maps.grid import UNREACHABLE
from loadtest.rate_search import Ratio
from loadtest.run.machine import describe_machine
from loadtest.run_folder import SUMMARY
from tools.bench.modes.cells import Cell, Goodput, cells_of, limits_of, mean_ratio
from tools.bench.modes.journal import Journal, RoundEnded
from tools.bench.modes.picture import draw
from tools.bench.modes.settings import ADAPTIVE, Settings

FORMULAS = {
    "requests_per_s": "rate x requests that finished within both limits / all requests of the rounds at that rate; "
    "failed, refused and given up ones are in the second number only; the highest over the rates tried",
    "low, high": "95 % score interval of that share, widened by the scatter between rounds, x rate; it says nothing of "
    "the choice of the rate",
    "ratio": "adaptive / the better of the other modes; both intervals joined on a log scale (Zou and Donner, 2008)",
    "winner": "the mode whose ratio to each other one has an interval above 1; cells are not corrected for being many",
    "ttft_ms": "limit: a factor x the unloaded TTFT of the median prompt; TTFT counts from the time of the trace",
    "tpot_ms": "limit: a factor x the unloaded decode step",
}


def workload_cells(journal: Journal, settings: Settings) -> dict[str, list[Cell]]:
    """Return the cells of every workload that was measured so far."""
    measured = {name: found for name in settings.workloads if (found := journal.measured(name)) is not None}
    return {
        name: cells_of(name, journal.rounds(name), settings, limits_of(settings, found.unloaded))
        for name, found in measured.items()
    }


def write_map(folder: Path, journal: Journal, settings: Settings, setup: Mapping[str, Any]) -> dict[str, list[Cell]]:
    """Write summary.json and a picture of each workload with rounds; return the cells."""
    found = workload_cells(journal, settings)
    summary = {
        "cells": [cell.as_row(settings.arms) for cells in found.values() for cell in cells],
        "workloads": {name: _workload(name, journal, cells) for name, cells in found.items()},
        "rounds": [round_row(each) for each in journal.lines if isinstance(each, RoundEnded)],
        **common(journal, settings, setup),
        "formulas": FORMULAS,
    }
    write(folder / SUMMARY, summary)
    for name, cells in found.items():
        if any(cell.arms for cell in cells):
            measured = journal.measured(name)
            note = measured.note if measured else ""
            (folder / f"map-{name}.svg").write_text(draw(name, note, cells, settings.arms), encoding="utf-8")
    return found


def common(journal: Journal, settings: Settings, setup: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the summaries of both parts have: settings, configuration, versions, machine, time."""
    return {
        "settings": msgspec.to_builtins(settings),
        "setup": dict(setup),
        "machine": describe_machine(),
        "spent_s": journal.spent_s,
    }


def write(path: Path, summary: Mapping[str, Any]) -> None:
    """Write a summary as JSON that people can read."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def round_row(ended: RoundEnded) -> dict[str, Any]:
    """Return a round as an entry of `rounds`; records.jsonl has its requests under the same number."""
    row: dict[str, Any] = msgspec.to_builtins(ended)
    del row["type"], row["next_ordinal"], row["spent_s"]
    return row | {"requests": len(row.pop("outcomes"))}


def _workload(name: str, journal: Journal, cells: Sequence[Cell]) -> dict[str, Any]:
    measured, chosen, ended = journal.measured(name), journal.chosen(name), journal.ended(name)
    assert measured is not None, "only workloads that were measured have cells"
    disturbed = [each for each in journal.rounds(name) if each.disturbed]
    return {
        "requests": measured.note,
        "unloaded": msgspec.to_builtins(measured.unloaded),
        "rates": None if chosen is None else {"knee": chosen.source, "tried": chosen.rates},
        "mean_ratio": mean_ratio(cells),
        "blocks": len(journal.blocks(name)),
        "rounds": len(journal.rounds(name)),
        "disturbed_rounds": len(disturbed),
        "note": None if ended is None else ended.note,
    }


def table_of(cells: Sequence[Cell], arms: Sequence[str], title: str) -> Table:
    """Return the table of one workload, a row for each pair of limits."""
    columns = ["TTFT <= s", "TPOT <= ms", *(f"{arm}, requests/s" for arm in arms), "best", "adaptive / better"]
    table = Table(*columns, title=title)
    for cell in cells:
        shown = [_goodput_text(cell.arms.get(arm)) for arm in arms]
        best = "alike" if cell.is_tied else cell.best or "-"
        best += "" if cell.winner in (cell.best, UNREACHABLE) else " (unclear)"
        name = f" {cell.name}" if cell.name else ""
        ratio = ratio_text(cell.ratio)
        table.add_row(f"{cell.limits.ttft_ms / 1e3:.3g}", f"{cell.limits.tpot_ms:g}{name}", *shown, best, ratio)
    return table


def print_map(found: Mapping[str, Sequence[Cell]], journal: Journal, settings: Settings, console: Console) -> None:
    """Print the table of each workload, and the ratio over all of its cells."""
    for name, cells in found.items():
        measured, ended = journal.measured(name), journal.ended(name)
        console.print(table_of(cells, settings.arms, f"{name}: {measured.note if measured else ''}"))
        if (mean := mean_ratio(cells)) is not None and ADAPTIVE in settings.arms:
            console.print(f"{name}: adaptive / better of the others, geometric mean {mean:.3f}", highlight=False)
        if ended is not None and ended.note is not None:
            console.print(f"{name}: {ended.note}", style="yellow", highlight=False, markup=False)


def ratio_text(ratio: Ratio | None) -> str:
    """Return a ratio with its interval; an open end is a question mark."""
    if ratio is None:
        return "-"
    low, high = (f"{end:.2f}" if end is not None else "?" for end in (ratio.low, ratio.high))
    return f"{f'{ratio.ratio:.2f}' if ratio.ratio is not None else '?'} ({low} to {high})"


def _goodput_text(goodput: Goodput | None) -> str:
    if goodput is None:
        return "-"
    return f"{goodput.requests_per_s:.3f} ({goodput.low:.2f} to {goodput.high:.2f}) at {goodput.rate:.3g}"
