"""The maximum goodput rate of each variant: which rates to measure, and the interval.

The rate is bracketed by doubling and halving, then bisected. All variants are measured at every rate, so rates are
paired.

The interval of the rate assumes no curve, only that attainment does not rise with the rate. Its ends are measured rates
that the score test tells apart from the share, with the scatter between rounds in place of the binomial one; an end
that no measured rate settles is open. tests/unit/loadtest/test_rate_search.py simulates how often it is right.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal

import msgspec

from ridgeline.loadtest.statistics.student import critical_t

LEVEL = 0.05
LEAST_SHARE_OF_SCATTER = 0.5
"""Rates at which a smaller share met the SLOs are far from any maximum, where rounds scatter differently."""
SUPPOSED_SCATTER, SUPPOSED_DEGREES = 2.0, 4
"""The scatter of rounds, relative to the binomial one, that is assumed at first, and its weight in rounds."""


PAIRS_AT_A_RATE = 3
LEAST_ROUNDS = 2
"""The fewest rounds at a rate that may be an end of an interval."""


class Round(msgspec.Struct, frozen=True):
    """How many requests of a round met the SLOs, at which rate."""

    rate: float
    met: int
    total: int


Measure = Callable[[float], Awaitable[Mapping[str, Round]]]
"""Runs one pair of rounds, one of each variant, at a rate."""


class Bounds(msgspec.Struct, frozen=True):
    """What ends a search."""

    attainment: float = 0.9
    precision: float = 0.1
    """The bracket's upper end is at most this much above its lower end."""
    pairs_at_a_rate: int = PAIRS_AT_A_RATE
    most_pairs: int = 36
    most_doublings: int = 5


class Band(msgspec.Struct, frozen=True):
    """The attainment of one variant at one rate, over all rounds there, with its interval."""

    rate: float
    rounds: int
    met: int
    total: int
    low: float
    high: float

    @property
    def share(self) -> float:
        """The share of requests that met the SLOs."""
        return self.met / self.total


class MaxGoodputRate(msgspec.Struct, frozen=True):
    """The maximum goodput rate of one variant, and the interval that holds it; an end that is None is open.

    `rate` is None unless a rate that holds the share and one that does not were both measured.
    """

    outcome: Literal["found", "above", "below"]
    rate: float | None
    low: float | None
    high: float | None


class Ratio(msgspec.Struct, frozen=True):
    """The ratio of two maximum rates with its interval; what is None is not known."""

    ratio: float | None
    low: float | None
    high: float | None

    @property
    def is_above_one(self) -> bool:
        """Whether all of the interval is above 1; an end of exactly 1 is a rate that one held and the other missed."""
        return self.low is not None and self.low >= 1

    @property
    def is_below_one(self) -> bool:
        """Whether all of the interval is below 1; as for an end of exactly 1, see above."""
        return self.high is not None and self.high <= 1


def least_requests(attainment: float) -> int:
    """Return the fewest requests of a round with which `PAIRS_AT_A_RATE` rounds can show that a rate is held.

    With fewer, the score interval of rounds in which all requests met the SLOs would still contain the share, so no
    interval of a maximum goodput rate could have a lower end.
    """
    widened = _widened(SUPPOSED_SCATTER, SUPPOSED_DEGREES)
    return math.floor(widened * attainment / (1.0 - attainment) / PAIRS_AT_A_RATE) + 1


async def search(
    measure: Measure, start_rate: float, bounds: Bounds, is_over: Callable[[], bool] = lambda: False
) -> dict[str, list[Round]]:
    """Measure rates until every variant's bracket is as narrow as asked for, or pairs or time are used up."""
    found: dict[str, list[Round]] = {}

    async def at(rate: float) -> None:
        for _ in range(bounds.pairs_at_a_rate):
            if is_over():
                return
            for variant, one in (await measure(rate)).items():
                found.setdefault(variant, []).append(one)

    rate: float | None = start_rate
    while rate is not None and not is_over() and _pairs(found) + bounds.pairs_at_a_rate <= bounds.most_pairs:
        await at(rate)
        rate = next_rate(found, start_rate, bounds)
    return found


def next_rate(found: Mapping[str, Sequence[Round]], start_rate: float, bounds: Bounds) -> float | None:
    """Return the rate to measure next: outwards without a bracket, then into the widest, then at open ends.

    Upwards comes before downwards, since rounds of as many requests are the shorter, the higher the rate.
    """
    brackets = [bracket(rounds, bounds.attainment) for rounds in found.values()]
    most, least = start_rate * 2**bounds.most_doublings, start_rate / 2**bounds.most_doublings
    for low, high in brackets:
        if high is None and low is not None and low * 2 <= most:
            return low * 2
    for low, high in brackets:
        if low is None and high is not None and high / 2 >= least:
            return high / 2
    widest, chosen = 1 + bounds.precision, None
    for low, high in brackets:
        if low is not None and high is not None and high / low > widest * (1 + 1e-9):
            widest, chosen = high / low, math.sqrt(low * high)
    return chosen or _open_end(found, bounds.attainment)


def _open_end(found: Mapping[str, Sequence[Round]], attainment: float) -> float | None:
    """Return the rate nearest to a variant's maximum at which more rounds should close an open end of its interval."""
    clear = (1 - attainment) / 2
    for rounds in found.values():
        got, shares = max_goodput_rate(rounds, attainment), _falling_shares(rounds)
        if got.outcome == "found" and got.low is None:
            return max((rate for rate, share in shares if share >= attainment + clear), default=shares[0][0])
        if got.outcome == "found" and got.high is None:
            return min((rate for rate, share in shares if share <= attainment - 2 * clear), default=shares[-1][0])
    return None


