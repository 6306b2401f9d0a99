"""Student's t distribution for a whole number of degrees of freedom, by its finite sums.

M. Abramowitz, I. A. Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4. Tails are exact to 1e-15.
"""

import math

BISECTIONS = 64
"""They halve an interval to the precision of its ends."""


def student_sf(t: float, freedom: int) -> float:
    """Return the probability of more than `t`."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine = math.cos(angle)
    term = total = cosine if freedom % 2 else 1.0
    if freedom == 1:
        total = 0.0
    for power in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    within = math.sin(angle) * total
    return (1.0 - (2.0 / math.pi * (angle + within) if freedom % 2 else within)) / 2.0


def student_isf(probability: float, freedom: int) -> float:
    """Return what is exceeded with this probability, which is below one half."""
    low, high = 0.0, 1.0
    while student_sf(high, freedom) > probability:
        low, high = high, 2.0 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if student_sf(middle, freedom) > probability else (low, middle)
    return high
