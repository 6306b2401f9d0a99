"""Decode drafts by n-grams: answers are those of an engine that does not, also after the drafting worker is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from vllm.sampling_params import SamplingParams

from ridgeline.engine.request import sampling
from tests.engines.conftest import SHORT_STEPS, deployed
from tests.engines.harness import Engines, Increase
from tests.engines.serve_process import engines_below

Figure = Callable[[str], None]
pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

LOOKUP = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
SPECULATION = json.dumps({"method": "ngram", "num_speculative_tokens": 3, **LOOKUP})
NUM_TOKENS = 20
STREAMED_TOKENS = 100
LENGTHS = (1, 2, 31, 32, 33, 64, 127, 129, 200)
"""Around blocks of 32 and steps of 128 tokens."""
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3}
"""With these the next token depends on those made so far, so another worker must make them again."""


async def without_drafts(engines: Engines, prompt: list[int], num_tokens: int, **wish: Any) -> list[int]:
    """The whole answer of the prefill worker, which does not speculate."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens, **wish)
    task = {"leg": "decode", "prompt_token_ids": prompt, "sampling": sampling.encode(params)}
    return (await engines.run(engines.prefill, **task))[0].token_ids


async def streamed(engines: Engines, prompt: list[int], began: asyncio.Event, **wish: Any) -> list[int]:
    """The tokens of a stream; `began` is set once a few of them are there."""
    body = {"prompt": prompt, "max_tokens": STREAMED_TOKENS, "temperature": 0, "ignore_eos": True, **wish}
    token_ids: list[int] = []
    async for _, event in engines.stream("/v1/completions", {**body, "return_token_ids": True}):
        assert "error" not in event, event
        token_ids += event["choices"][0]["token_ids"] or []
        if len(token_ids) > NUM_TOKENS:
            began.set()
    return token_ids


@pytest.mark.proves("drafts by n-grams", ("disaggregated", "after a lost worker"))
@pytest.mark.long  # a minute and a half; a draft's KV is handed over in tests/components/engine/test_model_families.py
async def test_drafts_change_no_token_and_an_answer_goes_on_when_its_worker_is_killed(figure: Figure):
    draw = random.Random(3)
    prompts = [([draw.randrange(300, 2000) for _ in range(16)] * 20)[:length] for length in LENGTHS]
    settings = {"model.dtype": "float32", "pools.decode.engine_args.speculative_config": SPECULATION}
    async with deployed({**settings, **SHORT_STEPS}) as engines:
        before = await engines.metrics()
        with_drafts = [await engines.tokens(prompt, NUM_TOKENS) for prompt in prompts]
        counted = Increase(before, await engines.metrics())
        drafted, accepted, steps = (
            counted.sum(f"ridgeline_{name}_total", pool="decode")
            for name in ("drafted_tokens", "accepted_tokens", "sequence_steps")
        )
        figure(f"{accepted:.0f} of {drafted:.0f} drafted tokens accepted in {steps:.0f} steps of a sequence")
        assert with_drafts == [await without_drafts(engines, prompt, NUM_TOKENS) for prompt in prompts]
        assert counted.sum("ridgeline_fetches_total", pool="decode", result="ok") == len(prompts)
        assert 0 < accepted <= drafted
        assert steps + accepted == counted.sum("ridgeline_tokens_total", pool="decode", phase="decode")

        scored = await engines.complete(prompts[-1], NUM_TOKENS, logprobs=1)
        assert scored["token_ids"] == with_drafts[-1]
        assert max(scored["logprobs"]["token_logprobs"]) <= 0.0
        assert len(scored["logprobs"]["token_logprobs"]) == NUM_TOKENS

        wishes: list[dict[str, Any]] = [{}, PENALTIES]
        began = [asyncio.Event() for _ in wishes]
        streams = [
            asyncio.create_task(streamed(engines, prompts[-1], event, **wish))
            for event, wish in zip(began, wishes, strict=True)
        ]
        for event in began:
            await asyncio.wait_for(event.wait(), 60)
        engines_below(psutil.Process((await engines.decode.describe()).pid))[0].kill()
        for stream, wish in zip(streams, wishes, strict=True):
            token_ids = await asyncio.wait_for(stream, 120)
            assert token_ids == await without_drafts(engines, prompts[-1], STREAMED_TOKENS, **wish)
        after = Increase(before, await engines.metrics())
        assert after.sum("ridgeline_retries_total") == len(wishes)
