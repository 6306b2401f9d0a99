"""The attainment of a variant over the rate: a Bayesian curve through rounds, and the highest rate that it holds.

A mixed logistic model (A. Agresti, Categorical Data Analysis, 3rd ed. 2013, chapter 13): the logit of attainment falls
with the logarithm of the rate. Each round feels a rate of its own around the one asked for, since its requests share a
moment of the machine. Attainment stays below 1 by the share of requests that no low rate helps. Variants serve the same
requests on the same machine, so slope, scatter of rounds and that share are one for all, learned from all rounds
together; each variant has a highest rate of its own. So rounds far from the highest rates say which variant holds more.

The posterior is summed on a grid, as H. H. Schuett et al. do it for psychometric curves (Vision Research 122 (2016)
105-123), and what a round feels by Gauss-Hermite quadrature. Rounds of a pair share their arrivals, which makes the
true interval of a ratio narrower, not wider. tests/unit/loadtest/statistics/test_attainment_curve.py simulates how
often intervals are right.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RATE_REACH: Final = 8.0
"""The rate may lie this many times above or below all that were measured."""
RATES: Final = 240
"""Points of the grid of rates: 3 % apart where the highest rate measured is ten times the lowest."""
SLOPES: Final = np.geomspace(2.0, 64.0, 9)
"""Logits by which attainment falls while the rate grows by e: between a load that hurts slowly and a cliff."""
LAPSES: Final = np.array([0.0, 0.2, 0.5, 0.8])
"""Requests that miss the SLOs at any rate, as a part of those that may."""
LAPSE_PRIOR: Final = 10.0
"""The prior of the lapse is Beta(1, 10), as that of Schuett et al."""
SCATTERS: Final = np.array([0.05, 0.1, 0.2, 0.4])
"""Standard deviations of the logarithm of the rate that a round feels, each as probable as the next before any round:
from a quiet machine of one's own to shared cores whose speed halves for minutes."""
NODES: Final = 9
"""Of the quadrature."""
DISTANCES: Final = np.linspace(-24.0, 48.0, 361)
"""Logits between a curve's highest rate and a round's at which the round's likelihood is tabulated."""
LEAST_LIKELIHOOD: Final = 1e-300
"""In place of 0, whose logarithm would exclude a curve for good."""
BISECTIONS: Final = 60
"""By which an interval of 120 logits is as narrow as a float can tell."""
LEVEL: Final = 0.95
DRAWS, SEED = 20_000, 1
"""With so many draws an end of an interval lies within half a percentile."""


class RoundCount(msgspec.Struct, frozen=True):
    """How many requests of a round met the SLOs, at which rate."""

    rate: float
    met: int
    total: int


class Band(msgspec.Struct, frozen=True):
    """The attainment of a variant at one rate, with its interval."""

    rate: float
    share: float
    low: float
    high: float


class MaxGoodputRate(msgspec.Struct, frozen=True):
    """The maximum goodput rate of one variant, and the interval that holds it.

    An end that no measured rate bounds is None: it is open. `rate` is None outside the measured rates. Below the low
    end no measured rate was missed, above the high end none was held.
    """

    outcome: Literal["found", "above", "below"]
    rate: float | None
    low: float | None
    high: float | None


def curves_of(found: Mapping[str, Sequence[RoundCount]], attainment: float) -> "dict[str, AttainmentCurve]":
    """Return the curve of each variant; the rounds of all say together what shape the curves have."""
    curves = {variant: AttainmentCurve(rounds, attainment) for variant, rounds in found.items()}
    evidence = {variant: curve.log_evidence for variant, curve in curves.items()}
    of_all = np.sum(list(evidence.values()), axis=0)
    for variant, curve in curves.items():
        curve.learn_shape(of_all - evidence[variant])
    return curves


