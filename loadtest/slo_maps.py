"""Maps over SLOs on TTFT and TPOT: what other SLOs would have said of the same requests.

A winner map is of a comparison: each cell is judged as the comparison itself is, with the same interval over the same
pairs. A rate map is of a search: each cell has the maximum goodput rates that the search would have reported at those
SLOs, from the same rounds. Which rates were measured followed from the search's own SLOs, so rates far from them are
often "below" or "above" all of them.

Of more than two variants one wins a cell only if it beats each of the others there: an intersection-union test, which
needs no correction (R. L. Berger, Technometrics 24 (1982) 295-300). Cells are not corrected for being many, so a map
shows where to look and is no verdict. An SLO on the largest gap between tokens, if there is one, holds in every cell.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Final

import msgspec
import numpy as np

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.statistics.attainment_curve import AttainmentCurve, MaxGoodputRate, RoundCount, curves_of
from ridgeline.loadtest.statistics.outcome import Conclusion
from ridgeline.loadtest.statistics.pairs import PairDifference, attainment_difference
from ridgeline.loadtest.statistics.rate_verdict import judge_rates

TTFT_FACTORS = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0)
TPOT_FACTORS = (1.1, 1.25, 1.5, 2.0, 2.5, 4.0)
"""SLOs as multiples of the unloaded figures."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)
"""Of what was measured in all variants together, where the unloaded figures are not known."""
EQUIVALENT: Final = "equivalent"
UNCLEAR: Final = "unclear"
UNREACHABLE: Final = "unreachable"
UNMEASURED: Final = "not measured"
PairRecords = Mapping[str, Sequence[RequestRecord]]
"""The records of each variant in one pair; position i is the same request in all variants."""
RoundsAtRates = Sequence[tuple[float, Sequence[RequestRecord]]]
"""The rate of each round of one variant, in requests/s or in requests/s per device, with its records."""
Judge = Callable[[Sequence[PairDifference]], Conclusion]
"""What concludes from the pairs of two variants; the comparison's own at its last look."""


class SloGrid(msgspec.Struct, frozen=True):
    """The SLOs of a map, ascending."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    source: str
    gap_ms: float | None = None
    """The SLO on the largest gap in every cell; None if there is none."""

    def slos(self) -> list[Slo]:
        """Return the SLOs of each cell, by TTFT and then by TPOT."""
        return [Slo(ttft_ms=ttft, tpot_ms=tpot, gap_ms=self.gap_ms) for ttft in self.ttft_ms for tpot in self.tpot_ms]


class Difference(msgspec.Struct, frozen=True):
    """Variant `second` minus variant `first` in one cell, in shares of requests, with the interval over pairs."""

    first: str
    second: str
    mean: float
    low: float
    high: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests say at two SLOs.

    `winner` is a variant, or one of: `equivalent`; `unclear`; `unreachable` if hardly a request met the SLOs, or no
    rate was held; `not measured` if a request within the SLOs could have been given up.
    """

    ttft_ms: float
    tpot_ms: float
    winner: str
    attainment: dict[str, float] = {}
    attainment_by_pair: dict[str, tuple[float, ...]] = {}
    differences: tuple[Difference, ...] = ()
    max_goodput_rates: dict[str, MaxGoodputRate] = {}


class SloMap(msgspec.Struct, frozen=True):
    """All cells, by TTFT and then by TPOT; `winner_map`, or `rates.map`, in summary.json."""

    grid: SloGrid
    cells: tuple[Cell, ...]
    sentence: str
    unit: str = "share"
    measured: dict[str, tuple[float, float]] = {}
    """The lowest and the highest rate of each variant, in a rate map."""


def grid_of(pairs: Sequence[PairRecords], unloaded: Unloaded | None, slo: Slo) -> SloGrid | None:
    """Return multiples of the unloaded figures, else quantiles of what was measured, with the plan's own SLOs added.

    None if nothing says what SLOs make sense.
    """
    if unloaded is not None and unloaded.median_ttft_s > 0 and unloaded.median_tpot_s > 0:
        ttfts_ms = [factor * unloaded.median_ttft_s * 1e3 for factor in TTFT_FACTORS]
        tpots_ms = [factor * unloaded.median_tpot_s * 1e3 for factor in TPOT_FACTORS]
        source = "multiples of the unloaded figures, and the SLOs of this run"
    else:
        done = [record for pair in pairs for records in pair.values() for record in records if record.ok]
        ttfts = [ttft_s * 1e3 for record in done if (ttft_s := record.ttft_scheduled_s) is not None]
        tpots = [tpot_s * 1e3 for record in done if (tpot_s := record.tpot_s) is not None]
        if not ttfts or not tpots:
            return None
        ttfts_ms, tpots_ms = np.quantile(ttfts, QUANTILES).tolist(), np.quantile(tpots, QUANTILES).tolist()
        source = "quantiles of what was measured in all variants, and the SLOs of this run"
    return SloGrid(_rounded(ttfts_ms, slo.ttft_ms), _rounded(tpots_ms, slo.tpot_ms), source, slo.gap_ms)


