"""A step target on a real engine: chunks of prompts become shorter, and answers stay what they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import accumulate, pairwise
from statistics import median

import msgspec
import pytest
import pytest_asyncio
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.tasks import GenerateTask
from ridgeline.contracts.workers import Role
from ridgeline.engine.request import sampling
from tests.engines.harness import Engines, Figure
from tests.support.task_deltas import task_deltas

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (40, 300, 150, 400)
OUTPUT_TOKENS = 16
TARGET_STEPS = 1.5
ROLE_WITHIN_S = 10.0


@pytest_asyncio.fixture(loop_scope="session")
async def untargeted(engines: Engines) -> AsyncIterator[Role]:
    """The role of the decode worker, which it has again afterwards."""
    role = (await engines.decode.describe()).role
    assert role is not None
    assert role.step_target_s == 0.0
    yield role
    await take(engines, role)


async def take(engines: Engines, role: Role) -> None:
    """Give the decode worker this role, and wait until its engine has its limits."""
    await engines.decode.take_role(role)
    async with asyncio.timeout(ROLE_WITHIN_S):
        while (await engines.decode.describe()).role != role:  # noqa: ASYNC110 - a worker has no event for it
            await asyncio.sleep(0.02)


async def unloaded_step_s(engines: Engines, prompt: list[int]) -> float:
    """The time between two tokens of an answer that the decode worker gives alone."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
    task = GenerateTask(request_id="unloaded", leg="decode", prompt_token_ids=prompt, sampling=sampling.encode(params))
    clock = asyncio.get_running_loop().time
    times_s = [clock() async for delta in task_deltas(engines.decode, task) if delta.token_ids]
    return median(later - earlier for earlier, later in pairwise(times_s))


async def test_a_target_shortens_chunks_and_every_token_is_the_models(
    engines: Engines, untargeted: Role, text: list[int], figure: Figure
):
    step_s = await unloaded_step_s(engines, text[30_000:30_100])
    ends = [*accumulate(LENGTHS, initial=31_000)]
    prompts = [text[begin:end] for begin, end in pairwise(ends)]
    await engines.cold()
    before = (await engines.decode.status()).counters.get("shortened_chunks_total", 0.0)
    await take(engines, msgspec.structs.replace(untargeted, step_target_s=TARGET_STEPS * step_s))
    answers = await asyncio.gather(*(engines.reference(prompt, OUTPUT_TOKENS) for prompt in prompts))
    await take(engines, untargeted)
    shortened = (await engines.decode.status()).counters["shortened_chunks_total"] - before
    # A chunk of another length adds up its terms in another order, so tokens may differ where the format has a tie.
    apart = [
        nat
        for prompt, answer in zip(prompts, answers, strict=True)
        for nat in await engines.behind_best_nats(prompt, answer.token_ids)
        if nat
    ]
    figure(
        f"a target of {1e3 * TARGET_STEPS * step_s:.0f} ms shortened {shortened:.0f} chunks; "
        f"nat behind one engine's best, where not 0: {sorted(apart)}"
    )
    assert all(len(answer.token_ids) == OUTPUT_TOKENS for answer in answers)
    assert [nat for nat in apart if not engines.is_tie(nat)] == []
    assert shortened > 0, "how many depends on how well a busy machine's steps were foretold"
