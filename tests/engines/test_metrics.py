"""What /metrics says after one known request is what that request must have cost."""

from __future__ import annotations

import json
import time
from math import ceil
from pathlib import Path
from typing import get_args

import pytest

from ridgeline.roofline.cost import StepCost, StepCostModel
from ridgeline.roofline.model_shape import ModelShape
from ridgeline.router.observe.timeline import StageName
from tests.engines.harness import Engines, Figure, Increase

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

PROMPT_TOKENS = 300
OUTPUT_TOKENS = 9
ATTEMPTS = 5
LEAST_PART = 0.5
"""Of what the client waited: on a busy machine it did not run when its answer came."""
STAGES = [stage for stage in get_args(StageName) if stage != "engine_queue"]
"""The labels of `ridgeline_stage_seconds`."""


def element_bytes(engines: Engines) -> int:
    return 4 if engines.dtype == "float32" else 2


@pytest.fixture
def shape(engines: Engines) -> ModelShape:
    config = json.loads((Path(engines.model_path) / "config.json").read_text())
    size = element_bytes(engines)
    return ModelShape.from_hf_config(config, weight_bytes_per_param=size, kv_bytes_per_element=size, name="tested")


def counted_cost(counted: Increase, pool: str) -> StepCost:
    kinds = counted.by_label("ridgeline_bytes_total", "kind")
    assert kinds.keys() == {"weights", "kv_read", "kv_write"}
    return StepCost(
        counted.sum("ridgeline_flops_total", pool=pool),
        counted.sum("ridgeline_bytes_total", pool=pool, kind="weights"),
        counted.sum("ridgeline_bytes_total", pool=pool, kind="kv_read"),
        counted.sum("ridgeline_bytes_total", pool=pool, kind="kv_write"),
    )


async def one_request(engines: Engines, prompt: list[int]) -> tuple[Increase, float]:
    """What it added to the counters once both workers have told all of it, and how long it took."""
    await engines.cold()
    before = await engines.metrics()
    began_s = time.monotonic()
    await engines.tokens(prompt, OUTPUT_TOKENS)
    took_s = time.monotonic() - began_s
    assert await engines.becomes_idle() == {}
    return Increase(before, await engines.metrics()), took_s


async def test_one_request_costs_each_pool_what_the_roofline_says(
    engines: Engines, text: list[int], shape: ModelShape, figure: Figure
):
    counted, _ = await one_request(engines, text[50_000 : 50_000 + PROMPT_TOKENS])
    model = StepCostModel(shape)
    # Prefill: one step over the whole prompt, one position sampled. Decode: t1 at position N, then one token a step.
    prefill = model.step([(PROMPT_TOKENS, 0)], 1)
    decode = StepCost()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS - 1):
        decode += model.step([(1, position)], 1)
    assert counted.sum("ridgeline_steps_total", pool="prefill", step="prefill") == 1
    assert counted.sum("ridgeline_steps_total", pool="decode", step="decode") == OUTPUT_TOKENS - 1
    assert counted.sum("ridgeline_steps_total") == OUTPUT_TOKENS
    for pool, expected in (("prefill", prefill), ("decode", decode)):
        seen = counted_cost(counted, pool)
        for name in ("flops", "weight_bytes", "kv_read_bytes", "kv_write_bytes"):
            assert getattr(seen, name) == pytest.approx(getattr(expected, name), rel=1e-9), (pool, name)
    # Once more without our own formula: every weight is read once a step, and there are 134,515,008 of them.
    weights = counted.sum("ridgeline_bytes_total", kind="weights")
    assert weights == pytest.approx(OUTPUT_TOKENS * 134_515_008 * element_bytes(engines), rel=1e-6)
    intensities = {pool: counted_cost(counted, pool).arithmetic_intensity for pool in ("prefill", "decode")}
    now = await engines.metrics()
    ridges = {
        pool: now.sum("ridgeline_peak_flops", pool=pool) / now.sum("ridgeline_peak_bytes_per_second", pool=pool)
        for pool in intensities
    }
    for pool, intensity in intensities.items():
        figure(f"{pool}: {intensity:.2f} FLOP/byte, ridge of this machine {ridges[pool]:.1f}")
    assert intensities["prefill"] > 50 * intensities["decode"]
    assert all(ridge > 0 for ridge in ridges.values())
    gauge = "ridgeline_arithmetic_intensity"
    assert now.sum(gauge, pool="prefill") > now.sum(gauge, pool="decode") > 0


