"""Fits how long a step takes to the steps that the engine has run. Pure: knows neither vLLM nor a clock.

What it returns travels to the router in `WorkerStatus`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ridgeline.contracts.workers import MIN_FITTED_STEPS, StepModel

Array = NDArray[np.float64]
KEPT: Final = 0.99
"""What an older step counts for, relative to the next one of its kind: the latest hundred count."""
REFIT_STEPS: Final = 8
PULL: Final = 1e-4
"""Weight of the previous fit beside that of all steps: where these say nothing, it stays."""
PRIOR_TOKENS: Final = 32
"""As long as no prompt has been computed, this many of its tokens are taken to double the shortest step."""
TOLERATED: Final = 0.1
"""A step whose time is further than this from the predicted one, and than usual, counts for less."""
ABSURD: Final = math.log(2.0)
"""A step of more than twice the predicted time, or less than half, does not count..."""
BELIEVED: Final = 4
"""...until this many of its size in a row have been like that."""
KNOWN: Final = 8
"""Steps of one size after which another one of that size can be told to be disturbed."""
RING: Final = 16
"""The latest steps of each size; their median against the line is its correction."""
DOUBT: Final = 2.0
"""Steps' worth of doubt that a size needs a correction at all."""
GROWN: Final = 2.0
"""A step that reads at most so many times the context of any before, or attends to as much more, is like those: its
predicted time is wrong by this factor at the most, and `ridgeline.engine.stall` allows for three."""
ERRORS: Final = 64
BUCKETS: Final = 24
FEATURES: Final = 5


@dataclass(frozen=True)
class StepLoad:
    """What one step computes: the P, S, C and A of `StepModel`."""

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    attended: float

    @property
    def bucket(self) -> int:
        """The index of its correction."""
        return min(BUCKETS - 1, (self.prefill_tokens + self.decode_tokens).bit_length())

    @property
    def kind(self) -> int:
        """0: decode alone, 1: decode and prompts, 2: prompts alone."""
        return 0 if not self.prefill_tokens else 1 if self.decode_tokens else 2


@dataclass
class _Kind:
    """Decayed sums over the steps of one kind.

    Each kind forgets by its own steps: hours of decode alone do not make it forget what a prompt costs, and kinds count
    alike however often they occur.
    """

    gram: Array = field(default_factory=lambda: np.zeros((FEATURES, FEATURES)))
    moments: Array = field(default_factory=lambda: np.zeros(FEATURES))

    def add(self, row: Array, weight: float) -> None:
        """Add a step; `row` holds its features divided by its time, so that errors are relative."""
        self.gram *= KEPT
        self.gram += weight * np.multiply.outer(row, row)
        self.moments *= KEPT
        self.moments += weight * row


@dataclass
class _Size:
    """What is known of the steps of one size, all whose tokens have the same bit_length."""

    seen: int = 0
    surprises: int = 0
    """The latest ones, all on one side."""
    side: bool = False

    def surprised(self, *, slow: bool) -> bool:
        """Note a step far from what was predicted; return whether it is to be believed."""
        self.surprises = self.surprises + 1 if slow == self.side else 1
        self.side = slow
        return self.surprises >= BELIEVED or self.seen < KNOWN


