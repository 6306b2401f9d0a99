"""Which rates are worth a round: the search for the knee, and the next rate for a cell of the adaptive mode.

Pure functions of what was counted so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from loadtest.rate_search import Round, bracket, knee

HOLDS: Final = 0.8
"""The knee is the highest rate at which this share of requests meets the balanced limits: goodput is largest near it,
a little beyond the rate that 90 % hold."""
STEP: Final = 1.6
MOST_RATES: Final = 4
"""Rates that are tried in a search."""
WELL_MET, BADLY_MET = 0.85, 0.5
NEARLY: Final = 0.8
"""The part of the highest figure of the other modes that a rate must give for the adaptive mode to be tried there."""


def next_search_rate(counted: Mapping[str, Sequence[Round]], start: float) -> float | None:
    """Return the next rate of the search, or None if the better mode's knee lies between two rates that were tried.

    Counts are of each pure mode at the balanced limits.
    """
    tried = {one.rate for rounds in counted.values() for one in rounds}
    if not tried:
        return start
    if len(tried) >= MOST_RATES:
        return None
    brackets = [bracket(rounds, HOLDS) for rounds in counted.values()]
    if any(low is not None for low, _ in brackets):
        highest = max(low for low, _ in brackets if low is not None)
        above = [rate for rate in tried if rate > highest]
        return None if above else highest * STEP
    return min(tried) / STEP


def better_knee(counted: Mapping[str, Sequence[Round]]) -> tuple[float, str]:
    """Return the knee of the better pure mode, and how it was found.

    If no rate held the share, or all did, it is the rate nearest to it that was tried.
    """
    found = {arm: knee(rounds, HOLDS) for arm, rounds in counted.items()}
    tried = sorted({one.rate for rounds in counted.values() for one in rounds})
    edges = {"below": tried[0], "above": tried[-1]}
    arm, rate = max(((arm, one.rate or edges[one.outcome]) for arm, one in found.items()), key=lambda pair: pair[1])
    told = {
        "found": f"between rates that {arm} held and did not hold",
        "above": f"{arm} held every rate that was tried",
        "below": "no mode held any rate that was tried",
    }
    return float(f"{rate:.3g}"), told[found[arm].outcome]


def goodputs(rounds: Sequence[Round]) -> dict[float, float]:
    """Return the requests/s within the limits at each rate, over all rounds there."""
    rates = sorted({one.rate for one in rounds})
    at = {rate: [one for one in rounds if one.rate == rate] for rate in rates}
    return {rate: rate * sum(one.met for one in here) / sum(one.total for one in here) for rate, here in at.items()}


def good_rates(counted: Mapping[str, Sequence[Round]]) -> list[float]:
    """Return the rates at which the best of these modes serves nearly as much as any at its best rate, the best first;
    none if no mode served a request in time."""
    found = [(goodput, rate) for rounds in counted.values() for rate, goodput in goodputs(rounds).items() if goodput]
    best = max(found, default=(0.0, 0.0))[0]
    return list(dict.fromkeys(rate for goodput, rate in sorted(found, reverse=True) if goodput >= NEARLY * best))


def nearest(rates: Sequence[float], wanted: float) -> float:
    """Return the rate that differs from the one wanted by the smallest factor."""
    return min(rates, key=lambda rate: max(rate / wanted, wanted / rate))


def next_cell_rate(
    rates: Sequence[float], knee: float, own: Sequence[Round], others: Mapping[str, Sequence[Round]]
) -> float:
    """Return the rate at which the adaptive mode has its next round at the limits of a cell.

    It starts where the better of the others served most, or at the knee if none had a round yet. It goes on upwards
    while nearly all of its requests are in time, then to every rate at which the others served nearly as much, so that
    the highest figures of all modes come from the same rates; then downwards if it failed; else it tells its own best
    rate more exactly.
    """
    good = [nearest(rates, rate) for rate in (good_rates(others) if others else [knee])]
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
