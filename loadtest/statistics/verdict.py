"""Which variants serve more of the same requests within the SLOs, from the posteriors of their curves.

A variant is said to serve more than another if its maximum goodput rate is the higher with a probability of 0.975: of
two equal variants one in twenty comparisons then names one, as a two-sided test of 5 % does. Of more variants each is
held against the others, so the error of 5 % is divided by their number (Bonferroni). There is one grade of evidence and
no weaker one. Nothing is said of fewer than two pairs of rounds that no other work disturbed, nor against the share of
requests that was counted.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np

from ridgeline.loadtest.statistics.attainment_curve import LEVEL, AttainmentCurve, Floats, RoundCount

LEAST_PAIRS: Final = 2
"""Of one pair nothing says how rounds scatter."""
ALIKE: Final = 1.1
"""Rates whose ratio is surely within this factor differ by nothing that matters: machines drift as much."""
POWER: Final = 0.8
MIDDLE_SLOPE, MIDDLE_SCATTER = 8.0, 0.1
"""Of the curve's shapes, where nothing was measured yet."""
MIDDLE_SHARE: Final = 0.8
"""Of the requests of a round that meet the SLOs, at rates near the highest one."""


class Ratio(msgspec.Struct, frozen=True):
    """The maximum goodput rate of variant `one` over that of `other`, with its interval."""

    one: str
    other: str
    ratio: float
    low: float
    high: float
    probability: float
    """That the first rate is the higher."""

    @property
    def is_alike(self) -> bool:
        """Whether all of the interval lies within `ALIKE`."""
        return self.low >= 1 / ALIKE and self.high <= ALIKE


class RateVerdict(msgspec.Struct, frozen=True):
    """What the rounds of all variants say together."""

    variants: tuple[str, ...]
    """From the highest median of the maximum goodput rate to the lowest."""
    serves_more: tuple[tuple[str, str], ...]
    """Each variant that is known to serve more than another, with the other."""
    alike: tuple[tuple[str, str], ...]
    """Each two variants whose rates differ by nothing that matters."""
    factor: float | None
    """How many times as long it takes until each two can be told apart, 1 or more; None if they can."""
    ratios: tuple[Ratio, ...]
    """Of each two variants."""
    pairs: int
    """Pairs of rounds that no other work disturbed."""
    level: float
    """Of the ratios' intervals; a variant that serves more has one above 1."""

    @property
    def open(self) -> tuple[tuple[str, str], ...]:
        """Each two variants of which neither is known to serve more, nor that they are alike."""
        told = {frozenset(two) for two in (*self.serves_more, *self.alike)}
        return tuple(two for two in combinations(self.variants, 2) if frozenset(two) not in told)

    def between(self, one: str, other: str) -> Ratio:
        """Return the ratio of two variants, as it was computed or the other way round."""
        return next(each for each in self.ratios if {each.one, each.other} == {one, other})


def judge(
    curves: Mapping[str, AttainmentCurve], found: Mapping[str, Sequence[RoundCount]], undisturbed_pairs: int
) -> RateVerdict:
    """Compare two variants or more, whose rounds `found` has in the order of pairs."""
    drawn = {name: curve.draws(place) for place, (name, curve) in enumerate(curves.items())}
    names = tuple(sorted(drawn, key=lambda name: -float(np.median(drawn[name]))))
    level = _level(len(names))
    ratios = [_ratio(one, other, drawn, level) for one, other in combinations(names, 2)]
    is_enough = undisturbed_pairs >= LEAST_PAIRS
    serves_more, alike = [], []
    for each in ratios if is_enough else ():
        if each.low > 1 and _share(found[each.one]) > _share(found[each.other]):
            serves_more.append((each.one, each.other))
        elif each.is_alike:
            alike.append((each.one, each.other))
    told = {*serves_more, *alike}
    factors = [
        _factor(drawn[each.one], drawn[each.other], level) for each in ratios if (each.one, each.other) not in told
    ]
    most = max(factors, default=None)
    return RateVerdict(names, tuple(serves_more), tuple(alike), most, tuple(ratios), undisturbed_pairs, level)


def told_apart(pairs: int, requests: int, variants: int = 2) -> float:
    """Return the ratio of two maximum goodput rates that so many pairs show in four of five comparisons at best.

    exp((z of the level + z of the power) x sqrt(2 / pairs) x the deviation of one round), as for two normal means
    (S. A. Julious, Statistics in Medicine 23 (2004) 1921-1986). A round's deviation has two parts: its scatter, and
    that of its `requests`, which the slope turns from logits into rates.
    """
    of_requests = 1 / (MIDDLE_SLOPE * math.sqrt(requests * MIDDLE_SHARE * (1 - MIDDLE_SHARE)))
    quantiles = NormalDist().inv_cdf((1 + _level(variants)) / 2) + NormalDist().inv_cdf(POWER)
    return math.exp(quantiles * math.sqrt(2 / pairs) * math.hypot(MIDDLE_SCATTER, of_requests))


def _level(variants: int) -> float:
    return 1 - (1 - LEVEL) / (variants - 1)


def _ratio(one: str, other: str, drawn: Mapping[str, Floats], level: float) -> Ratio:
    ratios = drawn[one] / drawn[other]
    low, middle, high = np.quantile(ratios, ((1 - level) / 2, 0.5, (1 + level) / 2)).tolist()
    return Ratio(one, other, middle, low, high, float(np.mean(ratios > 1)))


def _share(rounds: Sequence[RoundCount]) -> float:
    return sum(one.met for one in rounds) / sum(one.total for one in rounds)


def _factor(one: Floats, other: Floats, level: float) -> float:
    """Return how many times as long it would take until the difference, if it stays, is known or does not matter.

    The posterior's deviation falls with the square root of the rounds.
    """
    logs = np.log(one / other)
    mean, deviation = abs(float(logs.mean())), float(logs.std())
    wanted = max(mean, math.log(ALIKE) - mean) / NormalDist().inv_cdf((1 + level) / 2)
    return max(1.0, (deviation / wanted) ** 2)
