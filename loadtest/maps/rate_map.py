"""Which arm holds the highest rate within which limits: a map over limits of TTFT and TPOT, from a search's requests.

Each cell has the knees that the search would have reported at those limits, from the same rounds. Which rates were
measured followed from the search's own limits, so knees far from them are often "below" or "above" all of them. Of more
than two arms one wins a cell only if its rate is higher than each other's by the interval of their ratio, as in
`loadtest.maps.winner_map`. Cells are not corrected for being many.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from loadtest.maps.grid import UNCLEAR, UNREACHABLE, Grid
from loadtest.plan import Slo
from loadtest.rate_search import Knee, Round, knee, ratio_of
from loadtest.run.records import RequestRecord

UNMEASURED: Final = "not measured"
RoundsAtRates = Sequence[tuple[float, Sequence[RequestRecord]]]
"""The rate of each round of one arm, in requests/s or in requests/s per device, with its records."""


class RateCell(msgspec.Struct, frozen=True):
    """One pair of limits with each arm's knee there.

    `winner` is an arm; `unclear`; `unreachable` if no arm held the share at any rate; or `not measured` if a request
    within these limits could have been given up.
    """

    ttft_ms: float
    tpot_ms: float
    knees: dict[str, Knee]
    winner: str


class RateMap(msgspec.Struct, frozen=True):
    """All cells, by TTFT and then by TPOT; `rates.map` in summary.json."""

    grid: Grid
    unit: str
    measured: dict[str, tuple[float, float]]
    """The lowest and the highest rate of each arm."""
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
    """Find every arm's knee in every cell; requests were given up after `deadline_s`, and `unit` is that of a rate."""
    longest_tokens = max(
        record.requested_output_tokens for of_arm in rounds.values() for _, records in of_arm for record in records
    )

    def cell(slo: Slo) -> RateCell:
        ttft_s, tpot_s, _ = slo.in_seconds()
        if ttft_s + tpot_s * longest_tokens > deadline_s * (1 + 1e-9):
            return RateCell(slo.ttft_ms, slo.tpot_ms, {}, UNMEASURED)
        knees = {arm: _knee(of_arm, slo, attainment) for arm, of_arm in rounds.items()}
        return RateCell(slo.ttft_ms, slo.tpot_ms, knees, _winner(knees))

    cells = tuple(
        cell(Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms, gap_ms=grid.gap_ms))
        for ttft_ms in grid.ttft_ms
        for tpot_ms in grid.tpot_ms
    )
    measured = {arm: (min(rates), max(rates)) for arm in rounds if (rates := [rate for rate, _ in rounds[arm]])}
    return RateMap(grid, unit, measured, cells, _sentence(cells, labels))


def _knee(rounds: RoundsAtRates, slo: Slo, attainment: float) -> Knee:
    limits = slo.in_seconds()
    counted = [Round(rate, sum(one.meets(*limits) for one in records), len(records)) for rate, records in rounds]
    return knee(counted, attainment)


def _winner(knees: Mapping[str, Knee]) -> str:
    if all(found.outcome == "below" for found in knees.values()):
        return UNREACHABLE
    for arm, own in knees.items():
        if all(ratio_of(found, own).is_above_one for other, found in knees.items() if other != arm):
            return arm
    return UNCLEAR


def _sentence(cells: Sequence[RateCell], labels: Mapping[str, str]) -> str:
    """Say in how many cells each arm holds the highest rate."""
    counts = Counter(cell.winner for cell in cells)
    said = [f"{labels[arm]} holds the highest rate at {counts[arm]}" for arm in labels if counts[arm]]
    said += [
        f"{counts[kind]} {words}"
        for kind, words in (
            (UNCLEAR, "unclear"),
            (UNREACHABLE, "held by no arm at any rate measured"),
            (UNMEASURED, "not measured, since a request within them could have been given up"),
        )
        if counts[kind]
    ]
    return (
        f"Of {len(cells)} pairs of limits on TTFT and TPOT, {'; '.join(said)}. Cells are not corrected for being many."
    )
