"""Makes the cells of a map of the rounds of one workload, and says which rate is worth a round. Pure functions.

Goodput is the requests/s that met both limits: the rate times the share. A variant's figure is its highest over
the rates that it was tried at, and its interval is that of the share there: the score interval, widened by the scatter
between rounds (`ridgeline.loadtest.rate_search`). It says nothing of the choice of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ridgeline.loadtest.rate_search import MaxGoodputRate, Ratio, Round, bands, ratio_of
from ridgeline.loadtest.slo_maps import UNCLEAR, UNREACHABLE
from tools.bench.modes.journal import Limits, Place, RoundEnded
from tools.bench.modes.settings import ADAPTIVE

WELL_MET, BADLY_MET = 0.85, 0.5
NEARLY: Final = 0.8
"""The part of the highest figure of the other modes that a rate must give for the adaptive mode to be tried there."""


class AtRate(msgspec.Struct, frozen=True):
    """What one variant served at one rate: requests that met the limits, and all."""

    rate: float
    met: int
    total: int
    rounds: int


class Goodput(msgspec.Struct, frozen=True):
    """The highest goodput of one variant, in requests/s, with its interval, and the rate that was offered then."""

    requests_per_s: float
    low: float
    high: float
    rate: float
    at_rates: tuple[AtRate, ...]


class Cell(msgspec.Struct, frozen=True):
    """One pair of limits; a variant without a round there has no goodput.

    `ratio` is the adaptive mode's goodput over the better of the others'. `winner` is a variant whose goodput exceeds
    each other one's by the interval of their ratio, `unclear`, or `unreachable` if no request was served within the
    limits.
    """

    limits: Limits
    variants: dict[str, Goodput]
    best: str | None
    winner: str
    ratio: Ratio | None

    def as_row(self, workload: str, variants: Iterable[str]) -> dict[str, Any]:
        """Return the cell as an entry of `cells` in summary.json."""
        row: dict[str, Any] = msgspec.to_builtins(self)
        served = row.pop("variants")
        return {
            "workload": workload,
            **row.pop("limits"),
            **{variant: served.get(variant) for variant in variants},
            **row,
        }


def counted(rounds: Iterable[RoundEnded], variant: str, place: Place, limits: Limits) -> list[Round]:
    """Count the requests within these limits in each round of a variant that serves this cell."""
    return [
        Round(each.spec.rate, sum(one.meets(limits) for one in each.outcomes), len(each.outcomes))
        for each in rounds
        if each.spec.variant == variant and each.spec.cell in (None, place)
    ]


def cell_of(rounds: Sequence[RoundEnded], every_variant: Iterable[str], place: Place, limits: Limits) -> Cell:
    """Return one cell of the map of these rounds."""
    found = {variant: goodput_of(counted(rounds, variant, place, limits)) for variant in every_variant}
    variants = {variant: goodput for variant, goodput in found.items() if goodput is not None}
    best = max(variants, key=lambda variant: variants[variant].requests_per_s, default=None)
    if best is None or not variants[best].requests_per_s:
        return Cell(limits, variants, None, UNREACHABLE, _ratio(variants))
    return Cell(limits, variants, best, _winner(variants), _ratio(variants))


def goodput_of(rounds: Sequence[Round]) -> Goodput | None:
    """Return the highest goodput over the rates of these rounds; of equal ones that at the lower rate. None if none."""
    if not rounds:
        return None
    found = bands(rounds)
    best = max(found, key=lambda band: (band.rate * band.share, -band.rate))
    at_rates = tuple(AtRate(band.rate, band.met, band.total, band.rounds) for band in found)
    return Goodput(best.rate * best.share, best.rate * best.low, best.rate * best.high, best.rate, at_rates)


def _ratio(variants: Mapping[str, Goodput]) -> Ratio | None:
    others = [goodput for variant, goodput in variants.items() if variant != ADAPTIVE]
    if ADAPTIVE not in variants or not others:
        return None
    return ratio_between(max(others, key=lambda one: one.requests_per_s), variants[ADAPTIVE])


def ratio_between(one: Goodput, other: Goodput) -> Ratio:
    """Return the other's goodput over the one's, with the interval that joins both."""
    return ratio_of(_as_knee(one), _as_knee(other))


def _as_knee(goodput: Goodput) -> MaxGoodputRate:
    """An end at 0 bounds no ratio, so it is open."""
    rate = goodput.requests_per_s or None
    return MaxGoodputRate("found" if rate else "below", rate, goodput.low or None, goodput.high)


def _winner(variants: Mapping[str, Goodput]) -> str:
    for variant, own in variants.items():
        others = [goodput for name, goodput in variants.items() if name != variant]
        if others and all(ratio_between(other, own).is_above_one for other in others):
            return variant
    return UNCLEAR


def mean_ratio(cells: Iterable[Cell]) -> float | None:
    """Return the geometric mean of the ratios that are known; None if none is."""
    logs = [math.log(cell.ratio.ratio) for cell in cells if cell.ratio is not None and cell.ratio.ratio is not None]
    return math.exp(sum(logs) / len(logs)) if logs else None


def goodputs(rounds: Sequence[Round]) -> dict[float, float]:
    """Return the requests/s within the limits at each rate, over all rounds there."""
    rates = sorted({one.rate for one in rounds})
    at = {rate: [one for one in rounds if one.rate == rate] for rate in rates}
    return {rate: rate * sum(one.met for one in here) / sum(one.total for one in here) for rate, here in at.items()}


def good_rates(counted: Mapping[str, Sequence[Round]]) -> list[float]:
    """Return the rates at which the best of these modes serves nearly as much as any at its best rate, the best first.

    None if no mode served a request in time.
    """
    found = [(goodput, rate) for rounds in counted.values() for rate, goodput in goodputs(rounds).items() if goodput]
    best = max(found, default=(0.0, 0.0))[0]
    return list(dict.fromkeys(rate for goodput, rate in sorted(found, reverse=True) if goodput >= NEARLY * best))


def next_cell_rate(
    rates: Sequence[float], middle: float, own: Sequence[Round], others: Mapping[str, Sequence[Round]]
) -> float:
    """Return the rate, one of `rates`, at which the adaptive mode has its next round at the limits of a cell.

    It starts where the better of the others served most, or at the middle rate if none had a round yet. It goes on
    upwards while nearly all of its requests are in time, then to every rate at which the others served nearly as much,
    so that the highest figures of all modes come from the same rates; then downwards if it failed; else it tells its
    own best rate more exactly.
    """
    good = good_rates(others) if others else [middle]
    shares = {rate: goodput / rate for rate, goodput in goodputs(own).items()}
    if not shares:
        return good[0] if good else min(rates)
    lowest, highest = min(shares), max(shares)
    higher, lower = [rate for rate in rates if rate > highest], [rate for rate in rates if rate < lowest]
    if shares[highest] >= WELL_MET and higher:
        return min(higher)
    for rate in good:
        if rate not in shares:
            return rate
    if shares[lowest] < BADLY_MET and lower:
        return max(lower)
    return max(shares, key=lambda rate: rate * shares[rate])
