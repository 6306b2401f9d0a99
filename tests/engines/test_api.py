"""What clients of the HTTP port get: the official client, the other endpoints, clear refusals.

Streams, responses, Anthropic's messages and the list of models are asked for by the clients of others: `tests/clients`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.engines.harness import Engines, Increase

pytestmark = [pytest.mark.engines, pytest.mark.core, pytest.mark.asyncio(loop_scope="session")]

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name three colours of the rainbow."},
]


@pytest_asyncio.fixture(loop_scope="session")
async def client(engines: Engines) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{engines.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def num_prompt_tokens(engines: Engines) -> int:
    """Tokens of MESSAGES in the model's own chat template."""
    templated = engines.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return len(engines.tokenizer(templated, add_special_tokens=False)["input_ids"])


async def test_chat_answers_and_counts_its_tokens(client: AsyncOpenAI, engines: Engines, num_prompt_tokens: int):
    reply = await client.chat.completions.create(
        model=engines.model, messages=MESSAGES, max_tokens=10, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens)
    assert usage == (num_prompt_tokens, 10, num_prompt_tokens + 10)


async def test_two_choices_are_two_answers_to_one_prompt(client: AsyncOpenAI, engines: Engines, num_prompt_tokens: int):
    reply = await client.chat.completions.create(
        model=engines.model,
        messages=MESSAGES,
        n=2,
        max_tokens=12,
        temperature=1.0,
        seed=5,
        extra_body={"ignore_eos": True},
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].message.content != reply.choices[1].message.content
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt_tokens, 24)


async def test_two_choices_stream_side_by_side(client: AsyncOpenAI, engines: Engines):
    stream = await client.chat.completions.create(
        model=engines.model, messages=MESSAGES, n=2, max_tokens=6, temperature=1.0, seed=5, stream=True
    )
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0]
    assert texts[1]
    assert texts[0] != texts[1]


