"""Whether another token than a single engine's is a tie: two tokens that the number format cannot tell apart.

A batch of another shape adds the same terms in another order, so a logit may round to a neighbouring value. How far
apart two neighbours are is decided by the format and by how large the logit is: between 16 and 32, where the largest
logits of our models lie, a bfloat16 moves in steps of 0.125, a float32 in steps of 2e-6. A limit that is right for one
is wrong for the other: what is a tie in bfloat16 would be a bug in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from contracts.tasks import PositionLogprobs

SIGNIFICAND_BITS: Final = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Of each format, the leading one that is not stored included."""
STEPS: Final = {"bfloat16": 2, "float16": 16, "float32": 1024}
"""How many steps two tokens may lie apart and still change places.

In bfloat16 the last rounding is the coarsest by far: both tokens' logits may go to the neighbouring value, one up and
one down, which makes two steps. The finer the format, the more of its steps the sums of all layers before make: in
float32 they decide alone. 1,024 steps are 0.002 nat; no right answer was ever seen more than 0.00005 nat behind.
"""
LARGEST_LOGIT: Final = 31.0
"""Of the default model and of the tests' random ones: below 32."""


def spacing(dtype: str, magnitude: float) -> float:
    """From a number of this size to the next one that the format has."""
    return 2.0 ** (math.floor(math.log2(magnitude)) + 1 - SIGNIFICAND_BITS[dtype])


def tie_nat(dtype: str, largest_logit: float = LARGEST_LOGIT) -> float:
    """Two tokens at most this far apart are a tie; what moves two logits moves their log-probabilities as much."""
    return STEPS[dtype] * spacing(dtype, largest_logit)


def is_tie(behind_nat: float, dtype: str, largest_logit: float = LARGEST_LOGIT) -> bool:
    """Whether a token this far behind the best one may have been chosen for it."""
    return behind_nat <= tie_nat(dtype, largest_logit) + 1e-6  # log-probabilities are float32 themselves


def behind_best_nat(position: PositionLogprobs, token: int, penalties: Mapping[int, float] | None = None) -> float:
    """How far a token is behind the best one of a position; infinitely if it is not among those that were told.

    `penalties`: what is taken from each token's logit before one is chosen; engines report log-probabilities before.
    """
    taken = penalties or {}
    scores = {
        each: logprob - taken.get(each, 0.0)
        for each, logprob in zip(position.token_ids, position.logprobs, strict=True)
    }
    return max(scores.values()) - scores.get(token, -math.inf)
