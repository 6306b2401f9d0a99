"""Each feature of requests in each mode, and after the decode worker is lost: answers are those of plain vLLM.

One deployment of a small model for all of these tests, and vLLM's own server with the same model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.runtime.plan import make_plan
from tests.engines.conftest import CONFIG, book, deployed
from tests.engines.harness import Engines, Figure, Increase
from tests.engines.serve_process import engines_below
from tests.engines.test_modes import change
from tests.support.patience import PATIENCE_S
from tools.differential.cases import Case
from tools.differential.compare import Judge
from tools.differential.plain import plain_vllm

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session")]

MODES = ("disaggregated", "colocated", "adaptive")
POOLS = ("prefill", "decode", "colocated")
PROMPT_TOKENS = 150
"""Two steps of prefill."""
SHORT_TOKENS, LONG_TOKENS = 8, 200
"""Of answers: long ones still run when their worker is lost."""
MORE_TOKENS = 20
CITIES = ["Paris", "Rome", "Oslo"]
GREEDY = {"temperature": 0, "ignore_eos": True}
SEEDED = {"temperature": 0.9, "seed": 11, "ignore_eos": True}

Body = dict[str, Any]
FEATURES: dict[str, Callable[[int], list[Body]]] = {
    "greedy answers, whole and streamed": lambda tokens: [GREEDY, GREEDY | {"stream": True}],
    "seeds, `top_p`, `top_k`, `min_p`": lambda tokens: [
        SEEDED,
        SEEDED | {"top_p": 0.9, "stream": True},
        SEEDED | {"top_k": 40, "min_p": 0.05},
    ],
    "penalties, `logit_bias`, `bad_words`": lambda tokens: [
        GREEDY | {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        GREEDY | {"repetition_penalty": 1.3},
        SEEDED | {"logit_bias": {"300": 4, "301": -100}, "bad_words": [" the", "e"]},
    ],
    "stop strings and tokens, `min_tokens`": lambda tokens: [
        SEEDED | {"stop": ["e", "a"], "min_tokens": tokens, "stream": True},
        SEEDED | {"stop_token_ids": [*range(1000, 11_000)], "min_tokens": tokens},
    ],
    "log-probabilities of the answer": lambda tokens: [GREEDY | {"logprobs": 3}, SEEDED | {"logprobs": 0}],
    "log-probabilities of the prompt, `echo`": lambda tokens: [
        GREEDY | {"prompt_logprobs": 1},
        GREEDY | {"echo": True, "logprobs": 1},
    ],
    "several answers (`n`)": lambda tokens: [SEEDED | {"n": 2}, SEEDED | {"n": 2, "stream": True}],
    "JSON schema, regex, grammar, choice": lambda tokens: [
        structured(json={"type": "array", "items": {"enum": CITIES}, "minItems": tokens, "maxItems": tokens}),
        structured(regex=f"[a-d]{{{4 * tokens}}}"),
        structured(grammar='root ::= ("yes" | "no" | "maybe ")+') | {"min_tokens": tokens},
        structured(choice=["red " * tokens, "green " * tokens]),
    ],
    "chat": lambda tokens: [{"messages": True, "stream": stream, **GREEDY} for stream in (False, True)],
}


def structured(**wish: Any) -> Body:
    return {"temperature": 0.9, "seed": 3, "structured_outputs": wish}


@dataclass
class Both:
    """Ridgeline's deployment and plain vLLM, and a text to ask them of."""

    engines: Engines
    plain: httpx.AsyncClient
    judge: Judge
    text: list[int]

    def __post_init__(self) -> None:
        self._numbers = count()

    def case(self, fields: Body, tokens: int) -> Case:
        """A request of so many tokens, or a few more, with a prompt of its own."""
        number = next(self._numbers)
        prompt = self.text[200 * number :][:PROMPT_TOKENS]
        said: Body = {"prompt": prompt}
        if "messages" in fields:
            said = {"messages": [{"role": "user", "content": self.engines.tokenizer.decode(prompt)}]}
        body = {"max_tokens": tokens + MORE_TOKENS, "return_token_ids": True, **fields, **said}
        return Case(number, "/v1/chat/completions" if "messages" in fields else "/v1/completions", body, again=False)

    async def differs(self, case: Case) -> str:
        """How the answer is another one than plain vLLM's."""
        verdict = await self.judge.verdict(case)
        return verdict.difference or verdict.plain_failed or ("" if verdict.status == 200 else f"{verdict.status}")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def both(small_model: dict[str, str]) -> AsyncIterator[Both]:
    settings = {
        **small_model,
        "model.dtype": "float32",
        "model.max_model_len": "1024",
        "server_args.tool_call_parser": "hermes",
        # Else plain vLLM lets a model write any number of blanks, and we one at most.
        "engine_args.structured_outputs_config": "{backend: guidance, disable_any_whitespace: true}",
        **{f"pools.{pool}.max_num_batched_tokens": "128" for pool in POOLS},
        **{f"pools.{pool}.kv_cache_memory_bytes": "256 MiB" for pool in POOLS},
        **{f"pools.{pool}.max_num_seqs": "64" for pool in POOLS},
    }
    plan = await asyncio.to_thread(make_plan, load_config(CONFIG, settings).config)
    # Its process is forked before this one has threads of Ray's and gRPC's, which no fork survives.
    async with plain_vllm(plan) as plain, deployed(settings) as engines:
        await plain.ready()
        judge = Judge(engines.http, plain.http, engines.model, engines.dtype)
        yield Both(engines, plain.http, judge, book(engines))


# --- what has no logits to compare, or goes by another path


