"""A prompt split over two engines is answered as one engine answers it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from ridgeline.contracts.tasks import PositionLogprobs
from tests.engines.harness import Engines, Figure, Increase, first_difference
from tests.support.ties import behind_best_nat, tie_nat

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

NUM_OUTPUT_TOKENS = 4
NUM_SCORED = 10
END = 100
"""A token that no answer here has by itself."""
PREFILL_STEP_TOKENS = 512


FEW_LENGTHS = [1, 2, 5, 16, 17, 31, 32, 33, 48, 63, 64, 65, 90, 127, 128, 129, 512, 700]
"""Around block boundaries, one full step of prefill, and two steps."""
References = list[tuple[list[int], list[int]]]


def sixty_lengths() -> list[int]:
    """Around every small block boundary, a few long ones, and others in between."""
    around = [boundary + step for boundary in (32, 64, 96, 128, 256, 512) for step in (-1, 0, 1)]
    long = [700, 1200]
    few = [1, 2, 3, 4, 5, 6, 7, 8, 11, 15, 16, 17]
    rest = random.Random(7).sample(range(18, 120), 60 - len(around) - len(long) - len(few))
    return sorted([*around, *long, *few, *rest])


def prompts_of(text: list[int], lengths: list[int], start: int) -> list[list[int]]:
    prompts = []
    for length in lengths:
        prompts.append(text[start : start + length])
        start += length
    return prompts


async def answered_by_one(engines: Engines, text: list[int], lengths: list[int]) -> References:
    """Prompts of these lengths, and what one engine answers to each with a cold cache."""
    answers = []
    for prompt in prompts_of(text, lengths, start=0):
        await engines.cold()
        answers.append((prompt, (await engines.reference(prompt, NUM_OUTPUT_TOKENS)).token_ids))
    return answers


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def references(deployment: Engines, text: list[int]) -> References:
    return await answered_by_one(deployment, text, FEW_LENGTHS)


@pytest.mark.proves("greedy answers, whole and streamed", "disaggregated")
@pytest.mark.core
@pytest.mark.exact
async def test_greedy_tokens_are_those_of_one_engine_bit_for_bit_on_every_prompt(
    engines: Engines, references: References, figure: Figure
):
    await all_are_equal(engines, references, "shm", figure)


@pytest.mark.core
@pytest.mark.parametrize("transport", ["grpc", "collective"])
async def test_another_transport_brings_the_same_tokens(
    engines: Engines, references: References, transport: str, figure: Figure
):
    """What it carries does not depend on the prompt, so it is given a third of them."""
    await all_are_equal(engines, references[2::3], transport, figure)


@pytest.mark.long
async def test_greedy_tokens_are_those_of_one_engine_bit_for_bit_on_60_of_60_prompts(
    engines: Engines, text: list[int], figure: Figure
):
    lengths = sixty_lengths()
    assert (len(lengths), lengths[0], lengths[-1]) == (60, 1, 1200)
    await all_are_equal(engines, await answered_by_one(engines, text, lengths), "shm", figure)


async def all_are_equal(engines: Engines, asked: References, transport: str, figure: Figure) -> None:
    """Ask for these prompts through the split and this transport, each with a cold cache."""
    await engines.use_transport(transport)
    before = await engines.metrics()
    different = []
    for prompt, reference in asked:
        await engines.cold()
        ours = await engines.tokens(prompt, NUM_OUTPUT_TOKENS)
        if ours != reference:
            different.append((len(prompt), first_difference(ours, reference)))
    counted = Increase(before, await engines.metrics())
    await engines.use_transport("auto")
    followed = counted.sum("ridgeline_overlapped_handoffs_total", result="ok")
    num_tokens = sum(len(prompt) for prompt, _ in asked)
    equal = len(asked) - len(different)
    figure(f"{transport}: {equal} of {len(asked)} prompts equal, {num_tokens} prompt tokens, {followed:.0f} followed")
    assert different == []
    # Equal for the right reason: every prompt was computed on one worker and fetched by the other.
    assert counted.sum("ridgeline_requests_total", path="disaggregated", outcome="finished") == len(asked)
    assert counted.sum("ridgeline_fetches_total", pool="decode", result="ok") == len(asked)
    assert counted.sum("ridgeline_recompute_total") == 0
    assert followed == len(asked)
    assert any(len(prompt) > PREFILL_STEP_TOKENS for prompt, _ in asked)


AT_A_TIME = 16
TOGETHER_TOKENS = AT_A_TIME * 15 / 2
"""Of those that must have shared a step with others: half of what one round makes in decode."""
MOST_ROUNDS = 5


@pytest.mark.exact
async def test_16_at_a_time_differ_from_one_engine_only_at_ties(engines: Engines, text: list[int], figure: Figure):
    """How many of them meet in a step is up to the machine: rounds go on until enough tokens were made together."""
    together, behind_nat, rounds = 0.0, list[float](), 0
    before = await engines.metrics()
    while together < TOGETHER_TOKENS and rounds < MOST_ROUNDS:
        lengths = random.Random(11 + rounds).sample(range(20, 120), AT_A_TIME)
        prompts = prompts_of(text, lengths, start=20_000 + 2_000 * rounds)
        await engines.cold()
        steps_before = await decode_steps(engines)
        answers = await asyncio.gather(*(engines.tokens(prompt, 16) for prompt in prompts))
        together += AT_A_TIME * 15 - (await decode_steps(engines) - steps_before)
        for prompt, answer in zip(prompts, answers, strict=True):
            behind_nat += await engines.behind_best_nats(prompt, answer)
        rounds += 1
    counted = Increase(before, await engines.metrics())
    apart = sorted(nat for nat in behind_nat if nat)
    figure(f"{rounds} rounds, {together:.0f} tokens made together; nat behind one engine's best, where not 0: {apart}")
    assert [nat for nat in apart if not engines.is_tie(nat)] == []
    assert together >= TOGETHER_TOKENS, "the decode worker did not run them together"
    assert counted.sum("ridgeline_recompute_total") == 0


async def decode_steps(engines: Engines) -> float:
    """What the decode worker has counted once it is idle: it tells of a step at its end, as /metrics does later."""
    assert await engines.becomes_idle() == {}
    counters = (await engines.decode.status()).counters
    return sum(value for name, value in counters.items() if name.startswith("steps_total."))


@pytest.mark.proves("cached prefixes", "disaggregated")
async def test_a_warm_prefix_cache_gives_the_same_tokens(engines: Engines, text: list[int]):
    prompt = text[25_000:25_150]
    await engines.cold()
    reference = (await engines.reference(prompt, 8)).token_ids
    await engines.cold()
    for _ in range(3):  # nothing cached; both sides cached; cached again
        ours = await engines.tokens(prompt, 8)
        position = first_difference(ours, reference)
        if position is not None:
            assert engines.is_tie(await engines.behind_best_nat(prompt, reference[:position], ours[position]))


# --- requests in which the decode worker samples the first token itself

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


PERSON: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe a person as JSON."}],
    "max_completion_tokens": 120,
    "temperature": 0.8,
    "seed": 1,
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
}


@pytest.mark.parametrize("beside", [{}, {"min_tokens": 100}], ids=str)
async def test_structured_output_is_json_of_its_schema(engines: Engines, beside: dict[str, Any]):
    before = await engines.metrics()
    choice = (await engines.post("/v1/chat/completions", PERSON | beside))["choices"][0]
    counted = Increase(before, await engines.metrics())
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    first_tokens = "ridgeline_first_token_total"
    assert counted.sum(first_tokens, mode="resample", reason="structured_output") == counted.sum(first_tokens) == 1
    assert counted.sum("ridgeline_recompute_total") == 0


@pytest.mark.parametrize("mask", ["allowed_token_ids", "bad_words", "logit_bias"])
async def test_a_mask_that_contradicts_a_grammar_breaks_no_answer_and_no_engine(engines: Engines, mask: str):
    (brace,) = engines.tokenizer("{", add_special_tokens=False)["input_ids"]
    value = {"allowed_token_ids": [brace + 1], "bad_words": ["{", '"'], "logit_bias": {str(brace): -100}}[mask]
    body = {"model": engines.model, **PERSON, mask: value}
    response = await engines.http.post("/v1/chat/completions", json=body)
    if response.status_code == 200 and (choice := response.json()["choices"][0])["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    assert response.status_code == 200 or (response.status_code == 400 and response.json()["error"]["message"])
    assert len(await engines.tokens([brace] * 40, 2)) == 2, "it still answers"


RESAMPLED = {
    "presence_penalty": {"presence_penalty": 1.2},
    "frequency_penalty": {"frequency_penalty": 0.9},
    "seed": {"seed": 4711, "temperature": 0.9},
    "bad_words": {"bad_words": [" the", " of"]},
}


@pytest.mark.parametrize("reason", RESAMPLED)
async def test_sampling_that_depends_on_the_first_token_is_that_of_one_engine(
    engines: Engines, text: list[int], reason: str
):
    params = RESAMPLED[reason]
    prompt = text[26_000:26_070]
    before = await engines.metrics()
    await engines.cold()
    ours = await engines.tokens(prompt, 16, **params)
    counted = Increase(before, await engines.metrics())
    assert counted.by_label("ridgeline_first_token_total", "reason") == {reason: 1}
    assert counted.sum("ridgeline_recompute_total") == 0
    await engines.cold()
    assert await engines.tokens(prompt, 16, **params) == ours, "not reproducible"
    if engines.dtype == "float32":  # the last prompt token passes another matrix shape: bfloat16 may round it apart
        await engines.cold()
        assert ours == (await engines.reference(prompt, 16, **params)).token_ids
    plain = {"temperature": params.get("temperature", 0)}
    assert ours != await engines.tokens(prompt, 16, **plain), "the parameter had no effect: this test shows nothing"


def token_logprobs(choice: dict[str, Any]) -> list[dict[int, float]]:
    """Token id to logprob at each position; ids come as "token_id:7"."""
    return [
        {int(token.removeprefix("token_id:")): value for token, value in position.items()}
        for position in choice["logprobs"]["top_logprobs"]
    ]


@pytest.mark.proves("log-probabilities of the answer", "disaggregated")
@pytest.mark.parametrize("params", [{}, {"presence_penalty": 1.2}], ids=["continue", "resample"])
async def test_logprobs_are_within_a_hundredth_of_one_engine(
    engines: Engines, text: list[int], params: dict[str, float], figure: Figure
):
    prompt = text[27_000:27_100]
    await engines.cold()
    choice = await engines.complete(prompt, NUM_SCORED, logprobs=5, return_tokens_as_token_ids=True, **params)
    await engines.cold()
    reference = await engines.reference(prompt, NUM_SCORED, logprobs=5, **params)
    ours = choice["token_ids"]
    different_at = first_difference(ours, reference.token_ids)
    if different_at is not None:
        had = set(ours[:different_at])
        penalties = dict.fromkeys(had, params.get("presence_penalty", 0.0))
        behind_nat = behind_best_nat(reference.logprobs[different_at], ours[different_at], penalties)
        figure(f"a tie at token {different_at}: {behind_nat:.3f} nat behind")
        assert engines.is_tie(behind_nat)
    worst = 0.0
    same = NUM_SCORED if different_at is None else different_at + 1  # the answers before are the same up to there
    for mine, theirs in list(zip(token_logprobs(choice), reference.logprobs, strict=True))[:same]:
        expected = dict(zip(theirs.token_ids, theirs.logprobs, strict=True))
        assert len(mine) >= 5
        common = mine.keys() & expected.keys()
        assert len(common) >= 4  # the fifth may change places with the sixth
        worst = max(worst, *(abs(mine[token] - expected[token]) for token in common))
    figure(f"largest difference {worst:.2e} nat")
    assert worst <= max(1e-2, tie_nat(engines.dtype))


async def test_prompt_logprobs_are_those_of_one_engine(engines: Engines, text: list[int]):
    prompt = text[28_000:28_040]
    await engines.cold()
    choice = await engines.complete(prompt, 4, prompt_logprobs=1)
    await engines.cold()
    reference = await engines.reference(prompt, 4, prompt_logprobs=1)
    assert choice["token_ids"] == reference.token_ids
    rows = zip(prompt, choice["prompt_logprobs"], strict=True)
    values = [row and row[str(token)]["logprob"] for token, row in rows]
    assert_near(values, reference.prompt_logprobs, prompt)


def assert_near(ours: list[Any], reference: list[PositionLogprobs | None], prompt: list[int]) -> None:
    """The prompt's own log-probabilities as the API gives them, against the engine's."""
    assert len(ours) == len(prompt) == len(reference)
    assert ours[0] is reference[0] is None
    for token, value, theirs in zip(prompt[1:], ours[1:], reference[1:], strict=True):
        assert theirs is not None
        assert value == pytest.approx(dict(zip(theirs.token_ids, theirs.logprobs, strict=True))[token], abs=1e-2)


@pytest.mark.proves("log-probabilities of the prompt, `echo`", "disaggregated")
@pytest.mark.parametrize(
    ("how", "wish", "start"),
    [
        ("prompt_logprobs", {}, 35_000),
        ("echo", {}, 36_500),
        ("prompt_logprobs", {"presence_penalty": 1.2}, 38_000),
    ],
    ids=["prompt_logprobs", "echo", "resample"],
)
async def test_a_scored_prompt_of_several_steps_is_transferred_and_answered_as_by_one_engine(
    engines: Engines, text: list[int], how: str, wish: dict[str, float], start: int, figure: Figure
):
    """Harnesses ask for this. vLLM keeps such a request from its caches, and once from the transferred KV as well."""
    length = PREFILL_STEP_TOKENS + 100
    prompt = text[start : start + length]
    await engines.cold()
    reference = await engines.reference(prompt, 8, prompt_logprobs=1, logprobs=20, **wish)
    await engines.cold()
    before = await engines.metrics()
    if how == "echo":
        reply = await engines.complete(prompt, 8, echo=True, logprobs=1, **wish)
        values = reply["logprobs"]["token_logprobs"][:length]
    else:
        reply = await engines.complete(prompt, 8, prompt_logprobs=1, **wish)
        rows = zip(prompt, reply["prompt_logprobs"], strict=True)
        values = [row and row[str(token)]["logprob"] for token, row in rows]
    counted = Increase(before, await engines.metrics())
    position = first_difference(reply["token_ids"], reference.token_ids)
    if position is not None:
        common, token = reference.token_ids[:position], reply["token_ids"][position]
        penalties = dict.fromkeys(common, wish.get("presence_penalty", 0.0))
        assert engines.is_tie(behind_best_nat(reference.logprobs[position], token, penalties))
    assert_near(values, reference.prompt_logprobs, prompt)
    assert counted.sum("ridgeline_requests_total", path="disaggregated", outcome="finished") == 1
    assert counted.sum("ridgeline_fetches_total", pool="decode", result="ok") == 1
    assert counted.sum("ridgeline_overlapped_handoffs_total", result="ok") == 1
    assert counted.sum("ridgeline_recompute_total") == 0
    figure(f"{length} tokens, TTFT {counted.sum('ridgeline_ttft_seconds_sum') * 1000:.0f} ms")


@pytest.mark.parametrize(
    "beside",
    [{}, {"seed": 7, "temperature": 0.9}, {"presence_penalty": 1.2}, {"stop_token_ids": [END]}],
    ids=str,
)
@pytest.mark.parametrize("least", [0, 1, 2, 5])
async def test_an_answer_ends_at_a_forced_end_and_not_before_its_minimum_on_either_side_of_the_hand_over(
    engines: Engines, text: list[int], least: int, beside: dict[str, Any]
):
    end = END if "stop_token_ids" in beside else engines.tokenizer.eos_token_id
    wish = {"min_tokens": least, "logit_bias": {str(end): 100}, "temperature": 0, "max_tokens": 20, **beside}
    body = {"model": engines.model, "prompt": text[30_500:30_540], "return_token_ids": True, **wish}
    whole = await engines.post("/v1/completions", body)
    (choice,) = whole["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"]), choice["token_ids"][-1]) == ("stop", least + 1, end)
    assert bool(choice["text"]) == bool(least)
    streamed = await engines.http.post("/v1/completions", json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    parts = [part for event in events for part in event["choices"]]
    assert [token for part in parts for token in part["token_ids"] or []] == choice["token_ids"]
    assert ("".join(part["text"] for part in parts), parts[-1]["finish_reason"]) == (choice["text"], "stop")


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
async def test_the_shortest_answers_have_their_exact_length(engines: Engines, text: list[int], num_tokens: int):
    prompt = text[29_000:29_040]
    await engines.cold()
    choice = await engines.complete(prompt, num_tokens)
    await engines.cold()
    assert choice["token_ids"] == (await engines.reference(prompt, num_tokens)).token_ids
    assert choice["finish_reason"] == "length"
    assert await engines.becomes_idle() == {}


@pytest.mark.exact
async def test_a_seed_with_a_prompt_of_several_steps_gives_the_same_answer_as_one_engine_and_ends_none(
    engines: Engines, text: list[int]
):
    # vLLM alone ends a CPU engine on this: it winds the generator back after each unfinished step.
    prompt = text[33_000 : 33_000 + PREFILL_STEP_TOKENS + 100]
    wish = {"temperature": 0.8, "seed": 11}
    await engines.cold()
    reference = (await engines.reference(prompt, 8, **wish)).token_ids
    await engines.cold()
    ours = await engines.tokens(prompt, 8, **wish)
    if engines.dtype == "float32":  # the last prompt token passes another matrix shape: bfloat16 may round it apart
        assert ours == reference
    await engines.cold()
    assert await engines.tokens(prompt, 8, **wish) == ours, "not reproducible"
    assert await engines.tokens(text[34_000:34_020], 2)
