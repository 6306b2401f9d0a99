"""Conversations of several turns: prefill fetches the answer of the turn before from the decode worker that has it.

What that saves is asked of a quiet machine, by `make long`.
"""

from __future__ import annotations

import asyncio
import statistics
from contextlib import aclosing

import pytest

from ridgeline.contracts.workers import MIN_FITTED_STEPS
from ridgeline.worker_runtime.client import WorkerClient
from tests.engines.harness import Engines, Figure, Increase

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

TURNS = 8
ANSWER_TOKENS = 40
"""More than a block."""
LONG_ANSWER_TOKENS = 100
QUESTION_TOKENS = 20
FIRST_TOKENS = 150
BLOCK_TOKENS = 32
CONVERSATIONS = 3


async def steps_are_known(engines: Engines, text: list[int]) -> None:
    """Serve until the router knows how long a prompt's step takes, without which it does not ask."""
    for number in range(2 * MIN_FITTED_STEPS):
        await engines.tokens(text[60_000 + 100 * number :][: 40 + 20 * (number % 4)], 2)

    async def known() -> bool:
        metrics = await engines.metrics()
        return all(
            metrics.sum("ridgeline_step_model_seconds", pool=pool, part="base") for pool in ("prefill", "decode")
        )

    async with asyncio.timeout(30):
        while not await known():  # noqa: ASYNC110 - it comes with a worker's status
            await asyncio.sleep(0.2)


@pytest.mark.proves("later turns fetch KV from decode", "disaggregated")
@pytest.mark.core
async def test_eight_turns_are_the_models_and_each_later_one_is_fetched(
    engines: Engines, text: list[int], figure: Figure
):
    await engines.cold()
    await steps_are_known(engines, text)
    answers, prompt = [], text[:FIRST_TOKENS]
    for turn in range(TURNS):
        if turn == 1:  # the first one may be asked for in vain: the router remembers the prompts of other tests
            before = await engines.metrics()
        answer = await engines.tokens(prompt, ANSWER_TOKENS)
        answers.append((prompt, answer))
        prompt = prompt + answer + text[1_000 + turn * QUESTION_TOKENS :][:QUESTION_TOKENS]
    counted = Increase(before, await engines.metrics())
    results = counted.by_label("ridgeline_reused_kv_total", "result")
    tokens = counted.sum("ridgeline_reused_kv_tokens_total")
    figure(f"{len(answers)} turns: {results}, {tokens:.0f} tokens fetched")
    assert sum(results.values()) == TURNS - 1, "each later turn is asked for"
    assert results.keys() <= {"ok", "no_answer"}, "on a busy machine an answer may take longer than computing"
    assert tokens >= results["ok"] * BLOCK_TOKENS > 0
    assert counted.sum("ridgeline_recompute_total") == 0
    for prompt, answer in answers:
        assert all(engines.is_tie(nat) for nat in await engines.behind_best_nats(prompt, answer))
    assert await engines.becomes_idle() == {}


async def test_a_turn_whose_answer_decode_has_forgotten_is_computed(engines: Engines, text: list[int]):
    await engines.cold()
    await steps_are_known(engines, text)
    prompt = text[90_000:][:FIRST_TOKENS]
    prompt += await engines.tokens(prompt, LONG_ANSWER_TOKENS) + text[91_000:][:QUESTION_TOKENS]
    assert await engines.decode.reset_prefix_cache()
    before = await engines.metrics()
    answer = await engines.tokens(prompt, ANSWER_TOKENS)
    counted = Increase(before, await engines.metrics())
    assert counted.by_label("ridgeline_reused_kv_total", "result") in ({"not_cached": 1}, {"no_answer": 1})
    assert all(engines.is_tie(nat) for nat in await engines.behind_best_nats(prompt, answer))
    assert await engines.becomes_idle() == {}


@pytest.mark.long
@pytest.mark.parametrize("prefill_is_cold", [False, True], ids=["prefill has the prompt", "prefill has nothing"])
async def test_later_turns_have_their_first_token_sooner(
    engines: Engines, text: list[int], figure: Figure, prefill_is_cold: bool
):
    """Alternates with conversations whose answers decode has forgotten at each turn."""
    await engines.cold()
    await steps_are_known(engines, text)
    ttft_ms: dict[bool, list[float]] = {True: [], False: []}
    before = await engines.metrics()
    for number in range(2 * CONVERSATIONS):
        reuses, begin = number % 2 == 0, 10_000 + 5_000 * number
        prompt = text[begin:][:FIRST_TOKENS]
        for turn in range(TURNS):
            if turn and prefill_is_cold:
                await forgets(engines.prefill)
            if turn and not reuses:
                await forgets(engines.decode)
            took_s, answer = await timed(engines, prompt)
            if turn:
                ttft_ms[reuses].append(1000 * took_s)
            prompt = prompt + answer + text[begin + 1_000 + turn * QUESTION_TOKENS :][:QUESTION_TOKENS]
    results = Increase(before, await engines.metrics()).by_label("ridgeline_reused_kv_total", "result")
    reused, computed = (statistics.median(ttft_ms[reuses]) for reuses in (True, False))
    figure(
        f"TTFT of later turns: {reused:.0f} ms fetched, {computed:.0f} ms computed, medians of {len(ttft_ms[True])}; "
        f"{results}"
    )
    assert reused < computed


async def forgets(worker: WorkerClient) -> None:
    """Have a worker forget its cache, as soon as nothing of it is in use."""
    async with asyncio.timeout(20):
        while not await worker.reset_prefix_cache():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.01)


async def timed(engines: Engines, prompt: list[int]) -> tuple[float, list[int]]:
    """The seconds to the first token of an answer, and the answer."""
    body = {"prompt": prompt, "max_tokens": LONG_ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    first_s, answer = 0.0, []
    async with aclosing(engines.stream("/v1/completions", {**body, "return_token_ids": True})) as events:
        async for at_s, event in events:
            token_ids = event["choices"][0]["token_ids"] if event["choices"] else []
            if token_ids and not answer:
                first_s = at_s
            answer += token_ids
    return first_s, answer