async def forced_call(both: Both, tokens: int) -> str:
    """What is wrong with the arguments of a tool that must be called."""
    cities = {"type": "array", "items": {"enum": CITIES}, "minItems": tokens, "maxItems": tokens}
    parameters = {"type": "object", "properties": {"of": cities}, "required": ["of"], "additionalProperties": False}
    reply = await both.engines.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Look up the weather of many cities."}],
            "tools": [{"type": "function", "function": {"name": "look", "strict": True, "parameters": parameters}}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "temperature": 0.9,
            "seed": 5,
            "max_tokens": 700,
        },
    )
    [call] = reply["choices"][0]["message"]["tool_calls"]
    told = json.loads(call["function"]["arguments"])["of"]
    return "" if len(told) == tokens and {*told} <= {*CITIES} else f"{told}"


async def tagged(both: Both, tokens: int) -> str:
    """What is wrong with the text of a structural tag."""
    content = {"type": "regex", "pattern": f"[a-d]{{{4 * tokens}}}"}
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<it>", "content": content, "end": "</it>"}}
    body = {"prompt": "It is", "max_tokens": 5 * tokens + 20, **structured(structural_tag=json.dumps(tag))}
    text = (await both.engines.post("/v1/completions", body))["choices"][0]["text"]
    return "" if re.fullmatch(f"<it>[a-d]{{{4 * tokens}}}</it>", text) else text


async def converted(both: Both, tokens: int) -> str:
    """How the answer of another API differs from plain vLLM's."""
    question = "Tell me all that you know about light and colours."
    bodies: dict[str, Body] = {
        "/v1/responses": {"input": question, "max_output_tokens": tokens, "store": False, "ignore_eos": True},
        "/v1/messages": {"messages": [{"role": "user", "content": question}], "max_tokens": tokens},
    }

    async def answer(http: httpx.AsyncClient, path: str) -> tuple[str, Any]:
        reply = await http.post(path, json={"model": both.engines.model, "temperature": 0, **bodies[path]})
        assert reply.status_code == 200, reply.text
        told = reply.json()
        parts = told["content"] if path == "/v1/messages" else told["output"][0]["content"]
        return "".join(part["text"] for part in parts), told["usage"]["output_tokens"]

    ours = await asyncio.gather(*(answer(both.engines.http, path) for path in bodies))
    theirs = [await answer(both.plain, path) for path in bodies]
    return "" if ours == theirs else f"{ours} for {theirs}"


OTHERS: dict[str, tuple[Callable[[Both, int], Any], int]] = {
    "forced and strict tools": (forced_call, 1),
    "structural tags": (tagged, 1),
    "`/v1/responses`, `/v1/messages`": (converted, 2),
}
"""Each with how many sequences it asks for."""


def all_at_once(both: Both, tokens: int) -> tuple[dict[str, asyncio.Task[str]], int]:
    """Ask for every feature; how each answer differs, by name, and how many sequences that are."""
    answers = {name: asyncio.create_task(differs(both, tokens)) for name, (differs, _) in OTHERS.items()}
    sequences = sum(count for _, count in OTHERS.values())
    for feature, bodies in FEATURES.items():
        for number, body in enumerate(bodies(tokens)):
            answers[f"{feature}, {number}"] = asyncio.create_task(both.differs(both.case(body, tokens)))
            sequences += body.get("n", 1)
    return answers, sequences


async def all_agree(answers: dict[str, asyncio.Task[str]], subtests: pytest.Subtests) -> None:
    for name, difference in zip(answers, await asyncio.gather(*answers.values()), strict=True):
        with subtests.test(name):
            assert difference == ""


@pytest.mark.proves(FEATURES, MODES)
@pytest.mark.proves(OTHERS, MODES)
@pytest.mark.parametrize("mode", MODES)
async def test_every_feature_is_answered_as_by_plain_vllm(
    both: Both, mode: str, figure: Figure, subtests: pytest.Subtests
):
    await change(both.engines, mode)
    before = await both.engines.metrics()
    answers, asked = all_at_once(both, SHORT_TOKENS)
    await all_agree(answers, subtests)
    paths = Increase(before, await both.engines.metrics()).by_label("ridgeline_requests_total", "path")
    figure(f"{mode}: {asked} sequences, by path {paths}")
    assert sum(paths.values()) == asked
    assert mode == "adaptive" or paths.keys() == {mode}


@pytest.mark.proves("cached prefixes", MODES)
@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_on_a_cached_prefix_is_plain_vllms(both: Both, mode: str):
    await change(both.engines, mode)
    before = await both.engines.metrics()
    case = both.case(GREEDY, SHORT_TOKENS)
    assert await both.differs(Case(case.number, case.path, case.body, again=True)) == ""
    assert Increase(before, await both.engines.metrics()).sum("ridgeline_prefix_cache_hit_tokens_total") > 0


@pytest.mark.proves(FEATURES, "after a lost worker")
@pytest.mark.proves(OTHERS, "after a lost worker")
async def test_every_feature_goes_on_as_plain_vllms_answer_when_its_worker_is_killed(
    both: Both, figure: Figure, subtests: pytest.Subtests
):
    """The prefill worker goes on with all of them. The last of these tests: the worker takes a while to return."""
    await change(both.engines, "disaggregated")
    before = await both.engines.metrics()
    answers, asked = all_at_once(both, LONG_TOKENS)
    worker = both.engines.decode
    pid = (await worker.describe()).pid
    async with asyncio.timeout(PATIENCE_S):
        while (status := await worker.status()).running < asked or status.counters.get("waiting_for_kv"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    engines_below(psutil.Process(pid))[0].kill()
    await all_agree(answers, subtests)
    moved = Increase(before, await both.engines.metrics()).by_label("ridgeline_retries_total", "state")
    figure(f"{asked} sequences, moved in the states {moved}")
    assert moved == {"decoding": asked}
