"""Chooses the next rate at which all variants are measured, to find the maximum goodput rate of each.

The first rates grow or fall by a factor of 1.5 until every variant's maximum lies between two of them. Later ones go
where the widest interval is, once into its lower part and once into its upper. What ends a search are the widths of the
intervals and never which variant is ahead, so looking after every pair makes no wrong answer more likely.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from ridgeline.loadtest.statistics.attainment_curve import MaxGoodputRate, RoundCount, curves_of

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
    """Return the rate to measure next, upwards before downwards; None if all is known well enough."""
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
