"""What prompts took over what was predicted, so that a prediction that errs one way does not go on erring.

A prediction is of a kind: a worker, and whether it decodes when the prompt comes. Beside what decodes, prompts are
computed in chunks that limits shorten; what such a chunk costs is the least well known of all. What passes outside of
the engine, before and after, is added: messages, threads, the end of a step that runs. It depends neither on the prompt
nor, but for that step, on the worker. No clock of its own.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Set
from itertools import accumulate
from statistics import median
from typing import Final

import msgspec

LATEST: Final = 16
"""The latest prompts of a kind that count, as many as steps of a size count in `ridgeline.decode_worker.pacing.model`.
Their median does, so that a few that something else held up change nothing: by what was predicted, of which one prompt
has at most half as much as all others. So many short ones change little, and a single long one nothing."""
LEAST: Final = 3
"""Fewer prompts correct nothing: the median of three is the first that one which was held up cannot move alone."""
DOUBT: Final = 2.0
"""Prompts' worth of doubt that a kind needs a correction at all, as in `ridgeline.decode_worker.pacing.model`."""
FADES_S: Final = 60.0
"""A kind without news for so long is predicted as it was at first, or it would never be tried again."""
MOST: Final = 4.0
"""The most by which a prediction is made longer: nearly twice what was ever measured (2.4), so that nothing that goes
wrong once makes a worker unusable. None is made shorter: to expect too much makes requests late, and to expect too
little only has them go elsewhere."""


class _Kind(msgspec.Struct):
    """The latest prompts of one kind, and what follows from them."""

    ratio: float = 1.0
    at_s: float = 0.0
    latest: deque[tuple[float, float, float]] = msgspec.field(default_factory=lambda: deque(maxlen=LATEST))
    """Of each, what it took over what was predicted, what was predicted, and when."""


class _Outside:
    """The latest seconds outside of engines; their median counts."""

    def __init__(self) -> None:
        self.median_s = 0.0
        self.fresh_until_s = -math.inf
        self._latest: deque[float] = deque(maxlen=LATEST)

    def add(self, took_s: float, now_s: float) -> None:
        self._latest.append(took_s)
        if len(self._latest) >= LEAST:
            self.median_s, self.fresh_until_s = median(self._latest), now_s + FADES_S


class Corrections:
    """The corrections of all kinds; `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._outside = (_Outside(), _Outside())
        """For prompts that came where nothing decoded, and for the others, whichever worker it was."""
        self._kinds: dict[str, tuple[_Kind, _Kind]] = {}
        """Of each worker, the prompts that came while nothing decoded there, and the others."""

    def add(self, worker_id: str, *, beside: bool, predicted_s: float, took_s: float) -> None:
        """Learn from a prompt that took this long, of which this much was predicted before any correction."""
        if predicted_s <= 0.0:
            return
        kind, now_s = self._kinds.setdefault(worker_id, (_Kind(), _Kind()))[beside], self._clock()
        while kind.latest and now_s - kind.latest[0][2] >= FADES_S:
            kind.latest.popleft()
        kind.latest.append((took_s / predicted_s, predicted_s, now_s))
        number = len(kind.latest)
        middle = _middle(kind.latest) if number >= LEAST else 1.0
        kind.ratio = min(MOST, max(1.0, 1.0 + (middle - 1.0) * number / (number + DOUBT)))
        kind.at_s = now_s

    def ratio(self, worker_id: str, *, beside: bool) -> float:
        """Return by what to multiply the predicted time of a prompt of this kind."""
        kinds = self._kinds.get(worker_id)
        if kinds is None:
            return 1.0
        kind = kinds[beside]
        left = 1.0 - (self._clock() - kind.at_s) / FADES_S
        return 1.0 + (kind.ratio - 1.0) * left if left > 0.0 else 1.0

    def add_outside(self, *, beside: bool, took_s: float) -> None:
        """Learn for how long a prompt and its first token were on their way, before the engine had it and after."""
        self._outside[beside].add(took_s, self._clock())

    def outside_s(self, *, beside: bool) -> float:
        """Return the seconds that pass outside of the engine; without news of this kind, those of the newer one."""
        own, other = self._outside[beside], self._outside[not beside]
        return (own if own.fresh_until_s >= min(self._clock(), other.fresh_until_s) else other).median_s

    @property
    def workers(self) -> int:
        """Number of workers of which anything is known."""
        return len(self._kinds)

    def forget_all_but(self, worker_ids: Set[str]) -> None:
        """Forget workers that have left."""
        for worker_id in self._kinds.keys() - worker_ids:
            del self._kinds[worker_id]


def _middle(latest: Collection[tuple[float, float, float]]) -> float:
    """Return the ratio below and above which half of the predicted seconds are.

    A prompt counts at most half as many as all others together, so that a long one is not the median alone.
    """
    by_ratio = sorted(latest)
    all_s = sum(predicted_s for _, predicted_s, _ in by_ratio)
    below_s = [*accumulate(min(predicted_s, (all_s - predicted_s) / 2) for _, predicted_s, _ in by_ratio)]
    return by_ratio[bisect_left(below_s, below_s[-1] / 2)][0]
