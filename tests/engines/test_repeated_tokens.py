"""A worker that takes over a stream goes on exactly where the lost one was, whatever the sampling depends on."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from ridgeline.engine.request import sampling
from tests.engines.harness import Engines, Figure, first_difference

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

NUM_TOKENS = 20
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STATEFUL: dict[str, dict[str, Any]] = {
    "seeded sampling": {"temperature": 1.0, "seed": 11},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty with a seed": {"frequency_penalty": 1.2, "temperature": 0.8, "seed": 5},
    "a grammar with a seed": {
        "temperature": 0.9,
        "seed": 3,
        "structured_outputs": StructuredOutputsParams(json=SCHEMA),
        "ignore_eos": False,
    },
}


@pytest.mark.proves(
    (
        "seeds, `top_p`, `top_k`, `min_p`",
        "penalties, `logit_bias`, `bad_words`",
        "JSON schema, regex, grammar, choice",
    ),
    "after a lost worker",
)
@pytest.mark.parametrize("wish", STATEFUL.values(), ids=STATEFUL)
async def test_an_answer_goes_on_after_repeated_tokens_as_if_nothing_had_happened(
    engines: Engines, text: list[int], wish: dict[str, Any]
):
    prompt = text[30_000:30_090]
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS, **wish}
    await engines.cold()  # a cached prefix makes steps of another shape, which round otherwise in bfloat16
    whole = (await engines.reference(prompt, NUM_TOKENS, **params)).token_ids
    for had in (1, 11):
        assert len(whole) > had
        await engines.cold()
        rest, _ = await engines.run(
            engines.decode,
            leg="decode",
            prompt_token_ids=prompt,
            sampling=sampling.encode(SamplingParams(**params)),
            emitted_token_ids=whole[:had],
            first_token="resample",
        )
        assert rest.token_ids == whole[had:], f"after {had} repeated tokens"


async def test_a_plain_answer_goes_on_after_its_tokens_became_prompt(engines: Engines, text: list[int], figure: Figure):
    prompt, params = text[31_000:31_100], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)
    whole = (await engines.reference(prompt, NUM_TOKENS)).token_ids
    different = []
    for had in (1, 7, NUM_TOKENS - 1):
        rest, _ = await engines.run(
            engines.decode,
            leg="decode",
            prompt_token_ids=prompt,
            sampling=sampling.encode(params),
            emitted_token_ids=whole[:had],
        )
        ours = [*whole[:had], *rest.token_ids]
        assert len(ours) == NUM_TOKENS
        position = first_difference(ours, whole)
        if position is not None:
            behind_nat = await engines.behind_best_nat(prompt, whole[:position], ours[position])
            assert engines.is_tie(behind_nat)
            different.append((had, position, behind_nat))
    figure(f"3 answers continued, {len(different)} ties: {different}")
