"""The outcome of a comparison: better, equivalent, inconclusive or slo_unreachable.

Attainment, the share of requests that met every SLO, decides; latencies are secondary and corrected for being
several. The interval that decides is never narrower than the score interval of the requests taken as independent, since
pairs that all agree leave the t interval no width. A difference is called one only if the exact test agrees too, so a
single wild pair of few cannot make it. Equivalence is an interval inside the margin, at the level of the look, which is
stricter than two one-sided tests (D. J. Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15 (1987)
657-680).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import msgspec

from ridgeline.loadtest.statistics.looks import ALPHA, LEAST_PAIRS, levels
from ridgeline.loadtest.statistics.paired_tests import Estimate, estimate, holm
from ridgeline.loadtest.statistics.pairs import LATENCIES, Latency, PairDifference
from ridgeline.loadtest.statistics.proportions import PairedCounts, paired_score_interval, wilson_interval
from ridgeline.loadtest.statistics.student import student_isf

Outcome = Literal["better", "equivalent", "inconclusive", "slo_unreachable"]
Side = Literal["a", "b", "c", "d"]
"""A variant; only a search for rates has more than two."""
POWER = 0.8
MOST_PAIRS = 1_000
REACHED_SHARE = 0.05
"""If neither variant meets the SLOs for this share of requests, the SLOs are out of reach at this load."""


class Secondary(msgspec.Struct, frozen=True):
    """A latency over all pairs: the log ratio of b to a, and whether it differs once corrected for several tests."""

    estimate: Estimate
    p_holm: float
    differs: bool
    is_equivalent: bool


class Conclusion(msgspec.Struct, frozen=True):
    """What the pairs so far say. Differences are b - a in shares; intervals have the level of this look."""

    outcome: Outcome
    better: Side | None
    """The variant that is better; None unless the outcome is `better`."""
    pairs: int
    looks: tuple[int, ...]
    """The numbers of pairs at which the result was looked at, this one included."""
    level: float
    """The error that the intervals of this look have on both sides together."""
    margin: float
    counts: PairedCounts
    attainment_a: float
    attainment_b: float
    attainment_interval_a: tuple[float, float]
    attainment_interval_b: tuple[float, float]
    """Wilson's intervals at 95 %, of requests as if they were independent."""
    attainment: Estimate | None
    """The difference over pairs, its interval widened to the score interval; None for one pair."""
    smallest_seen: float | None
    """The difference that this many pairs of this scatter show in 80 of 100 comparisons."""
    pairs_for_margin: int | None
    """Pairs of this scatter that would show a difference as large as the margin in 80 of 100 comparisons."""
    goodput: Estimate | None
    """The log ratio of goodput over pairs; attainment in another unit, so it decides nothing."""
    secondary: dict[Latency, Secondary]

    @property
    def is_settled(self) -> bool:
        """Whether more pairs cannot change the outcome."""
        return self.outcome != "inconclusive"


def conclude(pairs: Sequence[PairDifference], looks: tuple[int, ...], most_pairs: int, margin: float) -> Conclusion:
    """Judge the pairs at the last of `looks`, out of at most `most_pairs`. Raises ValueError without a pair.

    With fewer than six pairs nothing is ever found better or equivalent.
    """
    if not pairs:
        raise ValueError("without a pair there is nothing to judge")
    level = levels(looks, most_pairs)[-1] if looks[-1] >= LEAST_PAIRS else ALPHA
    counts = sum((pair.counts for pair in pairs), PairedCounts())
    met_a, met_b, total = counts.both + counts.only_a, counts.both + counts.only_b, counts.total
    scatter = None
    attainment = estimate([pair.attainment for pair in pairs], level)
    if attainment is not None:
        low, high = paired_score_interval(counts, level)
        # What requests would scatter if they were independent, as a standard deviation between pairs.
        of_requests = (high - low) / 2 * math.sqrt(len(pairs)) / NormalDist().inv_cdf(1 - level / 2)
        scatter = max(attainment.sd, of_requests)
        attainment = msgspec.structs.replace(attainment, low=min(attainment.low, low), high=max(attainment.high, high))
    outcome, better = _outcome(attainment, max(met_a, met_b) / total, margin)
    goodput = [pair.goodput for pair in pairs if pair.goodput is not None]
    return Conclusion(
        outcome=outcome,
        better=better,
        pairs=len(pairs),
        looks=looks,
        level=level,
        margin=margin,
        counts=counts,
        attainment_a=met_a / total,
        attainment_b=met_b / total,
        attainment_interval_a=wilson_interval(met_a, total, ALPHA),
        attainment_interval_b=wilson_interval(met_b, total, ALPHA),
        attainment=attainment,
        smallest_seen=None if scatter is None else smallest_seen(scatter, len(pairs), level),
        pairs_for_margin=None if scatter is None else pairs_to_see(margin, scatter),
        goodput=estimate(goodput, level) if len(goodput) == len(pairs) else None,
        secondary=_secondary(pairs, level, math.log1p(margin)),
    )


def smallest_seen(scatter: float, pairs: int, level: float) -> float:
    """Return the difference found with 80 % power: (t of the level + t of the power) x scatter / sqrt(pairs).

    S. A. Julious, Sample sizes for clinical trials with Normal data, Statistics in Medicine 23 (2004) 1921-1986.
    """
    return float(student_isf(level / 2, pairs - 1) + student_isf(1 - POWER, pairs - 1)) * scatter / math.sqrt(pairs)


def pairs_to_see(difference: float, scatter: float) -> int | None:
    """Return the least number of pairs, judged once, that shows the difference with 80 % power; None above 1,000."""
    normal = NormalDist()
    # The normal distribution's number is a little too small, since its tails are thinner than t's.
    quantiles = normal.inv_cdf(1 - ALPHA / 2) + normal.inv_cdf(POWER)
    pairs = max(LEAST_PAIRS, math.ceil((quantiles * scatter / difference) ** 2))
    while pairs <= MOST_PAIRS and smallest_seen(scatter, pairs, ALPHA) > difference:
        pairs += 1
    return pairs if pairs <= MOST_PAIRS else None


def _outcome(attainment: Estimate | None, best_share: float, margin: float) -> tuple[Outcome, Side | None]:
    """Decide; where hardly a request met the SLOs in either variant, "equivalent" would be true and say nothing."""
    enough = attainment is not None and attainment.pairs >= LEAST_PAIRS
    if attainment is not None and enough and attainment.excludes_zero and _agrees(attainment):
        return "better", "b" if attainment.mean > 0 else "a"
    if best_share < REACHED_SHARE and (enough or not best_share):
        return "slo_unreachable", None
    if attainment is not None and enough and attainment.is_within(margin):
        return "equivalent", None
    return "inconclusive", None


def _agrees(found: Estimate) -> bool:
    return found.p_sign_flip is None or found.p_sign_flip <= ALPHA


def _secondary(pairs: Sequence[PairDifference], level: float, margin: float) -> dict[Latency, Secondary]:
    found: dict[Latency, Estimate] = {}
    for name in LATENCIES:
        values = [pair.latencies[name] for pair in pairs if name in pair.latencies]
        if len(values) == len(pairs) and (one := estimate(values, level)) is not None:
            found[name] = one
    corrected = holm({name: one.p_t for name, one in found.items()})
    return {
        name: Secondary(
            estimate=one,
            p_holm=corrected[name],
            differs=one.pairs >= LEAST_PAIRS and corrected[name] <= level and _agrees(one),
            is_equivalent=one.pairs >= LEAST_PAIRS and one.is_within(margin),
        )
        for name, one in found.items()
    }
