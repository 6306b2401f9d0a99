"""The maximum goodput rates at other SLOs on TTFT and TPOT, from the requests of a search.

Each cell has the maximum rates that the search would have reported at those limits, from the same rounds. Which
rates were measured followed from the search's own limits, so rates far from them are often "below" or
"above" all of them. Of more than two variants one wins a cell only if its rate is higher than each other's by the
interval of their ratio, as in `loadtest.maps.winner_map`. Cells are not corrected for being many.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from loadtest.maps.grid import UNCLEAR, UNREACHABLE, Grid
from loadtest.plan import Slo
from loadtest.rate_search import MaxGoodputRate, Round, max_goodput_rate, ratio_of
from loadtest.run.records import RequestRecord

UNMEASURED: Final = "not measured"
RoundsAtRates = Sequence[tuple[float, Sequence[RequestRecord]]]
"""The rate of each round of one variant, in requests/s or in requests/s per device, with its records."""


class RateCell(msgspec.Struct, frozen=True):
    """One pair of limits with each variant's maximum there.

    `winner` is a variant; `unclear`; `unreachable` if no variant held the share at any rate; or `not measured` if a
    request within these SLOs could have been given up.
    """

    ttft_ms: float
    tpot_ms: float
    max_goodput_rates: dict[str, MaxGoodputRate]
    winner: str


class RateMap(msgspec.Struct, frozen=True):
    """All cells, by TTFT and then by TPOT; `rates.map` in summary.json."""

    grid: Grid
    unit: str
    measured: dict[str, tuple[float, float]]
    """The lowest and the maximum goodput rate of each variant."""
    cells: tuple[RateCell, ...]
    sentence: str


def rate_map(
    rounds: Mapping[str, RoundsAtRates],
    labels: Mapping[str, str],
    grid: Grid,
    attainment: float,
    deadline_s: float,
    unit: str,
) -> RateMap:
    """Find every variant's maximum goodput rate in every cell; requests were given up after `deadline_s`.

    `unit` is that of a rate.
    """
    longest_tokens = max(
        record.requested_output_tokens
        for of_variant in rounds.values()
        for _, records in of_variant
        for record in records
    )

    def cell(slo: Slo) -> RateCell:
        ttft_s, tpot_s, _ = slo.in_seconds()
        if ttft_s + tpot_s * longest_tokens > deadline_s * (1 + 1e-9):
            return RateCell(slo.ttft_ms, slo.tpot_ms, {}, UNMEASURED)
        max_goodput_rates = {variant: _max_rate(of_variant, slo, attainment) for variant, of_variant in rounds.items()}
        return RateCell(slo.ttft_ms, slo.tpot_ms, max_goodput_rates, _winner(max_goodput_rates))

    cells = tuple(
        cell(Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, gap_ms=grid.gap_ms))
        for ttft_ms in grid.ttft_ms
        for tpot_ms in grid.tpot_ms
    )
    measured = {
        variant: (min(rates), max(rates)) for variant in rounds if (rates := [rate for rate, _ in rounds[variant]])
    }
    return RateMap(grid, unit, measured, cells, _sentence(cells, labels))


def _max_rate(rounds: RoundsAtRates, slo: Slo, attainment: float) -> MaxGoodputRate:
    limits = slo.in_seconds()
    counted = [Round(rate, sum(one.meets(*limits) for one in records), len(records)) for rate, records in rounds]
    return max_goodput_rate(counted, attainment)


def _winner(max_goodput_rates: Mapping[str, MaxGoodputRate]) -> str:
    if all(found.outcome == "below" for found in max_goodput_rates.values()):
        return UNREACHABLE
    for variant, own in max_goodput_rates.items():
        if all(ratio_of(found, own).is_above_one for other, found in max_goodput_rates.items() if other != variant):
            return variant
    return UNCLEAR


def _sentence(cells: Sequence[RateCell], labels: Mapping[str, str]) -> str:
    """Say in how many cells each variant holds the maximum goodput rate."""
    counts = Counter(cell.winner for cell in cells)
    said = [
        f"{labels[variant]} holds the maximum goodput rate at {counts[variant]}"
        for variant in labels
        if counts[variant]
    ]
    said += [
        f"{counts[kind]} {words}"
        for kind, words in (
            (UNCLEAR, "unclear"),
            (UNREACHABLE, "held by no variant at any rate measured"),
            (UNMEASURED, "not measured, since a request within them could have been given up"),
        )
        if counts[kind]
    ]
    return f"Of {len(cells)} pairs of SLOs on TTFT and TPOT, {'; '.join(said)}. Cells are not corrected for being many."
