"""Tables for the terminal, with the formula beside each figure. Called at the end of `replay` and `compare`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.plan import COLOCATED, DISAGGREGATED

Summary = Mapping[str, Any]
MODES = (COLOCATED, DISAGGREGATED)
POOL_ORDER = ("colocated", "prefill", "decode")
WIDE_COLUMNS = 120
# label, key, format
ROWS = (
    ("completed / failed", "completed", "d"),
    ("goodput, requests/s", "request_goodput", ".2f"),
    ("met the SLO", "goodput_ratio", ".0%"),
    ("output tokens/s", "output_throughput", ".1f"),
    ("TTFT p50, ms", "p50_ttft_ms", ".0f"),
    ("TTFT p90, ms", "p90_ttft_ms", ".0f"),
    ("TTFT p99, ms", "p99_ttft_ms", ".0f"),
    ("first to second token p50, ms", "p50_ttst_ms", ".0f"),
    ("TPOT p50, ms", "p50_tpot_ms", ".0f"),
    ("TPOT p90, ms", "p90_tpot_ms", ".0f"),
    ("TPOT p99, ms", "p99_tpot_ms", ".0f"),
    ("gap between tokens p50, ms", "p50_itl_ms", ".0f"),
    ("gap between tokens p99, ms", "p99_itl_ms", ".0f"),
    ("gap between tokens, largest, ms", "max_itl_ms", ".0f"),
    ("latency p50, ms", "p50_e2el_ms", ".0f"),
)
POOL_ROWS = (
    ("arithmetic intensity, FLOP/byte", "arithmetic_intensity", ".1f"),
    ("ridge, FLOP/byte", "ridge", ".1f"),
    ("MFU while busy", "mfu", ".1%"),
    ("MBU while busy", "mbu", ".1%"),
    ("busy", "busy_fraction", ".0%"),
)


def format_figure(value: float | None, form: str) -> str:
    """Format a figure for people; a dash if there is none."""
    return "-" if value is None else format(value, form)


def figure_text(summary: Summary, key: str, form: str) -> str:
    """Format one cell: the figure, with its interval or its failures if it has them."""
    if key == "completed":
        return f"{summary['completed']} / {summary['failed']}"
    text = format_figure(summary[key], form)
    ends = summary["ci95"].get(key.replace("p50_", "median_"))
    return f"{text} ({format(ends[0], form)} to {format(ends[1], form)})" if ends else text


def formula_of(key: str, formulas: Mapping[str, str]) -> str:
    """Return the formula of a key such as `p90_tpot_ms` or `request_goodput`."""
    return formulas.get(key) or next((formulas[part] for part in key.split("_") if part in formulas), "")


def print_comparison(summary: Summary, console: Console) -> None:
    """Print both modes side by side, the pools, and the verdict."""
    modes, formulas = summary["modes"], summary["formulas"]
    cells = {label: [figure_text(modes[mode], key, form) for mode in MODES] for label, key, form in ROWS}
    _print_table("Colocated against disaggregated", MODES, cells, row_formulas(ROWS, formulas), console)
    pools = pools_of(summary)
    if pools:
        cells = {label: [format_figure(pool[key], form) for pool in pools.values()] for label, key, form in POOL_ROWS}
        _print_table("Pools", list(pools), cells, row_formulas(POOL_ROWS, formulas), console)
    fraction = format_figure(modes[DISAGGREGATED]["disaggregated_fraction"], ".1%")
    console.print(f"Intervals in parentheses: {formulas['ci']}.", style="dim", highlight=False)
    console.print(f"{fraction} of the disaggregated mode's requests went through both pools.", highlight=False)
    for sentence in summary["load"]["sentences"]:
        console.print(sentence, highlight=False, markup=False)
    console.print(summary["verdict"]["sentence"], style="bold", highlight=False)


def print_replay(figures: Summary, formulas: Mapping[str, str], console: Console) -> None:
    """Print one replay's figures."""
    cells = {label: [figure_text(figures, key, form)] for label, key, form in ROWS}
    _print_table("Replay", ["value"], cells, row_formulas(ROWS, formulas), console)


def pools_of(summary: Summary) -> dict[str, Summary]:
    """Return the figures of all pools of both modes, in a fixed order."""
    found = {pool: figures for mode in summary["modes"].values() for pool, figures in mode["pools"].items()}
    known = [pool for pool in POOL_ORDER if pool in found]
    return {pool: found[pool] for pool in [*known, *sorted(found.keys() - set(known))]}


def row_formulas(rows: Sequence[tuple[str, str, str]], formulas: Mapping[str, str]) -> dict[str, str]:
    """Return the formula of each label; empty if a label above has the same one."""
    said: set[str] = set()
    texts = {}
    for label, key, _ in rows:
        text = formula_of(key, formulas)
        texts[label] = "" if text in said else text
        said.add(text)
    return texts


def _print_table(
    title: str, columns: Sequence[str], cells: Mapping[str, list[str]], formulas: Mapping[str, str], console: Console
) -> None:
    """Print a table. Formulas are a column if the terminal is wide enough, else a list below."""
    wide = console.width >= WIDE_COLUMNS
    table = Table("", *columns, *(["formula"] if wide else []), title=title, title_justify="left")
    for label, row in cells.items():
        table.add_row(label, *row, *([f"[dim]{formulas[label]}[/dim]"] if wide else []))
    console.print(table)
    for label, formula in {} if wide else formulas.items():
        if formula:
            console.print(f"  {label} = {formula}", style="dim", highlight=False, markup=False)