def _rounded(values_ms: Sequence[float], own_ms: float) -> tuple[float, ...]:
    """Return the values with three digits, ascending, each once; the run's own as it is."""
    rounded = {float(f"{value:.3g}") for value in values_ms if value > 0}
    return tuple(sorted({value for value in rounded if not math.isclose(value, own_ms, rel_tol=0.02)} | {own_ms}))


def winner_map(pairs: Sequence[PairRecords], labels: Mapping[str, str], grid: SloGrid, judge: Judge) -> SloMap:
    """Judge every cell of the grid; `labels` name the variants for people."""
    variants = tuple(labels)

    def cell(slo: Slo) -> Cell:
        limits = slo.in_seconds()
        met = [{name: [record.meets(*limits) for record in pair[name]] for name in variants} for pair in pairs]
        found = {
            (a, b): judge([attainment_difference(pair[a], pair[b]) for pair in met])
            for a, b in combinations(variants, 2)
        }
        total = {name: sum(len(pair[name]) for pair in met) for name in variants}
        return Cell(
            ttft_ms=slo.ttft_ms,
            tpot_ms=slo.tpot_ms,
            attainment={name: sum(sum(pair[name]) for pair in met) / total[name] for name in variants},
            attainment_by_pair={name: tuple(sum(pair[name]) / len(pair[name]) for pair in met) for name in variants},
            differences=tuple(
                Difference(a, b, one.attainment.mean, one.attainment.low, one.attainment.high)
                for (a, b), one in found.items()
                if one.attainment is not None
            ),
            winner=_winner_of_pairs(found, variants),
        )

    cells = tuple(map(cell, grid.slos()))
    words = {
        **{name: f"{label} meets {{}} for more requests" for name, label in labels.items()},
        EQUIVALENT: "{} alike for all variants",
        UNCLEAR: "{} unclear",
        UNREACHABLE: "{} met by hardly a request in any variant",
    }
    beside = "" if grid.gap_ms is None else f", each with gaps of at most {grid.gap_ms:g} ms"
    return SloMap(grid, cells, _sentence(cells, words, beside))


def rate_map(
    rounds: Mapping[str, RoundsAtRates],
    labels: Mapping[str, str],
    grid: SloGrid,
    attainment: float,
    deadline_s: float,
    unit: str,
) -> SloMap:
    """Find each variant's maximum goodput rate, in `unit`, in every cell; requests were given up after `deadline_s`."""
    longest_tokens = max(
        record.requested_output_tokens for of_one in rounds.values() for _, records in of_one for record in records
    )

    def cell(slo: Slo) -> Cell:
        ttft_s, tpot_s, gap_s = slo.in_seconds()
        if ttft_s + tpot_s * longest_tokens > deadline_s * (1 + 1e-9):
            return Cell(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, winner=UNMEASURED)
        counts = {
            name: [
                RoundCount(rate, sum(one.meets(ttft_s, tpot_s, gap_s) for one in records), len(records))
                for rate, records in of_one
            ]
            for name, of_one in rounds.items()
        }
        curves = curves_of(counts, attainment)
        found = {name: curve.max_goodput_rate() for name, curve in curves.items()}
        winner = _winner_of_rates(curves, found)
        return Cell(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, winner=winner, max_goodput_rates=found)

    cells = tuple(map(cell, grid.slos()))
    words = {
        **{name: f"{label} holds the maximum goodput rate at {{}}" for name, label in labels.items()},
        EQUIVALENT: "{} alike for all variants",
        UNCLEAR: "{} unclear",
        UNREACHABLE: "{} held by no variant at any rate measured",
        UNMEASURED: "{} not measured, since a request within them could have been given up",
    }
    measured = {name: (min(rates), max(rates)) for name in rounds if (rates := [rate for rate, _ in rounds[name]])}
    return SloMap(grid, cells, _sentence(cells, words), unit, measured)


def _winner_of_pairs(found: Mapping[tuple[str, str], Conclusion], variants: Sequence[str]) -> str:
    beaten = Counter(pair[0 if one.better == "a" else 1] for pair, one in found.items() if one.outcome == "better")
    for name in variants:
        if beaten[name] == len(variants) - 1:
            return name
    outcomes = {one.outcome for one in found.values()}
    if outcomes == {"slo_unreachable"}:
        return UNREACHABLE
    return EQUIVALENT if outcomes == {"equivalent"} else UNCLEAR


def _winner_of_rates(curves: Mapping[str, AttainmentCurve], found: Mapping[str, MaxGoodputRate]) -> str:
    if all(one.outcome == "below" for one in found.values()):
        return UNREACHABLE
    if len({one.outcome for one in found.values()} - {"found"}) > 1 or all(one.rate is None for one in found.values()):
        return UNCLEAR
    verdict = judge_rates(curves)
    if not verdict.behind:
        return EQUIVALENT
    return verdict.leader if not verdict.alike and verdict.evidence == "strong" else UNCLEAR


def _sentence(cells: Sequence[Cell], words: Mapping[str, str], beside: str = "") -> str:
    """Say how many cells each variant has, and how many none has, in the words of each."""
    counts = Counter(cell.winner for cell in cells)
    said = [text.replace("{}", str(counts[winner])) for winner, text in words.items() if counts[winner]]
    return (
        f"Of {len(cells)} pairs of SLOs on TTFT and TPOT{beside}, {'; '.join(said)}. "
        "Cells are not corrected for being many."
    )
