"""Modelled workers and requests for the tests of the scheduler."""

from __future__ import annotations

import random

from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.engines import ModelledRequest, modelled
from tests.support.simulated_serving import fleet_model

H100 = StepModel(
    base_s=0.0067,
    per_prefill_token_s=20e-6,
    per_sequence_s=35e-6,
    per_context_token_s=1e-9,
    per_attended_token_s=20e-6 / 18_000,
    corrections=(*[1.0] * 8, 2.3, 1.6, 1.2),
    steps=100,
)
"""What an 8B in bfloat16 took on one H100 80GB HBM3, where a step with a prompt, having no CUDA graph, took 22 ms at
least."""
CHEAP_ANSWERS = StepModel(
    base_s=0.055,
    per_prefill_token_s=0.0006,
    per_sequence_s=0.00005,
    per_context_token_s=1e-6,
    per_attended_token_s=0.0006 / 18_000,
    corrections=(*[1.0] * 6, 1.45, 1.45, 1.45, 1.2),
    steps=100,
)
"""Steps in which one more answer costs next to nothing, as on a CPU with AMX."""


def poisson(
    rate, number, *, prompt_tokens=512, output_tokens=64, ttft_slo_s=float("inf"), tpot_slo_s=float("inf"), seed=1
):
    """Requests of one size at random times, `rate` a second."""
    draw, now_s, made = random.Random(seed), 0.0, []
    for index in range(number):
        now_s += draw.expovariate(rate)
        made.append(ModelledRequest(index, now_s, prompt_tokens, output_tokens, ttft_slo_s, tpot_slo_s))
    return made


def fleet(*arguments, **options):
    """Modelled workers that are alike."""
    return modelled(fleet_model(*arguments, **options).workers)
