"""Student's t distribution for whole degrees of freedom.

The closed forms 26.7.3 and 26.7.4 of Abramowitz and Stegun, Handbook of Mathematical Functions (1964), are exact. With
at most some dozens of pairs they make a library for one function unnecessary.
"""

import math
from functools import cache
from statistics import NormalDist

NEAR = 1e-14
"""The step, relative to the value, below which a quantile is found."""


def two_sided_p(t: float, degrees: int) -> float:
    """Return the probability that |T| is at least `t`. Raises ValueError below one degree of freedom."""
    if degrees < 1:
        raise ValueError(f"the t distribution needs one degree of freedom or more, not {degrees}")
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1 - within)


@cache
def critical_t(level: float, degrees: int) -> float:
    """Return the t that |T| exceeds with probability `level`, between 0 and 1.

    The probability falls ever more slowly as t grows, so Newton's steps from the normal distribution's limit, which is
    smaller, approach it from below.
    """
    limit = NormalDist().inv_cdf(1 - level / 2)
    while (step := (two_sided_p(limit, degrees) - level) / (2 * _density(limit, degrees))) > NEAR * limit:
        limit += step
    return limit


def _density(t: float, degrees: int) -> float:
    """Return the density of T at `t`."""
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    return math.exp(log_scale - (degrees + 1) / 2 * math.log1p(t * t / degrees))
