"""80 hand-offs of which half meet a fault: every answer is whole and right, and nothing is left over."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from tests.engines.conftest import SHORT_STEPS, book, deployed
from tests.engines.harness import Engines, Figure, Increase

pytestmark = [pytest.mark.engines, pytest.mark.asyncio]

NUM_HANDOFFS = 80
NUM_LONG = 3
CONCURRENCY = 16
OUTPUT_TOKENS = 4
PLAN = "seed=11,delay=0.20,drop=0.04,corrupt=0.12,cut=0.12,longest_delay_s=0.2,longest_drop_s=0.5"


def prompts_of(text: list[int]) -> list[list[int]]:
    rng = random.Random(500)
    lengths = [rng.randint(4, 24) for _ in range(NUM_HANDOFFS - NUM_LONG)] + [700] * NUM_LONG
    rng.shuffle(lengths)
    starts = [rng.randrange(len(text) - 800) for _ in lengths]
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


async def test_80_handoffs_under_faults_are_answered_in_full_and_leave_nothing(
    small_model: dict[str, str], figure: Figure
):
    before_shm = sorted(os.listdir("/dev/shm"))
    async with deployed({"transfer.faults": PLAN, **SHORT_STEPS, **small_model}) as engines:
        prompts = prompts_of(book(engines))
        await answers_to(engines, [prompts[0][:20]])  # workers tell their counts after a step: the warm-up's, here
        before = await engines.metrics()
        answers: list[list[int]] = []
        for transport, start, stop in (("grpc", 0, NUM_HANDOFFS // 2), ("shm", NUM_HANDOFFS // 2, NUM_HANDOFFS)):
            await engines.use_transport(transport)
            answers += await answers_to(engines, prompts[start:stop])
        await asyncio.sleep(1.0)
        counted = Increase(before, await engines.metrics())
        assert await engines.becomes_idle() == {}
        behind_nat = await farthest_behind_nat(engines, prompts, answers)
    fetches = counted.by_label("ridgeline_fetches_total", "result")
    recomputed = counted.by_label("ridgeline_recompute_total", "reason")
    followed = counted.by_label("ridgeline_overlapped_handoffs_total", "result")
    figure(
        f"{len(answers)} answers whole; fetches {fetches}, recomputed {recomputed}, followed {followed}; "
        f"farthest token behind the single engine's best: {max(behind_nat):.4f} nat"
    )
    assert counted.sum("ridgeline_requests_total", outcome="finished") == NUM_HANDOFFS
    assert engines.is_tie(max(behind_nat))
    assert {"corrupted", "unreachable", "timeout"} <= fetches.keys()
    failed = sum(count for result, count in fetches.items() if result != "ok")
    begun_again = sum(count for result, count in followed.items() if result != "ok")
    assert failed == sum(recomputed.values()) + begun_again, "a failure that nobody counted"
    assert sorted(os.listdir("/dev/shm")) == before_shm


async def farthest_behind_nat(engines: Engines, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    """Of each answer's tokens, the one farthest behind the single engine's best."""
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: list[int], answer: list[int]) -> float:
        async with gate:
            return max(await engines.behind_best_nats(prompt, answer))

    return list(await asyncio.gather(*map(one, prompts, answers)))


async def answers_to(engines: Engines, prompts: list[list[int]]) -> list[list[int]]:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: list[int]) -> list[int]:
        async with gate:
            return await engines.tokens(prompt, OUTPUT_TOKENS)

    return list(await asyncio.gather(*map(one, prompts)))
