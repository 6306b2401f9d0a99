"""What counts as a tie in each number format."""

import numpy as np
import pytest

from ridgeline.contracts.tasks import PositionLogprobs
from tests.support.ties import behind_best_nat, is_tie, spacing, tie_nat


def test_the_spacing_is_that_of_the_format_at_the_numbers_size():
    assert spacing("bfloat16", 16.0) == spacing("bfloat16", 31.9) == 0.125
    assert spacing("bfloat16", 8.0) == 0.0625
    assert spacing("float32", 20.0) == np.spacing(np.float32(20.0))
    assert spacing("float16", 20.0) == np.spacing(np.float16(20.0))


@pytest.mark.parametrize(
    ("dtype", "behind_nat", "tie"),
    [
        ("bfloat16", 0.125, True),
        ("bfloat16", 0.25, True),
        ("bfloat16", 0.375, False),
        ("float32", 0.0002, True),
        ("float32", 0.01, False),
        ("float32", 0.125, False),
    ],
)
def test_one_step_of_bfloat16_is_a_tie_there_and_a_wrong_token_in_float32(dtype: str, behind_nat: float, tie: bool):
    assert is_tie(behind_nat, dtype) is tie


def test_smaller_logits_have_smaller_ties():
    assert tie_nat("bfloat16", largest_logit=7.0) == tie_nat("bfloat16", largest_logit=31.0) / 4


def test_a_penalty_counts_when_tokens_are_compared():
    position = PositionLogprobs([7, 9], [-0.5, -1.6], 1)
    assert behind_best_nat(position, 9) == pytest.approx(1.1)
    assert behind_best_nat(position, 9, {7: 1.2}) == 0.0
    assert behind_best_nat(position, 7, {7: 1.2}) == pytest.approx(0.1)
    assert behind_best_nat(position, 8) == float("inf")
