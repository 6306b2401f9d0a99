"""Which variant holds the highest rate, and how strong the evidence is, from the posteriors of their curves.

A probability of 0.975 that one rate is the higher (odds of 39 to 1) is called strong evidence: of two equal variants
one in twenty comparisons then names one. 0.9 (odds of 9 to 1) is some evidence. Both lie in the ranges that R. E. Kass
and A. E. Raftery, Bayes factors, Journal of the American Statistical Association 90 (1995) 773-795, call strong and
positive.
"""

import math
from collections.abc import Mapping
from itertools import combinations
from statistics import NormalDist
from typing import Final, Literal

import msgspec
import numpy as np

from ridgeline.loadtest.statistics.attainment_curve import LEVEL, AttainmentCurve, Floats

Evidence = Literal["strong", "some", "none"]
STRONG, SOME = 0.975, 0.9
ALIKE: Final = 1.1
"""Rates whose ratio is surely within this factor differ by nothing that matters: machines drift as much."""


class Ratio(msgspec.Struct, frozen=True):
    """The rate of one variant over that of another, with its interval."""

    ratio: float
    low: float
    high: float
    probability: float
    """That the first rate is the higher."""

    def inverse(self) -> "Ratio":
        """Return the ratio of the second rate over the first."""
        return Ratio(1 / self.ratio, 1 / self.high, 1 / self.low, 1 - self.probability)

    @property
    def is_alike(self) -> bool:
        """Whether all of the interval lies within `ALIKE`."""
        return self.low >= 1 / ALIKE and self.high <= ALIKE

    @property
    def evidence(self) -> Evidence:
        """How strong the evidence is that the first rate is the higher."""
        return "strong" if self.probability >= STRONG else "some" if self.probability >= SOME else "none"


class RateVerdict(msgspec.Struct, frozen=True):
    """What the rates of all variants say together."""

    leader: str
    """The variant with the highest median rate."""
    alike: tuple[str, ...]
    """Variants whose rate differs from the leader's by nothing that matters."""
    behind: dict[str, Evidence]
    """The others, and the evidence that they hold less; none: it cannot be told."""
    factor: float | None
    """How many times as long it takes until it can be told, 1 or more; None if it can."""
    ratios: dict[str, Ratio]
    """Of each two variants, by "b / a"."""

    def over(self, name: str) -> Ratio:
        """Return the leader's rate over that of another variant."""
        direct = self.ratios.get(f"{self.leader} / {name}")
        return direct if direct is not None else self.ratios[f"{name} / {self.leader}"].inverse()

    @property
    def evidence(self) -> Evidence:
        """The weakest evidence that one of the others is behind."""
        order: tuple[Evidence, ...] = ("none", "some", "strong")
        return min(self.behind.values(), key=order.index, default="strong")


def judge_rates(curves: Mapping[str, AttainmentCurve]) -> RateVerdict:
    """Compare the maximum goodput rates of two variants or more."""
    drawn = {name: curve.draws(place) for place, (name, curve) in enumerate(curves.items())}
    leader = max(drawn, key=lambda name: float(np.median(drawn[name])))
    others = {name: _ratio(drawn[leader], rates) for name, rates in drawn.items() if name != leader}
    alike = tuple(name for name, one in others.items() if one.is_alike)
    behind = {name: one.evidence for name, one in others.items() if not one.is_alike}
    factors = [_factor(drawn[leader], drawn[name]) for name, evidence in behind.items() if evidence == "none"]
    return RateVerdict(
        leader,
        alike,
        behind,
        max(factors, default=None),
        {f"{b} / {a}": _ratio(drawn[b], drawn[a]) for a, b in combinations(drawn, 2)},
    )


def _ratio(one: Floats, other: Floats) -> Ratio:
    ratios = one / other
    low, middle, high = np.quantile(ratios, ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2)).tolist()
    return Ratio(middle, low, high, float(np.mean(one > other)))


def _factor(one: Floats, other: Floats) -> float:
    """Return how many times as long it would take until the difference, if it stays, is strong or does not matter.

    The posterior's deviation falls with the square root of the rounds.
    """
    logs = np.log(one / other)
    mean, deviation = abs(float(logs.mean())), float(logs.std())
    wanted = max(mean, math.log(ALIKE) - mean) / NormalDist().inv_cdf(STRONG)
    return max(1.0, (deviation / wanted) ** 2)
