"""Makes the cells of a map of the rounds of one workload. Pure functions.

Goodput is the requests/s that met both limits: the rate times the share. An arm's figure is its highest over the rates
that it was tried at, and its interval is that of the share there: the score interval, widened by the scatter between
rounds (`loadtest.rate_search`). It says nothing of the choice of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from loadtest.maps.grid import UNCLEAR, UNREACHABLE
from loadtest.rate_search import Knee, Ratio, Round, bands, ratio_of
from loadtest.run.unloaded import Unloaded
from tools.bench.modes.journal import SEARCH, Limits, Place, RoundEnded
from tools.bench.modes.settings import ADAPTIVE, Settings


class AtRate(msgspec.Struct, frozen=True):
    """What one arm served at one rate: requests that met the limits, and all."""

    rate: float
    met: int
    total: int
    rounds: int


class Goodput(msgspec.Struct, frozen=True):
    """The highest goodput of one arm, in requests/s, with its interval, and the rate that was offered then."""

    requests_per_s: float
    low: float
    high: float
    rate: float
    at_rates: tuple[AtRate, ...]


class Cell(msgspec.Struct, frozen=True):
    """One pair of limits; an arm without a round there has no goodput.

    `ratio` is the adaptive mode's goodput over the better of the others'. `winner` is an arm whose goodput exceeds each
    other one's by the interval of their ratio, `unclear`, or `unreachable` if no request was served within the limits.
    """

    workload: str
    limits: Limits
    place: Place
    name: str | None
    arms: dict[str, Goodput]
    best: str | None
    winner: str
    ratio: Ratio | None

    @property
    def is_tied(self) -> bool:
        """Whether two arms share the highest goodput."""
        highest = sorted((goodput.requests_per_s for goodput in self.arms.values()), reverse=True)[:2]
        return self.best is not None and len(highest) == 2 and math.isclose(*highest)

    def as_row(self, arms: Iterable[str]) -> dict[str, Any]:
        """Return the cell as an entry of `cells` in summary.json."""
        return {
            "workload": self.workload,
            "ttft_ms": self.limits.ttft_ms,
            "tpot_ms": self.limits.tpot_ms,
            "name": self.name,
            **{arm: msgspec.to_builtins(self.arms[arm]) if arm in self.arms else None for arm in arms},
            "best": self.best,
            "winner": self.winner,
            "ratio": None if self.ratio is None else msgspec.to_builtins(self.ratio),
        }


def limits_of(settings: Settings, unloaded: Unloaded) -> dict[Place, Limits]:
    """Return the limits of every cell, in milliseconds with three digits."""
    return {
        (row, column): Limits(
            _three_digits(settings.ttft_factors[row] * unloaded.median_ttft_s * 1e3),
            _three_digits(settings.tpot_factors[column] * unloaded.median_tpot_s * 1e3),
        )
        for row, column in settings.cells
    }


def counted(rounds: Iterable[RoundEnded], arm: str, place: Place, limits: Limits) -> list[Round]:
    """Count the requests within these limits in each round of an arm that serves this cell."""
    return [
        Round(each.spec.rate, sum(one.meets(limits) for one in each.outcomes), len(each.outcomes))
        for each in rounds
        if each.spec.arm == arm and each.spec.cell in (None, place)
    ]


def cells_of(
    workload: str, rounds: Iterable[RoundEnded], settings: Settings, limits: Mapping[Place, Limits]
) -> list[Cell]:
    """Return every cell of a workload's map; rounds of the search do not count."""
    judged = [each for each in rounds if each.spec.workload == workload and each.spec.block != SEARCH]
    return [_cell(workload, judged, settings, place, limits[place]) for place in settings.cells]


def _cell(workload: str, rounds: Sequence[RoundEnded], settings: Settings, place: Place, limits: Limits) -> Cell:
    arms = {
        arm: goodput
        for arm in settings.arms
        if (goodput := goodput_of(counted(rounds, arm, place, limits))) is not None
    }
    served = {arm: goodput for arm, goodput in arms.items() if goodput.requests_per_s > 0}
    best = max(served, key=lambda arm: served[arm].requests_per_s) if served else None
    return Cell(
        workload=workload,
        limits=limits,
        place=place,
        name=settings.named(place),
        arms=arms,
        best=best,
        winner=_winner(arms) if best else UNREACHABLE,
        ratio=_ratio(arms),
    )


def goodput_of(rounds: Sequence[Round]) -> Goodput | None:
    """Return the highest goodput over the rates of these rounds; of equal ones that at the lower rate. None if none."""
    if not rounds:
        return None
    found = bands(rounds)
    best = max(found, key=lambda band: (band.rate * band.share, -band.rate))
    return Goodput(
        requests_per_s=best.rate * best.share,
        low=best.rate * best.low,
        high=best.rate * best.high,
        rate=best.rate,
        at_rates=tuple(AtRate(band.rate, band.met, band.total, band.rounds) for band in found),
    )


def _ratio(arms: Mapping[str, Goodput]) -> Ratio | None:
    others = [goodput for arm, goodput in arms.items() if arm != ADAPTIVE]
    if ADAPTIVE not in arms or not others:
        return None
    return ratio_between(max(others, key=lambda one: one.requests_per_s), arms[ADAPTIVE])


def ratio_between(one: Goodput, other: Goodput) -> Ratio:
    """Return the other's goodput over the one's, with the interval that joins both."""
    return ratio_of(_as_knee(one), _as_knee(other))


def _as_knee(goodput: Goodput) -> Knee:
    """An end at 0 bounds no ratio, so it is open."""
    rate = goodput.requests_per_s or None
    return Knee("found" if rate else "below", rate, goodput.low or None, goodput.high)


def _winner(arms: Mapping[str, Goodput]) -> str:
    for arm, own in arms.items():
        others = [goodput for name, goodput in arms.items() if name != arm]
        if others and all(ratio_between(other, own).is_above_one for other in others):
            return arm
    return UNCLEAR


def mean_ratio(cells: Iterable[Cell]) -> float | None:
    """Return the geometric mean of the ratios that are known; None if none is."""
    logs = [math.log(cell.ratio.ratio) for cell in cells if cell.ratio is not None and cell.ratio.ratio is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
