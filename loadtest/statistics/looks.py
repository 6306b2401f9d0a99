"""After how many pairs one looks at the result, and the error that each look may spend.

Whoever looks four times at 5 % is wrong far more often than 5 %. K. K. G. Lan and D. L. DeMets, Discrete sequential
boundaries for clinical trials, Biometrika 70 (1983) 659-663, spread the 5 % over the looks by a function of how much
has been seen, here the one that resembles Pocock's limits. The levels follow from a recursive integration of the normal
score over what was not stopped (Armitage, McPherson and Rowe, Journal of the Royal Statistical Society A 132 (1969)
235-244) and are used with the t distribution (Jennison and Turnbull, Group Sequential Methods (2000), section 4.4).
"""

import math
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

ALPHA = 0.05
LEAST_PAIRS = 6
"""Fewer pairs cannot reach 5 % in the exact test, whatever they show."""
LOOKS = (6, 9, 12, 16)
GRID = 801
HALVINGS = 50
Floats = npt.NDArray[np.float64]
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def looks_until(most_pairs: int) -> tuple[int, ...]:
    """Return the looks of a comparison of at most this many pairs; the last pair is always one."""
    return (*(look for look in LOOKS if look < most_pairs), most_pairs)


def spent(share: float) -> float:
    """Return the error spent when this share of all pairs was seen: alpha ln(1 + (e - 1) share)."""
    return ALPHA * math.log1p((math.e - 1) * min(1.0, share))


@cache
def levels(looks: tuple[int, ...], most_pairs: int) -> tuple[float, ...]:
    """Return the two-sided level of each look, so that all together err in at most 5 % of comparisons."""
    normal = NormalDist()
    found: list[float] = []
    density = points = np.zeros(0)
    before = 0
    for look in looks:
        spend = spent(look / most_pairs) - spent(before / most_pairs)
        limit = _limit(points, density, look, look - before, spend) if before else normal.inv_cdf(1 - spend / 2)
        found.append(2 * (1 - normal.cdf(limit)))
        edge = limit * math.sqrt(look)
        grid = np.linspace(-edge, edge, GRID)
        if before:
            density = _normal_density(grid[:, None] - points[None, :], look - before) @ (density * _weights(points))
        else:
            density = _normal_density(grid, look)
        points, before = grid, look
    return tuple(found)


def _limit(points: Floats, density: Floats, look: int, step: int, spend: float) -> float:
    """Return the limit that the score crosses at this look, and not before, with probability `spend`."""
    mass = density * _weights(points)
    low, high = 0.0, 10.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        edge = middle * math.sqrt(look)
        beyond = (_erfc((edge - points) / math.sqrt(2 * step)) + _erfc((edge + points) / math.sqrt(2 * step))) / 2
        low, high = (middle, high) if float(mass @ beyond) > spend else (low, middle)
    return high


def _normal_density(values: Floats, variance: int) -> Floats:
    return np.asarray(np.exp(-values * values / (2 * variance)) / math.sqrt(2 * math.pi * variance))


def _weights(points: Floats) -> Floats:
    """Return the trapezoidal rule's weights on an even grid."""
    weights = np.full(len(points), points[1] - points[0])
    weights[[0, -1]] /= 2
    return weights
