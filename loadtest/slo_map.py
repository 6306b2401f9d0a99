"""A map over SLOs on TTFT and TPOT: which variant would serve more of the same requests within other SLOs.

Each cell has the maximum goodput rates that the comparison would have reported at those SLOs, from the same rounds, and
its verdict. Which rates were measured followed from the run's own SLOs, so rates far from them are often "below" or
"above" all of them. Cells are not corrected for being many, so the map shows where to look and is no verdict. An SLO on
the largest gap between tokens, if there is one, holds in every cell.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.statistics.attainment_curve import MaxGoodputRate, RoundCount, curves_of
from ridgeline.loadtest.statistics.verdict import RateVerdict, judge

TTFT_FACTORS = (1.5, 2.0, 3.0, 5.0, 8.0, 12.0)
TPOT_FACTORS = (1.1, 1.25, 1.5, 2.0, 2.5, 4.0)
"""SLOs as multiples of the unloaded figures."""
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.97)
"""Of what was measured in all variants together, where the unloaded figures are not known."""
ALIKE_CELL: Final = "alike"
UNCLEAR: Final = "unclear"
UNREACHABLE: Final = "unreachable"
UNMEASURED: Final = "not measured"
RoundsAtRates = Sequence[tuple[float, Sequence[RequestRecord]]]
"""The rate of each round of one variant, in requests/s, with its records."""


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


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests say at two SLOs.

    `winner` is a variant, or one of: `alike`; `unclear`; `unreachable` if no rate was held; `not measured` if a request
    within the SLOs could have been given up.
    """

    ttft_ms: float
    tpot_ms: float
    winner: str
    max_goodput_rates: dict[str, MaxGoodputRate] = {}


class SloMap(msgspec.Struct, frozen=True):
    """All cells, by TTFT and then by TPOT; `map` in summary.json."""

    grid: SloGrid
    cells: tuple[Cell, ...]
    sentence: str
    unit: str = "requests/s"
    """Of the rates in the cells, as of the verdict."""


def grid_of(records: Sequence[RequestRecord], unloaded: Unloaded | None, slo: Slo) -> SloGrid | None:
    """Return multiples of the unloaded figures, else quantiles of what was measured, with the plan's own SLOs added.

    None if nothing says what SLOs make sense.
    """
    if unloaded is not None and unloaded.median_ttft_s > 0 and unloaded.median_tpot_s > 0:
        ttfts_ms = [factor * unloaded.median_ttft_s * 1e3 for factor in TTFT_FACTORS]
        tpots_ms = [factor * unloaded.median_tpot_s * 1e3 for factor in TPOT_FACTORS]
        source = "multiples of the unloaded figures, and the SLOs of this run"
    else:
        done = [record for record in records if record.ok]
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


def rate_map(
    rounds: Mapping[str, RoundsAtRates],
    labels: Mapping[str, str],
    grid: SloGrid,
    attainment: float,
    deadline_s: float,
    undisturbed_pairs: int,
) -> SloMap:
    """Find each variant's maximum goodput rate in every cell; requests were given up after `deadline_s`."""
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
        is_held = any(one.met >= attainment * one.total for each in counts.values() for one in each)
        is_reached = is_held or any(one.outcome != "below" for one in found.values())
        winner = _winner(judge(curves, counts, undisturbed_pairs)) if is_reached else UNREACHABLE
        return Cell(ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, winner=winner, max_goodput_rates=found)

    cells = tuple(map(cell, grid.slos()))
    return SloMap(grid, cells, _sentence(cells, labels))


def _winner(verdict: RateVerdict) -> str:
    best, *others = verdict.variants
    if all((best, other) in verdict.serves_more for other in others):
        return best
    return UNCLEAR if verdict.open or verdict.serves_more else ALIKE_CELL


def _sentence(cells: Sequence[Cell], labels: Mapping[str, str]) -> str:
    """Say how many cells each variant has, and how many none has."""
    words = {
        **{name: f"{label} serves more at {{}}" for name, label in labels.items()},
        ALIKE_CELL: "{} alike for all variants",
        UNCLEAR: "{} unclear",
        UNREACHABLE: "{} held by no variant at any rate measured",
        UNMEASURED: "{} not measured, since a request within them could have been given up",
    }
    counts = Counter(cell.winner for cell in cells)
    said = [text.replace("{}", str(counts[winner])) for winner, text in words.items() if counts[winner]]
    return f"Of {len(cells)} pairs of SLOs on TTFT and TPOT, {'; '.join(said)}. Cells are not corrected for being many."
