"""Draws the map of one workload as an SVG picture: a field for each pair of limits, in the colour of the best mode.

A strong colour says that the mode beats each other one by the interval of their ratio, a pale one that it only had the
highest figure. Goodputs are in requests/s, each with the rate that was offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Final

from loadtest.report.plots import ARM_COLORS, GRID, INK, MUTED
from tools.bench.modes.cells import Cell, mean_ratio
from tools.bench.modes.settings import ADAPTIVE, ARMS

FIELD_W, FIELD_H, LEFT, TOP, FOOT = 240, 108, 128, 84, 84
COLORS: Final[Mapping[str, str]] = dict(zip(ARMS, ARM_COLORS, strict=True))
STRONG, PALE = 0.5, 0.16
SHORT: Final = {"colocated": "coloc", "disaggregated": "split", ADAPTIVE: "adaptive"}
FONT: Final = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""


def draw(title: str, note: str, cells: Sequence[Cell], arms: Sequence[str]) -> str:
    """Return the picture of a workload's cells; rows are TTFT limits, columns TPOT limits."""
    rows = sorted({cell.limits.ttft_ms for cell in cells})
    columns = sorted({cell.limits.tpot_ms for cell in cells})
    width, height = LEFT + FIELD_W * len(columns) + 16, TOP + FIELD_H * len(rows) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(16, 26, title, size=17, weight="bold"),
        _text(16, 46, note, color=MUTED),
    ]
    parts += [
        _text(LEFT + FIELD_W * (place + 0.5), TOP - 10, f"TPOT ≤ {tpot_ms:g} ms", anchor="middle")
        for place, tpot_ms in enumerate(columns)
    ]
    parts += [
        _text(LEFT - 10, TOP + FIELD_H * (place + 0.5) + 4, f"TTFT ≤ {ttft_ms / 1e3:.3g} s", anchor="end")
        for place, ttft_ms in enumerate(rows)
    ]
    for cell in cells:
        x = LEFT + FIELD_W * columns.index(cell.limits.tpot_ms)
        parts += _field(x, TOP + FIELD_H * rows.index(cell.limits.ttft_ms), cell, arms)
    parts += _foot(TOP + FIELD_H * len(rows) + 24, cells, arms)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _field(x: float, y: float, cell: Cell, arms: Sequence[str]) -> Iterator[str]:
    best = None if cell.is_tied else cell.best
    fill, opacity = (COLORS[best], STRONG if cell.winner == best else PALE) if best else (GRID, 1.0)
    yield (
        f'<rect x="{x + 2}" y="{y + 2}" width="{FIELD_W - 4}" height="{FIELD_H - 4}" rx="5" fill="{fill}" '
        f'fill-opacity="{opacity}"/>'
    )
    head = best or ("alike" if cell.is_tied else "no request in time")
    ratio = "" if cell.ratio is None or cell.ratio.ratio is None else f"x {cell.ratio.ratio:.2f}"
    yield _text(x + 12, y + 22, head, weight="bold")
    yield _text(x + FIELD_W - 12, y + 22, ratio, anchor="end", weight="bold")
    for place, arm in enumerate(arms):
        served = cell.arms.get(arm)
        line_y = y + 44 + 18 * place
        yield _text(x + 12, line_y, SHORT[arm], size=12)
        if served is not None:
            told = f"{served.requests_per_s:.2f} ({served.low:.2f}–{served.high:.2f}) at {served.rate:.3g}"
            yield _text(x + FIELD_W - 12, line_y, told, size=12, anchor="end")
    if cell.name:
        yield _text(x + FIELD_W - 12, y + FIELD_H - 8, cell.name, size=11, anchor="end", color=MUTED)


def _foot(y: float, cells: Sequence[Cell], arms: Sequence[str]) -> Iterator[str]:
    x = float(LEFT)
    for arm in arms:
        yield f'<rect x="{x}" y="{y - 11}" width="13" height="13" rx="2" fill="{COLORS[arm]}" fill-opacity="{STRONG}"/>'
        yield _text(x + 19, y, arm, size=12)
        x += 130
    what = "Requests/s within both limits (interval) at the rate offered. Pale: not beyond the interval of the ratio."
    yield _text(LEFT, y + 24, what, size=12, color=MUTED)
    if (mean := mean_ratio(cells)) is not None:
        told = f"x: adaptive over the better of the others; its geometric mean over the map is {mean:.2f}."
        yield _text(LEFT, y + 42, told, size=12, color=MUTED)


def _text(
    x: float, y: float, text: str, *, size: int = 13, anchor: str = "start", weight: str = "normal", color: str = INK
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{color}">{escape(text)}</text>'
    )
