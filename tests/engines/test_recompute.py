"""A hand-off that fails costs a prefill, not the answer, and is counted by its reason."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.engine.request import sampling
from tests.engines.harness import Engines
from tests.support.patience import PATIENCE_S

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

OUTPUT_TOKENS = 6
WISH = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)

SPOILED: dict[str, dict[str, Any]] = {
    "unknown_handoff": {"handoff_id": "nobody-published-this"},
    "unreachable": {"addresses": ("127.0.0.1:1",)},
}


async def prefilled(engines: Engines, prompt: list[int]) -> tuple[int, KvHandoff]:
    """The prefill leg alone: its token and its offer."""
    leg = {"leg": "prefill", "prompt_token_ids": prompt, "sampling": sampling.encode(WISH)}
    answer, handoff = await engines.run(engines.prefill, **leg)
    assert handoff is not None
    return answer.token_ids[0], handoff


async def decoded(engines: Engines, prompt: list[int], first: int, handoff: KvHandoff) -> list[int]:
    answer, _ = await engines.run(
        engines.decode,
        leg="decode",
        prompt_token_ids=prompt,
        sampling=sampling.encode(WISH),
        emitted_token_ids=[first],
        handoff=handoff,
    )
    return [first, *answer.token_ids]


async def assert_the_models(engines: Engines, prompt: list[int], answer: list[int], reference: list[int]) -> None:
    """A prompt computed with the first token has another shape than without it: bfloat16 may break a tie otherwise."""
    assert len(answer) == OUTPUT_TOKENS
    if engines.dtype == "float32":
        assert answer == reference
    assert all(engines.is_tie(nat) for nat in await engines.behind_best_nats(prompt, answer))


async def recomputed(engines: Engines) -> dict[str, float]:
    counters = (await engines.decode.status()).counters
    return {name: value for name, value in counters.items() if name.startswith("recompute_total.")}


async def pinned_blocks(engines: Engines) -> float:
    return (await engines.prefill.status()).counters["pinned_blocks"]


@pytest.mark.parametrize("reason", SPOILED)
async def test_a_failed_hand_off_is_recomputed_and_counted(engines: Engines, text: list[int], reason: str):
    prompt = text[60_000:60_070]
    await engines.cold()
    reference = (await engines.reference(prompt, OUTPUT_TOKENS)).token_ids
    await engines.cold()
    first, handoff = await prefilled(engines, prompt)
    before = await recomputed(engines)
    spoiled = msgspec.structs.replace(handoff, **SPOILED[reason])
    answer = await decoded(engines, prompt, first, spoiled)
    after = await recomputed(engines)
    name = f"recompute_total.{reason}"
    assert after == {**before, name: before.get(name, 0) + 1}
    await assert_the_models(engines, prompt, answer, reference)
    # The real offer is still there: fetching it now works, and ends its lease.
    await engines.decode.reset_prefix_cache()
    assert await decoded(engines, prompt, first, handoff) == reference
    assert await recomputed(engines) == after
    assert await engines.becomes_idle() == {}


async def test_a_hand_off_can_be_fetched_once_and_is_gone_then(engines: Engines, text: list[int]):
    prompt = text[61_000:61_070]
    await engines.cold()
    first, handoff = await prefilled(engines, prompt)
    async with asyncio.timeout(PATIENCE_S):
        while await pinned_blocks(engines) != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert handoff.num_blocks == 3
    answer = await decoded(engines, prompt, first, handoff)
    assert await engines.becomes_idle() == {}
    before = await recomputed(engines)
    await engines.decode.reset_prefix_cache()
    again = await decoded(engines, prompt, first, handoff)
    after = await recomputed(engines)
    name = "recompute_total.unknown_handoff"
    assert after == {**before, name: before.get(name, 0) + 1}
    for each in (answer, again):
        await assert_the_models(engines, prompt, each, answer)


async def test_a_replica_answers_without_a_hand_off_and_counts_why(engines: Engines, text: list[int]):
    before = await recomputed(engines)
    answer, _ = await engines.run(
        engines.decode,
        leg="decode",
        prompt_token_ids=text[62_000:62_020],
        sampling=sampling.encode(WISH),
        recompute_reason="short_prompt",
    )
    assert len(answer.token_ids) == OUTPUT_TOKENS
    name = "recompute_total.short_prompt"
    assert await recomputed(engines) == {**before, name: before.get(name, 0) + 1}