def bracket(rounds: Sequence[Round], attainment: float) -> tuple[float | None, float | None]:
    """Return neighbouring rates of which one holds the share and the next does not."""
    shares = _falling_shares(rounds)
    holding = sum(share >= attainment for _, share in shares)
    return (shares[holding - 1][0] if holding else None), (shares[holding][0] if holding < len(shares) else None)


def _falling_shares(rounds: Sequence[Round]) -> list[tuple[float, float]]:
    """Return each rate with its share; shares of neighbours that rise with the rate are pooled.

    M. Ayer et al., Annals of Mathematical Statistics 26 (1955) 641-647.
    """
    blocks: list[tuple[int, int, list[float]]] = []
    for rate, here in _by_rate(rounds).items():
        met, total, rates = sum(one.met for one in here), sum(one.total for one in here), [rate]
        while blocks and blocks[-1][0] * total < met * blocks[-1][1]:
            last = blocks.pop()
            met, total, rates = last[0] + met, last[1] + total, [*last[2], *rates]
        blocks.append((met, total, rates))
    return [(rate, met / total) for met, total, rates in blocks for rate in rates]


def bands(rounds: Sequence[Round]) -> list[Band]:
    """Return the attainment at each rate with its score interval, widened by the scatter between rounds."""
    scatter, degrees = _scatter(rounds)
    widened = _widened(scatter, degrees)
    found = []
    for rate, here in _by_rate(rounds).items():
        met, total = sum(one.met for one in here), sum(one.total for one in here)
        centre = (met + widened / 2) / (total + widened)
        half = math.sqrt(widened * (met * (total - met) / total + widened / 4)) / (total + widened)
        found.append(Band(rate, len(here), met, total, max(0.0, centre - half), min(1.0, centre + half)))
    return found


def max_goodput_rate(rounds: Sequence[Round], attainment: float) -> MaxGoodputRate:
    """Return the rate at which attainment falls to the share, and the rates between which it must do so.

    The lower end is the maximum goodput rate that exceeds the share by the score test, and the upper end the lowest
    that misses it. No curve is assumed, only that attainment does not rise with the rate: a rate whose share
    contradicts that of the rates beside it is no end, and neither is one with a single round, which may have been
    disturbed.
    """
    shares = dict(_falling_shares(rounds))
    told = [band for band in bands(rounds) if band.rounds >= LEAST_ROUNDS]
    above = [band.rate for band in told if band.low > attainment and shares[band.rate] >= attainment]
    below = [band.rate for band in told if band.high < attainment and shares[band.rate] < attainment]
    low, high = max(above, default=None), min(below, default=None)
    holds, fails = bracket(rounds, attainment)
    if holds is None:
        return MaxGoodputRate("below", None, low, high)
    if fails is None:
        return MaxGoodputRate("above", None, low, high)
    place = (shares[holds] - attainment) / (shares[holds] - shares[fails])
    return MaxGoodputRate("found", holds * (fails / holds) ** place, low, high)


def ratio_of(a: MaxGoodputRate, b: MaxGoodputRate) -> Ratio:
    """Return the rate of b / that of a; the interval joins both  as if they were independent.

    G. Y. Zou and A. Donner, Construction of confidence limits about effect measures, Statistics in Medicine 27 (2008)
    1693-1702. Rounds of a pair share their arrivals, which makes the true interval narrower, not wider.
    """
    if a.rate is None or b.rate is None:
        low = b.low / a.high if b.low is not None and a.high is not None else None
        high = b.high / a.low if b.high is not None and a.low is not None else None
        return Ratio(None, low, high)
    ratio = b.rate / a.rate
    down = _joined(b.rate, b.low, a.rate, a.high)
    up = _joined(b.rate, b.high, a.rate, a.low)
    return Ratio(ratio, None if down is None else ratio / down, None if up is None else ratio * up)


def _joined(one: float, one_end: float | None, other: float, other_end: float | None) -> float | None:
    if one_end is None or other_end is None:
        return None
    return math.exp(math.hypot(math.log(one_end / one), math.log(other_end / other)))


def _by_rate(rounds: Sequence[Round]) -> dict[float, list[Round]]:
    found: dict[float, list[Round]] = {rate: [] for rate in sorted({one.rate for one in rounds})}
    for one in rounds:
        found[one.rate].append(one)
    return found


def _widened(scatter: float, degrees: int) -> float:
    return critical_t(LEVEL, degrees) ** 2 * scatter


def _scatter(rounds: Sequence[Round]) -> tuple[float, int]:
    """Return how many times the binomial variance rounds at one rate scatter, and its degrees of freedom.

    Rates at which all requests met the SLOs, or few, say nothing of it. With few others it leans on what is assumed:
    SUPPOSED_SCATTER, with the weight of SUPPOSED_DEGREES.
    """
    squares, degrees = SUPPOSED_SCATTER * SUPPOSED_DEGREES, SUPPOSED_DEGREES
    for here in _by_rate(rounds).values():
        total = sum(one.total for one in here)
        share = sum(one.met for one in here) / total
        if LEAST_SHARE_OF_SCATTER < share < 1:
            squares += sum((one.met - one.total * share) ** 2 / (one.total * share * (1 - share)) for one in here)
            degrees += len(here) - 1
    return max(1.0, squares / degrees), degrees


def _pairs(found: Mapping[str, Sequence[Round]]) -> int:
    return max((len(rounds) for rounds in found.values()), default=0)
