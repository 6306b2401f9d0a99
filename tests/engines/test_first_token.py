"""The first token goes out as soon as prefill has it; the second one does not wait long for the KV."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from harness import Engines, Figure, Increase

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 10
ROUNDS = 7
HAND_OVER_S = 0.040


async def test_first_token_leaves_before_the_kv_moves_and_the_second_follows_within_a_step(
    engines: Engines, text: list[int], figure: Figure
):
    gaps_s, steps_s, late_s = [], [], []
    stages_s: dict[str, list[float]] = {stage: [] for stage in ("handoff_wait", "wire", "decode_queue")}
    for number in range(ROUNDS):
        start = 40_000 + number * PROMPT_TOKENS
        await engines.cold()
        before = await engines.metrics()
        body = {
            "prompt": text[start : start + PROMPT_TOKENS],
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
        counted = Increase(before, await engines.metrics())
        prefill_s = sum(counted.sum("ridgeline_stage_seconds_sum", stage=stage) for stage in ("queue", "prefill"))
        assert prefill_s > 0
        for stage, seconds in stages_s.items():
            seconds.append(counted.sum("ridgeline_stage_seconds_sum", stage=stage))
        late_s.append(times_s[0] - prefill_s)
        gaps_s.append(times_s[1] - times_s[0])
        steps_s += [later - earlier for earlier, later in pairwise(times_s[1:])]
    late, gap, step = (statistics.median(values) * 1000 for values in (late_s, gaps_s, steps_s))
    figure(
        f"medians of {ROUNDS}: first token {late:.1f} ms after its prefill, second token {gap:.1f} ms after the first, "
        f"one decode step {step:.1f} ms: the hand-over costs {gap - step:.1f} ms"
    )
    figure(", ".join(f"{stage} {statistics.median(values) * 1000:.1f} ms" for stage, values in stages_s.items()))
    assert statistics.median(stages_s["wire"]) > 0
    assert late <= 40
    assert gap <= step + HAND_OVER_S * 1000
