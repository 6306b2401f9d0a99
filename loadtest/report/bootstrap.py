"""Bootstrap intervals: how much a figure would vary if other requests had been drawn.

Called by `loadtest.report.summary` and `loadtest.report.verdict`.

Requests are resampled with replacement by a seeded generator, so equal records give equal intervals.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
CONFIDENCE = 0.95
Floats = npt.NDArray[np.float64]


def interval(
    values: Sequence[float], statistic: Callable[[Floats], Floats], seed: int = 0
) -> tuple[float, float] | None:
    """Return the interval of `statistic`, a function along the last axis; None without values."""
    if not values:
        return None
    data = np.asarray(values, dtype=np.float64)
    picks = _picks(len(data), seed)
    return _ends(statistic(data[picks]))


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Return the interval of the mean; None without values."""
    return interval(values, lambda sample: np.mean(sample, axis=-1), seed)


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Return the interval of the median; None without values."""
    return interval(values, lambda sample: np.median(sample, axis=-1), seed)


def paired_ratio_interval(
    above: Sequence[float],
    below: Sequence[float],
    statistic: Callable[[Floats], Floats],
    seed: int = 0,
) -> tuple[float, float] | None:
    """Return the interval of statistic(above) / statistic(below); position i is the same request in both modes.

    Resamples in which both are 0 count as 1, and those in which only `below` is 0 as infinity. None without values.
    """
    if not above:
        return None
    picks = _picks(len(above), seed)
    tops = statistic(np.asarray(above, dtype=np.float64)[picks])
    bottoms = statistic(np.asarray(below, dtype=np.float64)[picks])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = tops / bottoms
    ratios[(tops == 0) & (bottoms == 0)] = 1.0
    return _ends(ratios)


def _picks(count: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, count, size=(RESAMPLES, count))


def _ends(samples: Floats) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    # "nearest" uses a sample as it is: interpolating towards infinity would give no useful number.
    low, high = np.quantile(samples, [tail, 1 - tail], method="nearest")
    return float(low), float(high)
