"""Bootstrap intervals: how far a figure would move if other requests had been drawn.

Called by `loadtest.report.summary` and `loadtest.report.verdict`.

Requests are resampled with replacement by a seeded generator, so the same records give the same interval.
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
    """Interval of `statistic`, a function along the last axis; absent without values."""
    if not values:
        return None
    data = np.asarray(values, dtype=np.float64)
    picks = _picks(len(data), seed)
    return _ends(statistic(data[picks]))


def mean_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Interval of the mean."""
    return interval(values, lambda sample: np.mean(sample, axis=-1), seed)


def median_interval(values: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Interval of the median."""
    return interval(values, lambda sample: np.median(sample, axis=-1), seed)


def paired_ratio_interval(
    above: Sequence[float],
    below: Sequence[float],
    statistic: Callable[[Floats], Floats],
    seed: int = 0,
) -> tuple[float, float] | None:
    """Interval of statistic(above) / statistic(below), where position i of both is the same request in the two modes.

    Resamples where both are 0 count as 1, and where only `below` is 0 as infinity.
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
    # "nearest" takes a sample as it is: interpolating towards infinity would give nothing useful.
    low, high = np.quantile(samples, [tail, 1 - tail], method="nearest")
    return float(low), float(high)
