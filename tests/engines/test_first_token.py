"""The first token goes out as soon as prefill has it; the second one does not wait long for the KV."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from tests.engines.harness import Engines, Figure, Increase

pytestmark = [pytest.mark.engines, pytest.mark.core, pytest.mark.asyncio(loop_scope="session")]

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 10
ROUNDS = 7
ATTEMPTS = 5
"""A neighbour on a shared machine can spoil one series of medians; the hand-over must make it in one of them."""
HAND_OVER_MS = 40.0
HAND_OVER_STEPS = 0.75
"""On a machine that is slow, as a part of its own step: 23.6 MB into blocks that were not used before took 22 to 32 ms
where a step took 75 to 93, and 4 ms into blocks that were."""


async def test_first_token_leaves_before_the_kv_moves_and_the_second_follows_within_a_step(
    engines: Engines, text: list[int], figure: Figure
):
    for attempt in range(ATTEMPTS):
        late_ms, gap_ms, step_ms, stages_ms = await medians(engines, text, first_round=attempt * ROUNDS)
        figure(
            f"medians of {ROUNDS}: first token {late_ms:.1f} ms after its prefill, second {gap_ms:.1f} ms after the "
            f"first, one decode step {step_ms:.1f} ms: the hand-over costs {gap_ms - step_ms:.1f} ms"
        )
        figure(", ".join(f"{stage} {median_ms:.1f} ms" for stage, median_ms in stages_ms.items()))
        longest_ms = step_ms + max(HAND_OVER_MS, HAND_OVER_STEPS * step_ms)
        if late_ms <= 40 and gap_ms <= longest_ms:
            break
    assert stages_ms["wire"] > 0
    assert late_ms <= 40
    assert gap_ms <= longest_ms


async def medians(engines: Engines, text: list[int], first_round: int) -> tuple[float, float, float, dict[str, float]]:
    """(first token after its prefill, first to second token, one decode step, each hand-over stage), all in ms."""
    gaps_s, steps_s, late_s = [], [], []
    stages_s: dict[str, list[float]] = {stage: [] for stage in ("handoff_wait", "wire", "decode_queue")}
    for number in range(first_round, first_round + ROUNDS):
        await engines.cold()
        before = await engines.metrics()
        times_s = await token_times_s(engines, text[40_000 + number * PROMPT_TOKENS :][:PROMPT_TOKENS])
        counted = Increase(before, await engines.metrics())
        prefill_s = sum(counted.sum("ridgeline_stage_seconds_sum", stage=stage) for stage in ("queue", "prefill"))
        assert prefill_s > 0
        for stage, seconds in stages_s.items():
            seconds.append(counted.sum("ridgeline_stage_seconds_sum", stage=stage))
        late_s.append(times_s[0] - prefill_s)
        gaps_s.append(times_s[1] - times_s[0])
        steps_s += [later - earlier for earlier, later in pairwise(times_s[1:])]
    late_ms, gap_ms, step_ms = (statistics.median(values) * 1000 for values in (late_s, gaps_s, steps_s))
    return late_ms, gap_ms, step_ms, {stage: statistics.median(values) * 1000 for stage, values in stages_s.items()}


async def token_times_s(engines: Engines, prompt: list[int]) -> list[float]:
    """When each token of one streamed answer arrived, in seconds since sending."""
    body = {
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    times_s = []
    async for at_s, event in engines.stream("/v1/completions", body):
        if event["choices"][0]["token_ids"]:
            assert len(event["choices"][0]["token_ids"]) == 1
            times_s.append(at_s)
    assert len(times_s) == OUTPUT_TOKENS
    return times_s