async def test_tokens_are_counted_in_the_phase_they_belong_to(engines: Engines, text: list[int]):
    counted, _ = await one_request(engines, text[51_000 : 51_000 + PROMPT_TOKENS])
    assert counted.sum("ridgeline_tokens_total", pool="prefill", phase="prefill") == PROMPT_TOKENS
    assert counted.sum("ridgeline_tokens_total", pool="prefill", phase="decode") == 0
    assert counted.sum("ridgeline_tokens_total", pool="decode", phase="prefill") == 0
    assert counted.sum("ridgeline_tokens_total", pool="decode", phase="decode") == OUTPUT_TOKENS - 1


async def test_the_bytes_sent_are_the_bytes_received_and_the_blocks_of_the_prompt(
    engines: Engines, text: list[int], shape: ModelShape
):
    counted, _ = await one_request(engines, text[52_000 : 52_000 + PROMPT_TOKENS])
    prefill, _ = await engines.describe()
    blocks = ceil(PROMPT_TOKENS / prefill.layout.block_size)
    expected = blocks * prefill.layout.block_bytes * prefill.layout.num_layers
    assert expected == blocks * prefill.layout.block_size * shape.kv_bytes_per_token
    transferred = "ridgeline_kv_transfer_bytes_total"
    assert counted.sum(transferred, pool="prefill", direction="sent") == expected
    assert counted.sum(transferred, pool="decode", direction="received") == expected
    assert counted.sum(transferred) == 2 * expected
    assert counted.by_label("ridgeline_fetches_total", "result") == {"ok": 1}
    assert counted.sum("ridgeline_recompute_total") == 0
    assert counted.sum("ridgeline_expired_leases_total") == 0


async def test_stages_and_latencies_are_observed_once_and_add_up_to_what_the_client_waited(
    engines: Engines, text: list[int], figure: Figure
):
    for attempt in range(ATTEMPTS):
        counted, took_s = await one_request(engines, text[53_000 + attempt :][:PROMPT_TOKENS])
        stages = {stage: counted.sum("ridgeline_stage_seconds_sum", stage=stage) for stage in STAGES}
        told = ", ".join(f"{name} {seconds * 1000:.1f}" for name, seconds in stages.items())
        figure(f"{told}; sum {sum(stages.values()) * 1000:.0f} ms, the client waited {took_s * 1000:.0f} ms")
        assert all(value >= 0 for value in stages.values())
        assert stages["prefill"] > 0
        assert stages["decode"] > 0
        for name, pool, times in (("ttft", "prefill", 1), ("second_token", "decode", 1), ("tpot", "decode", 1)):
            assert counted.sum(f"ridgeline_{name}_seconds_count", pool=pool) == times, name
            assert counted.sum(f"ridgeline_{name}_seconds_count") == times, name
        assert counted.sum("ridgeline_itl_seconds_count", pool="decode") == OUTPUT_TOKENS - 1
        assert 0 < counted.sum("ridgeline_busy_seconds_total") <= took_s
        tpot_s = counted.sum("ridgeline_tpot_seconds_sum")
        answered_s = counted.sum("ridgeline_ttft_seconds_sum") + tpot_s * (OUTPUT_TOKENS - 1)
        assert sum(stages.values()) <= took_s
        assert answered_s <= took_s + 0.001
        if sum(stages.values()) >= LEAST_PART * took_s and answered_s >= LEAST_PART * took_s:
            return
    raise AssertionError("a large part of what the client waited is in no stage, or in no latency")
