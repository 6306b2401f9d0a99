"""The score interval of the difference of two shares of the same requests.

Method 10 of R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on
paired data, Statistics in Medicine 17 (1998) 2635-2650: E. B. Wilson's score interval of each share, joined by the
correlation of the pairs. Unlike a bootstrap it has a width where all requests agree.
"""

import math
from statistics import NormalDist

import msgspec


class PairedCounts(msgspec.Struct, frozen=True):
    """Requests that met the SLOs in both variants, in one only, or in neither."""

    both: int = 0
    only_a: int = 0
    only_b: int = 0
    neither: int = 0

    @property
    def total(self) -> int:
        """All requests."""
        return self.both + self.only_a + self.only_b + self.neither

    def __add__(self, other: "PairedCounts") -> "PairedCounts":
        return PairedCounts(
            self.both + other.both,
            self.only_a + other.only_a,
            self.only_b + other.only_b,
            self.neither + other.neither,
        )


def wilson_interval(met: int, total: int, level: float) -> tuple[float, float]:
    """Return Wilson's score interval of a share (Journal of the American Statistical Association 22, 1927)."""
    z = NormalDist().inv_cdf(1 - level / 2)
    centre = (met + z * z / 2) / (total + z * z)
    half = z / (total + z * z) * math.sqrt(met * (total - met) / total + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_score_interval(counts: PairedCounts, level: float) -> tuple[float, float]:
    """Return the interval of share b minus share a, with an error of `level` on both sides together."""
    total = counts.total
    met_a, met_b = counts.both + counts.only_a, counts.both + counts.only_b
    share_a, share_b = met_a / total, met_b / total
    (low_a, high_a), (low_b, high_b) = wilson_interval(met_a, total, level), wilson_interval(met_b, total, level)
    phi = _correlation(counts)

    def joined(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))

    difference = share_b - share_a
    return (
        difference - joined(share_b - low_b, high_a - share_a),
        difference + joined(high_b - share_b, share_a - low_a),
    )


def _correlation(counts: PairedCounts) -> float:
    """Return Newcombe's phi, corrected for continuity; 0 where a margin is empty."""
    met_a, met_b, total = counts.both + counts.only_a, counts.both + counts.only_b, counts.total
    margins = met_a * (total - met_a) * met_b * (total - met_b)
    if not margins:
        return 0.0
    product = counts.both * counts.neither - counts.only_a * counts.only_b
    corrected = max(product - total / 2, 0.0) if product > 0 else product
    return corrected / math.sqrt(margins)
