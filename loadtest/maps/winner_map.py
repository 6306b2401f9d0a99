"""Which variant meets which SLOs for more requests: a map over SLOs on TTFT and TPOT, from the recorded requests alone.

A limit on the largest gap between tokens, if the comparison has one, holds in every cell.

Each cell is judged as the comparison itself is, with the same interval over the same pairs. Of more than two variants
one wins a cell only if it beats each of the others there: an intersection-union test, which needs no correction (R. L.
Berger, Technometrics 24 (1982) 295-300). Cells are not corrected for being many, so the map shows where to look and is
no verdict.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import msgspec

from loadtest.maps.grid import EQUIVALENT, UNCLEAR, UNREACHABLE, Grid, PairRecords
from loadtest.plan import Slo
from loadtest.statistics.outcome import Conclusion
from loadtest.statistics.pairs import PairDifference
from loadtest.statistics.proportions import PairedCounts

Judge = Callable[[Sequence[PairDifference]], Conclusion]
"""What concludes from the pairs of two variants; the comparison's own at its last look."""


class Difference(msgspec.Struct, frozen=True):
    """Variant `second` minus variant `first` in one cell, in shares of requests, with the interval over pairs."""

    first: str
    second: str
    mean: float
    low: float
    high: float


class Cell(msgspec.Struct, frozen=True):
    """Two SLOs; `winner` is a variant, `equivalent`, `unclear`, or `unreachable` if hardly a request met them."""

    ttft_ms: float
    tpot_ms: float
    attainment: dict[str, float]
    attainment_by_pair: dict[str, tuple[float, ...]]
    differences: tuple[Difference, ...]
    winner: str


class WinnerMap(msgspec.Struct, frozen=True):
    """All cells, by TTFT and then by TPOT; `winner_map` in summary.json."""

    grid: Grid
    cells: tuple[Cell, ...]
    sentence: str


def winner_map(pairs: Sequence[PairRecords], labels: Mapping[str, str], grid: Grid, judge: Judge) -> WinnerMap:
    """Judge every cell of the grid; `labels` name the variants for people."""
    cells = tuple(
        _cell(pairs, tuple(labels), Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, gap_ms=grid.gap_ms), judge)
        for ttft_ms in grid.ttft_ms
        for tpot_ms in grid.tpot_ms
    )
    return WinnerMap(grid, cells, _sentence(cells, labels, grid.gap_ms))


def _cell(pairs: Sequence[PairRecords], variants: tuple[str, ...], slo: Slo, judge: Judge) -> Cell:
    met = [
        {variant: [record.meets(*slo.in_seconds()) for record in pair[variant]] for variant in variants}
        for pair in pairs
    ]
    found = {(a, b): judge([_difference(pair[a], pair[b]) for pair in met]) for a, b in combinations(variants, 2)}
    total = {variant: sum(len(pair[variant]) for pair in met) for variant in variants}
    return Cell(
        ttft_ms=slo.ttft_ms,
        tpot_ms=slo.tpot_ms,
        attainment={variant: sum(sum(pair[variant]) for pair in met) / total[variant] for variant in variants},
        attainment_by_pair={
            variant: tuple(sum(pair[variant]) / len(pair[variant]) for pair in met) for variant in variants
        },
        differences=tuple(
            Difference(a, b, one.attainment.mean, one.attainment.low, one.attainment.high)
            for (a, b), one in found.items()
            if one.attainment is not None
        ),
        winner=_winner(found, variants),
    )


def _difference(a: Sequence[bool], b: Sequence[bool]) -> PairDifference:
    cases = list(zip(a, b, strict=True))
    counts = PairedCounts(*(cases.count(case) for case in ((True, True), (True, False), (False, True), (False, False))))
    return PairDifference(counts, (counts.only_b - counts.only_a) / counts.total, None, {}, 0)


def _winner(found: Mapping[tuple[str, str], Conclusion], variants: Sequence[str]) -> str:
    beaten = Counter(pair[0 if one.better == "a" else 1] for pair, one in found.items() if one.outcome == "better")
    for variant in variants:
        if beaten[variant] == len(variants) - 1:
            return variant
    outcomes = {one.outcome for one in found.values()}
    if outcomes == {"slo_unreachable"}:
        return UNREACHABLE
    return EQUIVALENT if outcomes == {"equivalent"} else UNCLEAR


def _sentence(cells: Sequence[Cell], labels: Mapping[str, str], gap_ms: float | None) -> str:
    """Say how many cells each variant has, and with which SLOs its largest difference is."""
    counts = Counter(cell.winner for cell in cells)
    said = [f"{labels[variant]} meets {counts[variant]} for more requests" for variant in labels if counts[variant]]
    said += [
        f"{counts[kind]} {words}"
        for kind, words in (
            (EQUIVALENT, "alike for all variants"),
            (UNCLEAR, "unclear"),
            (UNREACHABLE, "met by hardly a request in any variant"),
        )
        if counts[kind]
    ]
    beside = "" if gap_ms is None else f", each with gaps of at most {gap_ms:g} ms"
    return (
        f"Of {len(cells)} pairs of SLOs on TTFT and TPOT{beside}, {'; '.join(said)}. "
        "Cells are not corrected for being many."
    )
