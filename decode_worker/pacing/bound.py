"""The longest chunks of prompts with which a step still fits a time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.contracts.workers import LEAST_PROMPT_SHARE, StepModel


@dataclass(frozen=True)
class Prompt:
    """What is left of a prompt."""

    context_tokens: int
    """Those that have been computed."""
    left_tokens: int


def most_prefill_tokens(
    model: StepModel, step_s: float, sequences: int, context_tokens: float, prompts: Iterable[Prompt]
) -> int:
    """Return how many tokens of these prompts, in their order, fit a step of `step_s` beside what decodes; at least 1.

    `sequences` decode in it and have `context_tokens` together.
    """
    decode_s = model.decode_s(sequences, context_tokens)
    step_s = max(step_s, (1.0 + LEAST_PROMPT_SHARE) * decode_s)
    decode_tokens = int(sequences * model.computed_per_sequence)
    line_s = model.base_s + model.per_sequence_s * decode_tokens + model.per_context_token_s * context_tokens
    tokens = 0
    for prompt in prompts:
        chunk = _longest_chunk(model, step_s, line_s, decode_tokens + tokens, prompt)
        tokens += chunk
        if chunk < prompt.left_tokens:
            break
        line_s += _line_s(model, prompt.context_tokens, chunk)
    return max(1, tokens)


def _line_s(model: StepModel, context_tokens: int, chunk: float) -> float:
    attended = chunk * (context_tokens + chunk / 2.0)
    return model.per_prefill_token_s * chunk + model.per_attended_token_s * attended


def _longest_chunk(model: StepModel, step_s: float, line_s: float, tokens: int, prompt: Prompt) -> int:
    """Return how much of one prompt fits, where the step has `tokens` already, which take `line_s` on the line.

    Goes up by corrections, and stops at the first that does not fit whole: one further up may do by chance.
    """
    best = 0
    while best < prompt.left_tokens:
        bucket = (tokens + best + 1).bit_length()
        last = min(prompt.left_tokens, (1 << bucket) - 1 - tokens)
        correction = model.corrections[bucket] if bucket < len(model.corrections) else 1.0
        fits = _solve(model, prompt.context_tokens, step_s / correction - line_s)
        if fits < last:
            return max(best, fits)
        best = last
    return best


def _solve(model: StepModel, context_tokens: int, seconds: float) -> int:
    """Return the most tokens of a chunk that take no more than `seconds` on the line."""
    if seconds <= 0.0:
        return 0
    linear = model.per_prefill_token_s + model.per_attended_token_s * context_tokens
    square = model.per_attended_token_s / 2.0
    root = linear + math.sqrt(linear * linear + 4.0 * square * seconds)
    return 1 << 30 if root * (1 << 30) <= 2.0 * seconds else int(2.0 * seconds / root)
