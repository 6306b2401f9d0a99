"""Tests over pairs of rounds, each pair one number.

Requests of a round share a server, a moment and a queue, so they are no independent units; rounds are.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.loadtest.statistics.student import student_isf, student_sf

MOST_EXACT_PAIRS = 24
"""With more pairs the exact test is left out, since the t test is then as good."""


class Estimate(msgspec.Struct, frozen=True):
    """The mean over pairs with its interval at the level of the look; on a log scale for ratios."""

    pairs: int
    mean: float
    low: float
    high: float
    sd: float
    """Standard deviation between pairs."""
    p_t: float
    p_sign_flip: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low > 0 or self.high < 0

    def is_within(self, margin: float) -> bool:
        """Return whether the whole interval is closer to 0 than `margin`."""
        return -margin < self.low and self.high < margin


def estimate(differences: Sequence[float], level: float) -> Estimate | None:
    """Return Student's t interval of the mean and both tests of 0; None for fewer than two pairs.

    Student, The probable error of a mean, Biometrika 6 (1908) 1-25, for paired differences.
    """
    pairs = len(differences)
    if pairs < 2:
        return None
    mean = math.fsum(differences) / pairs
    sd = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (pairs - 1))
    error = sd / math.sqrt(pairs)
    half = student_isf(level / 2, pairs - 1) * error
    t = mean / error if error else math.inf if mean else 0.0
    return Estimate(
        pairs=pairs,
        mean=mean,
        low=mean - half,
        high=mean + half,
        sd=sd,
        p_t=2 * student_sf(abs(t), pairs - 1),
        p_sign_flip=sign_flip_p(differences) if pairs <= MOST_EXACT_PAIRS else None,
    )


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the share of sign patterns whose sum is at least as far from 0 as the one that was seen.

    Exact if both orders of a pair were equally likely, whatever the distribution: R. A. Fisher, The Design of
    Experiments (1935), section 21. The least that K pairs can give is 2 / 2**K, 0.031 for six.
    """
    middle = len(differences) // 2
    ones, others = _signed_sums(differences[:middle]), np.sort(_signed_sums(differences[middle:]))
    tolerance = 1e-9 * math.fsum(abs(difference) for difference in differences)
    least = abs(math.fsum(differences)) - tolerance
    if least <= 0:
        return 1.0
    beyond = len(ones) * len(others) - int(np.searchsorted(others, least - ones).sum())
    return 2 * beyond / (len(ones) * len(others))


def _signed_sums(differences: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the sum of each sign pattern. Two halves are summed apart, since 2**16 sums for each test take long."""
    return np.asarray(_patterns(len(differences)) @ np.asarray(differences, dtype=np.float64))


@cache
def _patterns(count: int) -> npt.NDArray[np.float64]:
    """Return all patterns of so many signs, one a row."""
    return np.asarray(1.0 - 2.0 * (np.arange(2**count)[:, None] >> np.arange(count) & 1), dtype=np.float64)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p values corrected for how many there are.

    S. Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979) 65-70.
    """
    corrected: dict[str, float] = {}
    least = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - rank) * p))
        corrected[name] = least
    return corrected
