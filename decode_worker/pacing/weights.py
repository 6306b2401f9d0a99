"""Least squares with weights that are not negative, from sums of squares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def non_negative(gram: Array, moments: Array) -> Array:
    """Return the w >= 0 with the least w'Gw / 2 - m'w (Lawson and Hanson); G must be positive definite."""
    everything = np.linalg.solve(gram, moments).astype(np.float64, copy=False)
    if np.all(everything >= 0.0):  # nearly always, and five times as fast
        return everything
    size = len(moments)
    weights = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    tolerance = 1e-12 * float(np.abs(moments).max())
    for _ in range(3 * size):
        gradient = np.where(free, -np.inf, moments - gram @ weights)
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        weights = _within(gram, moments, weights, free)
    return weights


def _within(gram: Array, moments: Array, weights: Array, free: NDArray[np.bool_]) -> Array:
    """Return the best weights with only `free` above 0; takes those out of `free` that would become negative."""
    while True:
        trial = np.zeros(len(moments))
        trial[free] = np.linalg.solve(gram[np.ix_(free, free)], moments[free])
        blocked = free & (trial <= 0.0)
        if not blocked.any():
            return trial
        room = weights[blocked] / np.maximum(weights[blocked] - trial[blocked], 1e-300)
        weights = weights + float(room.min()) * (trial - weights)
        stuck = blocked & (weights <= 1e-12 * max(1e-300, float(weights.max())))
        if not stuck.any():
            stuck = blocked
        weights[stuck] = 0.0
        free &= ~stuck
        if not free.any():
            return weights
