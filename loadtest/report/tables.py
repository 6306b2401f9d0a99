"""Tables for the terminal, with the formula beside each figure. Called at the end of `replay` and `compare`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Summary = Mapping[str, Any]
POOL_ORDER = ("colocated", "prefill", "decode")
WIDE_COLUMNS = 120
# label, key, format
ROWS = (
    ("completed / failed", "completed", "d"),
    ("goodput, requests/s", "request_goodput", ".2f"),
    ("attainment: met the SLOs", "attainment", ".0%"),
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
    ("largest gap of a request p50, ms", "p50_gap_ms", ".0f"),
    ("largest gap of a request p90, ms", "p90_gap_ms", ".0f"),
    ("gap between tokens, largest, ms", "max_itl_ms", ".0f"),
    ("latency p50, ms", "p50_e2el_ms", ".0f"),
)
DASH = "A dash: too few values for such a percentile"
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
    ends = summary["ci95"].get(key)
    return f"{text} ({format(ends[0], form)} to {format(ends[1], form)})" if ends else text


def formula_of(key: str, formulas: Mapping[str, str]) -> str:
    """Return the formula of a key such as `p90_tpot_ms` or `request_goodput`."""
    return formulas.get(key) or next((formulas[part] for part in key.split("_") if part in formulas), "")


def figure_rows(
    columns: Sequence[Summary],
    rows: Sequence[tuple[str, str, str]],
    formulas: Mapping[str, str],
    text: Callable[[Summary, str, str], str] = lambda figures, key, form: format_figure(figures[key], form),
) -> list[list[str]]:
    """Return a row for each label, key and format: the figures of all columns, and the formula unless it is above."""
    found: list[list[str]] = []
    for label, key, form in rows:
        formula = formula_of(key, formulas)
        is_above = any(formula == row[-1] for row in found)
        found.append([label, *(text(each, key, form) for each in columns), "" if is_above else formula])
    return found


def print_replay(figures: Summary, formulas: Mapping[str, str], console: Console) -> None:
    """Print one replay's figures. Formulas are a column if the terminal is wide enough, else a list below."""
    rows, wide = figure_rows([figures], ROWS, formulas, figure_text), console.width >= WIDE_COLUMNS
    table = Table("", "value", title="Replay", title_justify="left")
    if wide:
        table.add_column("formula", style="dim")
    for row in rows:
        table.add_row(*map(escape, row if wide else row[:-1]))
    console.print(table)
    for label, _, formula in () if wide else rows:
        if formula:
            console.print(f"  {label} = {formula}", style="dim", highlight=False, markup=False)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table of text."""
    table = Table(*map(escape, header), title=escape(title) or None, title_justify="left")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)


def served_model(summary: Summary) -> str | None:
    """Return the name of the model that answered, or None if it was neither asked for nor configured here."""
    configured = (summary.get("setup", {}).get("configuration") or {}).get("model", {})
    asked, served, path = (
        summary["plan"].get("served_model_name"),
        configured.get("served_model_name"),
        configured.get("path"),
    )
    name: str | None = asked or (served[0] if isinstance(served, list) and served else served) or path
    return name


def pools_of(summary: Summary) -> dict[str, Summary]:
    """Return the figures of all pools in a fixed order; of a pool that several variants have, each with its variant."""
    variants = list(summary["variants"].values())
    order = {pool: place for place, pool in enumerate(POOL_ORDER)}
    counts = Counter(pool for variant in variants for pool in variant["pools"])
    return {
        f"{pool}, {variant['label']}" if counts[pool] > 1 else pool: variant["pools"][pool]
        for pool in sorted(counts, key=lambda pool: (order.get(pool, len(order)), pool))
        for variant in variants
        if pool in variant["pools"]
    }


def pool_sentences(summary: Summary) -> list[str]:
    """Say of each disaggregated variant which share of its requests went through both pools."""
    return [
        f"{format_figure(variant['disaggregated_fraction'], '.1%')} of the requests of {variant['label']} went through "
        "both pools."
        for variant in summary["variants"].values()
        if variant.get("disaggregated_fraction") is not None
    ]
