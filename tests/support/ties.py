"""Decides whether a token that differs from a single engine's is a tie: the number format cannot tell the two apart.

A batch of another shape adds the same terms in another order, so a logit may round to a neighbouring value. The
distance of neighbours depends on the format and on the logit's size: between 16 and 32, where the largest logits of our
models lie, bfloat16 has steps of 0.125 and float32 has steps of 2e-6. A limit for one is wrong for the other: what is a
tie in bfloat16 would be a bug in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ridgeline.contracts.tasks import PositionLogprobs

SIGNIFICAND_BITS: Final = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Significand bits of each format, including the leading one that is not stored."""
STEPS: Final = {"bfloat16": 2, "float16": 16, "float32": 1024}
"""How many steps two tokens may lie apart and still change places.

In bfloat16 the last rounding is by far the coarsest: both tokens' logits may move to the neighbouring value, one up
and one down, which makes two steps. In finer formats the sums of all layers before it make up more of the steps; in
float32 they alone decide. 1,024 steps are 0.002 nat; no right answer was seen more than 0.00005 nat behind.
"""
LARGEST_LOGIT: Final = 31.0
"""An upper bound for the default model and the tests' random ones, whose logits are below 32."""


def spacing(dtype: str, magnitude: float) -> float:
    """Return the distance from a number of this size to the next one that the format has."""
    return 2.0 ** (math.floor(math.log2(magnitude)) + 1 - SIGNIFICAND_BITS[dtype])


def tie_nat(dtype: str, largest_logit: float = LARGEST_LOGIT) -> float:
    """Return the largest distance of a tie, in nats; log-probabilities move as much as logits do."""
    return STEPS[dtype] * spacing(dtype, largest_logit)


def is_tie(behind_nat: float, dtype: str, largest_logit: float = LARGEST_LOGIT) -> bool:
    """Return whether a token this far behind the best one may have been chosen instead of it."""
    return behind_nat <= tie_nat(dtype, largest_logit) + 1e-6  # log-probabilities are float32


def behind_best_nat(position: PositionLogprobs, token: int, penalties: Mapping[int, float] | None = None) -> float:
    """Return how far a token is behind a position's best one, in nats; infinity if it was not reported.

    `penalties` are subtracted from each token's logit before sampling; engines report log-probabilities without them.
    """
    taken = penalties or {}
    scores = {
        each: logprob - taken.get(each, 0.0)
        for each, logprob in zip(position.token_ids, position.logprobs, strict=True)
    }
    return max(scores.values()) - scores.get(token, -math.inf)
