"""Chunks of prompts that fit a time."""

from __future__ import annotations

import random

import msgspec
import pytest

from ridgeline.contracts.workers import LEAST_PROMPT_SHARE, StepModel
from ridgeline.decode_worker.pacing.bound import Prompt, most_prefill_tokens

LINE = StepModel(
    base_s=0.05,
    per_prefill_token_s=0.004,
    per_sequence_s=0.002,
    per_context_token_s=1e-6,
    per_attended_token_s=1e-6,
)


def step_s(model: StepModel, tokens: int, sequences: int, context_tokens: int, prompts: list[Prompt]) -> float:
    left, attended = tokens, 0.0
    for prompt in prompts:
        chunk = min(left, prompt.left_tokens)
        attended += chunk * (prompt.context_tokens + chunk / 2)
        left -= chunk
    return model.step_s(tokens, sequences, context_tokens, attended)


@pytest.mark.parametrize("seed", range(50))
def test_the_step_fits_and_with_one_token_more_it_would_not(seed: int):
    draw = random.Random(seed)
    prompts = [Prompt(draw.randrange(0, 3000), draw.randrange(1, 300)) for _ in range(draw.randrange(1, 4))]
    prompts.append(Prompt(0, 2048))
    sequences, context_tokens = draw.randrange(1, 30), draw.randrange(100, 30_000)
    decode_s = LINE.decode_s(sequences, context_tokens)
    target_s = decode_s * draw.uniform(1.2, 20)
    tokens = most_prefill_tokens(LINE, target_s, sequences, context_tokens, prompts)
    assert tokens == 1 or step_s(LINE, tokens, sequences, context_tokens, prompts) <= target_s * 1.0001
    if tokens < sum(prompt.left_tokens for prompt in prompts):
        assert step_s(LINE, tokens + 1, sequences, context_tokens, prompts) > target_s


def test_a_longer_context_before_a_chunk_makes_it_shorter():
    short = most_prefill_tokens(LINE, 0.5, 2, 1000, [Prompt(0, 2048)])
    assert most_prefill_tokens(LINE, 0.5, 2, 1000, [Prompt(4000, 2048)]) < 0.7 * short


def test_prompts_progress_whatever_the_target():
    quick = msgspec.structs.replace(LINE, per_prefill_token_s=1e-4, per_attended_token_s=0.0)
    tokens = most_prefill_tokens(quick, 0.001, 8, 4000, [Prompt(0, 2048)])
    assert tokens == pytest.approx(LEAST_PROMPT_SHARE * quick.decode_s(8, 4000) / 1e-4, abs=1.5)
    assert tokens >= 5
    slow = msgspec.structs.replace(LINE, per_prefill_token_s=1.0)
    assert most_prefill_tokens(slow, 0.001, 8, 4000, [Prompt(0, 2048)]) == 1


def test_a_stair_is_not_stepped_over():
    stairs = msgspec.structs.replace(LINE, per_attended_token_s=0.0, corrections=(1.0,) * 6 + (2.0, 1.0))
    # up to 31 tokens in the step at k = 1; 32 to 63 would take twice the line, and from 64 on it again
    assert most_prefill_tokens(stairs, 0.401, 1, 0, [Prompt(0, 2048)]) == int((0.401 / 2 - 0.052) / 0.004) == 37
    assert most_prefill_tokens(stairs, 0.19, 1, 0, [Prompt(0, 2048)]) == 30


def test_a_model_in_which_prompts_are_free_bounds_nothing():
    free = msgspec.structs.replace(LINE, per_prefill_token_s=0.0, per_attended_token_s=0.0)
    assert most_prefill_tokens(free, 0.1, 1, 0, [Prompt(0, 2048)]) == 2048