async def test_chat_logprobs_have_the_chosen_token_and_its_rivals(client: AsyncOpenAI, engines: Engines):
    reply = await client.chat.completions.create(
        model=engines.model, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert len(content) == reply.usage.completion_tokens  # type: ignore[union-attr]
    for position in content:
        assert len(position.top_logprobs) == 3
        assert position.logprob == max(rival.logprob for rival in position.top_logprobs)  # greedy


@pytest.mark.parametrize("where", ["first token", "later token"])
async def test_a_stop_string_ends_the_answer_before_it(client: AsyncOpenAI, engines: Engines, where: str):
    wish: dict[str, Any] = {"model": engines.model, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    await engines.cold()  # a cached prefix makes steps of another shape, which round otherwise in bfloat16
    text = (await client.chat.completions.create(**wish)).choices[0].message.content
    assert text is not None
    stop = text[:1] if where == "first token" else text[20:26]
    await engines.cold()
    stopped = await client.chat.completions.create(**wish, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert await engines.becomes_idle() == {}, "a stop string must free what the workers still hold"


@pytest.mark.proves("stop strings and tokens, `min_tokens`", "disaggregated")
async def test_a_stop_string_may_lie_across_the_hand_over(client: AsyncOpenAI, engines: Engines, text: list[int]):
    """The first token comes from one worker and the second from the other: text that spans both is still found."""
    prompt = text[30_000:30_040]
    await engines.cold()  # before each, as above
    answer = await client.completions.create(model=engines.model, prompt=prompt, max_tokens=6, temperature=0)
    await engines.cold()
    choice = await engines.complete(prompt, 2)
    first, second = (engines.tokenizer.decode([token]) for token in choice["token_ids"])
    stop = first[-1] + second[0]
    await engines.cold()
    stopped = await client.completions.create(
        model=engines.model, prompt=prompt, max_tokens=6, temperature=0, stop=[stop]
    )
    assert stopped.choices[0].text == answer.choices[0].text[: answer.choices[0].text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


async def test_completions_take_text_and_echo_nothing(client: AsyncOpenAI, engines: Engines):
    prompt = "The light of the sun is"
    reply = await client.completions.create(
        model=engines.model, prompt=prompt, max_tokens=8, temperature=0, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert not reply.choices[0].text.startswith(prompt)
    assert reply.choices[0].logprobs is not None
    assert len(reply.choices[0].logprobs.token_logprobs or []) == 8
    assert reply.usage is not None
    num_prompt_tokens = len(engines.tokenizer(prompt)["input_ids"])
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt_tokens, 8)


async def test_several_prompts_in_one_completion_are_answered_in_order(engines: Engines, text: list[int]):
    prompts = [text[31_000:31_030], text[32_000:32_050]]
    body = {"prompt": prompts, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = await engines.post("/v1/completions", body)
    alone = [await engines.tokens(prompt, 4) for prompt in prompts]
    if engines.dtype == "float32":
        assert [choice["token_ids"] for choice in reply["choices"]] == alone
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    for prompt, choice in zip(prompts, reply["choices"], strict=True):  # in one batch, so a tie may go another way
        assert len(choice["token_ids"]) == 4
        assert all(engines.is_tie(nat) for nat in await engines.behind_best_nats(prompt, choice["token_ids"]))
    assert reply["usage"] == {**reply["usage"], "prompt_tokens": 80, "completion_tokens": 8, "total_tokens": 88}


async def test_tokenize_and_health_answer(engines: Engines):
    reply = await engines.post("/tokenize", {"prompt": "The light of the sun"})
    assert reply["tokens"] == engines.tokenizer("The light of the sun")["input_ids"]
    assert (await engines.http.get("/health")).status_code == 200


async def test_prefixes_are_cached_for_one_cache_salt_only_on_prefill_and_on_decode(engines: Engines, text: list[int]):
    """Else the time to the first token would tell one tenant what another one has sent."""
    prompt = text[36_000:36_160]

    async def computed_and_fetched(**fields: str) -> tuple[int, float]:
        """Prompt tokens that prefill computed, bytes that decode fetched."""
        before = await engines.metrics()
        await engines.tokens(prompt, 4, **fields)
        assert await engines.becomes_idle() == {}
        counted = Increase(before, await engines.metrics())
        tokens = counted.sum("ridgeline_tokens_total", pool="prefill", phase="prefill")
        return int(tokens), counted.sum("ridgeline_kv_transfer_bytes_total", pool="decode", direction="received")

    await computed_and_fetched(cache_salt="what was counted before the first request")
    await engines.cold()
    first = await computed_and_fetched(cache_salt="a")
    again = await computed_and_fetched(cache_salt="a")
    assert first[0] == len(prompt)
    assert again[0] < first[0] / 2, "the same salt shares"
    assert again[1] < first[1] / 2
    assert await computed_and_fetched(cache_salt="b") == first
    assert await computed_and_fetched() == first


async def test_what_a_client_says_about_transfers_is_refused_before_any_work(engines: Engines, text: list[int]):
    """These keys name hosts, ports and other people's KV: only the router may set them."""
    prompt = text[33_000:33_080]
    handoff = {
        "handoff_id": "stolen",
        "address": "127.0.0.1:1",
        "block_ids": [0, 1, 2],
        "num_tokens": 80,
        "compatibility_hash": "0",
        "lease_s": 30.0,
        "num_bytes": 1,
    }
    hostile = {"do_remote_prefill": True, "do_remote_decode": True, "handoff": handoff, "recompute_reason": "mine"}
    before = await engines.metrics()
    for field in ({"kv_transfer_params": hostile}, {"vllm_xargs": {"kv_transfer_params": "x"}}):
        response = await engines.http.post("/v1/completions", json={"model": engines.model, "prompt": prompt, **field})
        assert response.status_code == 400, response.text
        assert next(iter(field)) in response.json()["error"]["message"]
    counted = Increase(before, await engines.metrics())
    assert counted.sum("ridgeline_steps_total") == counted.sum("ridgeline_requests_total") == 0


REFUSED = {
    "a prompt longer than the model's context": ({"prompt": [1] * 5000}, 400, "4096"),
    "an unknown model": ({"model": "gpt-17"}, 404, "gpt-17"),
    "no output wanted": ({"max_tokens": -1}, 400, "max_tokens"),
    "an answer of no tokens": ({"max_tokens": 0}, 400, "max_tokens"),
    "a token that does not exist": ({"prompt": [10_000_000]}, 400, "10000000"),
    "a temperature below zero": ({"temperature": -1}, 400, "temperature"),
    "an empty prompt": ({"prompt": []}, 400, "prompt"),
    "a schema that is none": ({"structured_outputs": {"json": '{"type": "nothing"}'}}, 400, ""),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_request_that_cannot_work_is_refused_with_its_reason(engines: Engines, what: str):
    fields, status, words = REFUSED[what]
    before = await engines.metrics()
    body = {"model": engines.model, "prompt": "Hello", "max_tokens": 4, **fields}
    response = await engines.http.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]
    assert Increase(before, await engines.metrics()).sum("ridgeline_steps_total") == 0, "work was done for nothing"