class AttainmentCurve:
    """The posterior of one variant's curve. Needs one round at least."""

    def __init__(self, rounds: Sequence[RoundCount], attainment: float) -> None:
        self.lowest_rate, self.highest_rate = min(one.rate for one in rounds), max(one.rate for one in rounds)
        self._attainment, self._rounds = attainment, rounds
        span = math.log(self.lowest_rate / RATE_REACH), math.log(self.highest_rate * RATE_REACH)
        self._log_rates = np.linspace(*span, RATES)
        self._log_likelihood = np.zeros((len(SLOPES), len(SCATTERS), len(LAPSES), RATES))
        for one in rounds:
            self._log_likelihood += self._at(one.rate, _log_likelihoods(one.met, one.total, attainment))
        self._log_prior = (LAPSE_PRIOR - 1.0) * np.log1p(-LAPSES * (1.0 - attainment))
        self.learn_shape(np.zeros((len(SLOPES), len(SCATTERS), len(LAPSES))))

    @property
    def log_evidence(self) -> Floats:
        """The logarithm of the likelihood of all rounds, by slope, scatter and lapse."""
        return np.asarray(np.logaddexp.reduce(self._log_likelihood, axis=3))

    def learn_shape(self, log_evidence: Floats) -> None:
        """Take over the shape that the rounds of other variants show, by the logarithm of their likelihood."""
        log_posterior = self._log_likelihood + (log_evidence + self._log_prior)[..., None]
        self._posterior = np.exp(log_posterior - log_posterior.max())
        self._posterior /= self._posterior.sum()
        self._of_rate = self._posterior.sum(axis=(0, 1, 2))

    def _at(self, rate: float, table: Floats) -> Floats:
        """Look up a rate in a table whose last axis is the distance; that of the result is the highest rate."""
        distances = SLOPES[:, None] * (math.log(rate) - self._log_rates)
        nearest = np.rint((distances - DISTANCES[0]) / (DISTANCES[1] - DISTANCES[0])).astype(np.intp)
        # Three times as fast as take_along_axis, which makes an index of every axis.
        return np.stack([of_slope.take(at, axis=2, mode="clip") for of_slope, at in zip(table, nearest, strict=True)])

    def rate_quantile(self, level: float) -> float:
        """Return the rate below which the maximum goodput rate lies with this probability."""
        return math.exp(float(np.interp(level, self._of_rate.cumsum() - self._of_rate / 2, self._log_rates)))

    def draws(self, seed: int) -> Floats:
        """Return `DRAWS` maximum goodput rates, drawn from the posterior; the same ones for the same seed.

        Draws of curves that share their shape can be paired: the same places have the same shape.
        """
        source = np.random.default_rng((SEED, seed))
        step = self._log_rates[1] - self._log_rates[0]
        of_shape = self._posterior.reshape(-1, RATES)
        drawn = np.random.default_rng(SEED).multinomial(DRAWS, of_shape.sum(axis=1) / of_shape.sum())
        rates = [
            source.choice(self._log_rates, number, p=of_rate / of_rate.sum())
            for number, of_rate in zip(drawn, of_shape, strict=True)
            if number
        ]
        return np.asarray(np.exp(np.concatenate(rates) + step * source.uniform(-0.5, 0.5, DRAWS)))

    def max_goodput_rate(self) -> MaxGoodputRate:
        """Return the median with the interval of `LEVEL`, which no measured rate contradicts."""
        low, rate, high = (self.rate_quantile(level) for level in ((1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2))
        outcome: Literal["found", "above", "below"] = "found"
        if not self.lowest_rate <= rate <= self.highest_rate:
            outcome = "below" if rate < self.lowest_rate else "above"
        held, missed = self._held_and_missed()
        low, high = min([low, *missed]), max([high, *held])
        return MaxGoodputRate(
            outcome,
            rate if outcome == "found" else None,
            min(low, self.highest_rate) if low >= self.lowest_rate and held else None,
            max(high, self.lowest_rate) if high <= self.highest_rate and missed else None,
        )

    def _held_and_missed(self) -> tuple[list[float], list[float]]:
        """Return the measured rates at which all rounds together reached the attainment, and those where not."""
        at: dict[float, list[RoundCount]] = {}
        for one in self._rounds:
            at.setdefault(one.rate, []).append(one)
        held = [
            rate
            for rate, there in at.items()
            if sum(one.met for one in there) >= self._attainment * sum(one.total for one in there)
        ]
        return held, [rate for rate in at if rate not in held]

    def band(self, rate: float) -> Band:
        """Return the mean attainment at a rate over rounds, and the interval of `LEVEL` that holds it."""
        shares = self._at(rate, _mean_shares(self._attainment)).ravel()
        weights, order = self._posterior.ravel(), np.argsort(shares)
        low, high = np.interp(((1 - LEVEL) / 2, (1 + LEVEL) / 2), weights[order].cumsum(), shares[order])
        return Band(rate, float(shares @ weights), float(low), float(high))


@lru_cache(maxsize=8)
def _shares(attainment: float) -> tuple[Floats, Floats]:
    """Return the share of a round by its effect, slope, scatter, lapse and distance, and the weight of each effect.

    At distance 0 the mean over effects is `attainment`, whatever the scatter and the lapse.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    weights = weights / weights.sum()
    effects = nodes[:, None, None, None] * SLOPES[:, None, None] * SCATTERS[:, None]
    most = 1.0 - LAPSES * (1.0 - attainment)
    low = np.full((len(SLOPES), len(SCATTERS), len(LAPSES)), -60.0)
    high = -low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        is_low = most * np.tensordot(weights, _expit(middle + effects), axes=1) < attainment
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return most[:, None] * _expit((high + effects)[..., None] - DISTANCES), weights


def _expit(logits: Floats) -> Floats:
    return np.asarray(np.exp(-np.logaddexp(0.0, -logits)))


@lru_cache(maxsize=8)
def _mean_shares(attainment: float) -> Floats:
    shares, weights = _shares(attainment)
    return np.asarray(np.tensordot(weights, shares, axes=1))


@lru_cache(maxsize=8)
def _log_shares(attainment: float) -> tuple[Floats, Floats]:
    """Return the logarithms of the shares, and of what is left of 1."""
    shares = _shares(attainment)[0].clip(LEAST_LIKELIHOOD, 1.0 - np.finfo(float).eps)
    return np.log(shares), np.log1p(-shares)


@lru_cache(maxsize=256)  # 300 kB each
def _log_likelihoods(met: int, total: int, attainment: float) -> Floats:
    """Return the likelihood of a round's count; by slope, scatter, lapse and distance."""
    (logs, logs_of_rest), weights = _log_shares(attainment), _shares(attainment)[1]
    log_ways = math.lgamma(total + 1) - math.lgamma(met + 1) - math.lgamma(total - met + 1)
    of_effects = np.exp(log_ways + met * logs + (total - met) * logs_of_rest)
    return np.asarray(np.log(np.tensordot(weights, of_effects, axes=1) + LEAST_LIKELIHOOD))


GROWTH: Final = 1.5
"""Between rates until all maxima are bracketed. A smaller one takes more rounds, a larger one longer ones: at twice the
rate that is held, a round ends after twice the time."""
LOWER_PART: Final = 0.3
UPPER_PART: Final = 0.7
"""Of a posterior; at the maximum itself a round says least of the slope."""
PRECISION: Final = 0.2
"""A search ends when the upper end of every interval is at most this much above its lower end."""
LEAST_PAIRS: Final = 6
"""Fewer say too little of how rounds scatter."""
REACH: Final = 32.0
"""Rates are at most so many times above or below the first one."""


def next_rate(found: Mapping[str, Sequence[RoundCount]], start_rate: float, attainment: float) -> float | None:
    """Return the rate to measure next, upwards before downwards; None if all is known well enough.

    The first rates grow or fall by a factor of 1.5 until every variant's maximum lies between two of them. Later ones
    go where the widest interval is, once into its lower part and once into its upper. What ends a search are the widths
    of the intervals and never which variant is ahead, so looking after every pair makes no wrong answer more likely.
    """
    curves = curves_of(found, attainment)
    rates = {variant: curve.max_goodput_rate() for variant, curve in curves.items()}
    highest = max(curve.highest_rate for curve in curves.values())
    lowest = min(curve.lowest_rate for curve in curves.values())
    if any(one.outcome == "above" for one in rates.values()) and highest * GROWTH <= start_rate * REACH:
        return _three_digits(highest * GROWTH)
    if any(one.outcome == "below" for one in rates.values()) and lowest / GROWTH >= start_rate / REACH:
        return _three_digits(lowest / GROWTH)
    widths = {variant: _width(one) for variant, one in rates.items()}
    widest = max(widths, key=widths.__getitem__)
    is_settled = widths[widest] <= 1 + PRECISION and len(found[widest]) >= LEAST_PAIRS
    if is_settled or not widths[widest]:
        return None
    part = LOWER_PART if len(found[widest]) % 2 else UPPER_PART
    return _three_digits(min(highest * GROWTH, max(lowest / GROWTH, curves[widest].rate_quantile(part))))


def _width(found: MaxGoodputRate) -> float:
    """Return the ratio of an interval's ends; 0 for a rate that lies outside of what may be measured."""
    if found.outcome != "found":
        return 0.0
    return math.inf if found.low is None or found.high is None else found.high / found.low


def _three_digits(rate: float) -> float:
    return float(f"{rate:.3g}")