class StepFit:
    """A `StepModel` that follows the engine. `observe` takes about 30 us on average; a test measures it."""

    def __init__(self) -> None:
        self.model = StepModel(
            base_s=0.0,
            per_prefill_token_s=0.0,
            per_sequence_s=0.0,
            per_context_token_s=0.0,
            per_attended_token_s=0.0,
        )
        self.longest_prefill_tokens = 0
        """The most prompt tokens that a step had; beyond, the model is a guess."""
        self._most_decode_tokens = 0
        self._most_context_tokens = 0
        self._most_attended = 0.0
        self._line = np.zeros(FEATURES)
        self._kinds = (_Kind(), _Kind(), _Kind())
        self._sizes = [_Size() for _ in range(BUCKETS)]
        self._rows = np.zeros((BUCKETS, RING, FEATURES))
        """The latest steps of each size, as `_Kind.add` takes them; zeros are none."""
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._steps = 0
        self._steps_without_prompts = 0
        self._median_error = 0.0
        self._speculated = np.zeros(3)
        """Decayed sums over sequences and steps: how many, the tokens computed, the tokens made."""

    @property
    def known(self) -> bool:
        """Whether the model may be used."""
        return self.model.steps >= MIN_FITTED_STEPS

    def predict_s(self, load: StepLoad) -> float:
        """Return how long such a step is expected to take; 0 before the first one."""
        return self.model.step_s(load.prefill_tokens, load.decode_tokens, load.context_tokens, load.attended)

    def foretell_s(self, load: StepLoad) -> float:
        """Return how long such a step is expected to take; infinite if too few like it have been measured to know.

        A first step of its size may compile something. One with a longer context may take any time, as may the first
        with a prompt, or with a sequence that decodes: none before had such a context.
        """
        like_others = (
            load.context_tokens <= GROWN * self._most_context_tokens and load.attended <= GROWN * self._most_attended
        )
        if self.known and like_others and self._sizes[load.bucket].seen >= KNOWN:
            return self.predict_s(load)
        return math.inf

    def observe(self, load: StepLoad, took_s: float) -> None:
        """Learn from a step that took this long."""
        if took_s <= 0.0:
            return
        features = np.array((1.0, load.prefill_tokens, load.decode_tokens, load.context_tokens, load.attended))
        if not self._steps:
            self._begin(load, took_s)
        weight = self._weight(load, took_s)
        self._steps += 1
        if weight:
            row = features / took_s
            self._kinds[load.kind].add(row, weight)
            size = self._sizes[load.bucket]
            self._rows[load.bucket, size.seen % RING] = row
            size.seen += 1
            self._steps_without_prompts += not load.prefill_tokens
            self.longest_prefill_tokens = max(self.longest_prefill_tokens, load.prefill_tokens)
            self._most_decode_tokens = max(self._most_decode_tokens, load.decode_tokens)
            self._most_context_tokens = max(self._most_context_tokens, load.context_tokens)
            self._most_attended = max(self._most_attended, load.attended)
        if self._steps % REFIT_STEPS == 0 or self._steps in (1, 2, 4):
            self._refit()

    def speculated(self, sequences: int, computed_tokens: int, made_tokens: int) -> None:
        """Learn what a step with drafts has computed and made of the sequences that decode."""
        self._speculated *= KEPT
        self._speculated += sequences, computed_tokens, made_tokens

    def _begin(self, load: StepLoad, took_s: float) -> None:
        """Guess from one step: a prompt's tokens cost alike in all."""
        base_s = took_s / (1.0 + load.prefill_tokens / PRIOR_TOKENS)
        self._line[:2] = base_s, base_s / PRIOR_TOKENS

    def _weight(self, load: StepLoad, took_s: float) -> float:
        """Return what the step counts for: little if something else seems to have disturbed it."""
        if not self.known:
            return 1.0
        predicted_s = self.predict_s(load)
        self._errors.append(abs(predicted_s - took_s) / took_s)
        size = self._sizes[load.bucket]
        off = math.log(took_s / max(1e-9, predicted_s))
        tolerated = max(TOLERATED, 3.0 * self._median_error)
        if abs(off) <= tolerated:
            size.surprises = 0
            return 1.0
        if size.surprised(slow=off > 0.0):
            return 1.0
        return 0.0 if abs(off) > ABSURD else tolerated / abs(off)

    def _refit(self) -> None:
        self._fit_line()
        self._median_error = median(self._errors) if self._errors else 0.0
        base_s, prefill_s, sequence_s, context_s, attended_s = (float(weight) for weight in self._line)
        sequences, computed, made = (float(number) for number in self._speculated)
        self.model = StepModel(
            base_s=base_s,
            per_prefill_token_s=prefill_s,
            per_sequence_s=sequence_s,
            per_context_token_s=context_s,
            per_attended_token_s=attended_s,
            corrections=self._corrections(),
            error=self._median_error,
            steps=self._steps,
            knows_decode=self._steps_without_prompts >= KNOWN,
            knows_prompts=self.longest_prefill_tokens > 0,
            computed_per_sequence=computed / sequences if sequences else 1.0,
            made_per_sequence=made / sequences if sequences else 1.0,
            most_decode_tokens=self._most_decode_tokens,
            most_context_tokens=self._most_context_tokens,
        )

    def _corrections(self) -> tuple[float, ...]:
        """Return the k of every size up to the largest that was seen."""
        predicted = self._rows @ self._line  # over what was measured
        ratios = np.sort(1.0 / np.maximum(predicted, 1e-9), axis=1)  # none at all is the largest
        corrections = []
        for size, row in zip(self._sizes, ratios, strict=True):
            number = min(size.seen, RING)
            middle = float(row[(number - 1) // 2]) if number else 1.0
            if number == 1:  # it may have compiled something: if that counted, no chunk would be that long ever again
                middle = min(1.0, middle)
            corrections.append(1.0 + (middle - 1.0) * number / (number + DOUBT))
        while corrections and corrections[-1] == 1.0:
            corrections.pop()
        return tuple(corrections)

    def _fit_line(self) -> None:
        gram = self._kinds[0].gram + self._kinds[1].gram + self._kinds[2].gram
        moments = self._kinds[0].moments + self._kinds[1].moments + self._kinds[2].moments
        scale = np.sqrt(gram.diagonal())
        seen = np.flatnonzero(scale > 0.0)
        scale = scale[seen]
        scaled = gram[np.ix_(seen, seen)] / np.multiply.outer(scale, scale)
        scaled[np.diag_indices(len(seen))] += PULL
        pulled = moments[seen] / scale + PULL * self._line[seen] * scale
        self._line[seen] = _non_negative(scaled, pulled) / scale
        if not self.longest_prefill_tokens:
            self._line[1] = (self._line[0] + self._line[2]) / PRIOR_TOKENS


def _non_negative(gram: Array, moments: Array) -> Array:
    """Return the w >= 0 with the least w'Gw / 2 - m'w; G must be positive definite.

    Each choice of weights that are not 0 is tried, of which five have 31: 0.3 ms at most, once in `REFIT_STEPS`.
    """
    weights, least = np.zeros(len(moments)), 0.0
    for count in range(len(moments), 0, -1):
        for some in map(list, combinations(range(len(moments)), count)):
            trial = np.linalg.solve(gram[np.ix_(some, some)], moments[some])
            if np.all(trial >= 0.0) and (value := -float(moments[some] @ trial)) < least:
                least, weights = value, np.zeros(len(moments))
                weights[some] = trial
        if count == len(moments) and least:  # nearly always: none would be negative
            break
    return weights


class StepClock:
    """Steps in flight, oldest first.

    A step that follows another without a pause lasts from the other's outputs to its own: that is the gap that a stream
    sees, it includes what the engine does between two steps, and it is also right where two steps are in flight (async
    scheduling). Only a step after a pause lasts from when it was scheduled.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, StepLoad, float]] = deque()
        self._last_s = 0.0
        self._pause = True
        self.took_s = 0.0
        """What the last step took that has ended."""

    def begin(self, began_s: float, load: StepLoad, predicted_s: float) -> None:
        """Note a step that computes something, scheduled from `began_s` on."""
        self._in_flight.append((began_s, load, predicted_s))

    def end(self, now_s: float) -> tuple[StepLoad, float] | None:
        """Return what the oldest step computed and how long it took; None if none is in flight."""
        if not self._in_flight:
            return None
        began_s, load, _ = self._in_flight.popleft()
        self.took_s = now_s - self._from_s(began_s)
        self._last_s = now_s
        return load, self.took_s

    def then(self, *, more_to_run: bool) -> None:
        """Say, after a step's outputs, whether the engine goes on at once."""
        self._pause = not more_to_run and not self._in_flight

    @property
    def loads(self) -> Iterator[StepLoad]:
        """Yield what the steps in flight compute."""
        return (load for _, load, _ in self._in_flight)

    def remaining_s(self, now_s: float) -> float:
        """Return how long the steps in flight are still expected to take."""
        total_s, since_s = 0.0, None
        for began_s, _, predicted_s in self._in_flight:
            since_s = self._from_s(began_s) if since_s is None else since_s
            total_s += predicted_s
        return 0.0 if since_s is None else max(0.0, total_s - (now_s - since_s))

    def _from_s(self, began_s: float) -> float:
        return max(began_s, self._last_s) if self._pause else self._last_s
