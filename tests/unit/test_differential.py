"""Random requests are the same for the same seed, and a difference between two servers is found."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from fake_engine import next_token
from talking_router import WORDS, TalkingEngine, make_model, talking_router

from tests.differential.cases import Case, Material, drawn
from tests.differential.compare import Judge

COUNT = 25


class WordTokenizer:
    """Of the fakes' model."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(f"w{token}" for token in token_ids)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    book = [5 + position * 31 % (WORDS - 5) for position in range(3000)]
    return drawn(Material(book, WordTokenizer(), WORDS, step_tokens=64, longest_tokens=256), at=3, count=COUNT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tmp_path_factory.mktemp("model")
    make_model(model)
    async with talking_router(model) as (http, _, engines):
        yield http, engines


def test_the_same_seed_draws_the_same_requests_and_no_two_alike(cases: list[Case]):
    book = [5 + position * 31 % (WORDS - 5) for position in range(3000)]
    again = drawn(Material(book, WordTokenizer(), WORDS, step_tokens=64, longest_tokens=256), at=3, count=COUNT)
    assert again == cases
    assert [case.number for case in cases] == list(range(COUNT))
    assert not any(
        one.body == other.body and one.again == other.again for one, other in itertools.combinations(cases, 2)
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_does_not_differ_from_itself(served: Any, cases: list[Case]):
    http, _ = served
    judge = Judge(http, http, "m", "float32")
    for case in cases:
        verdict = await judge.verdict(case)
        assert verdict.difference == "", str(case)
        assert verdict.ties == []
        assert verdict.status in (200, 400)


WRONG = {
    "a token": lambda delta: msgspec.structs.replace(
        delta, token_ids=[(token + 1) % WORDS for token in delta.token_ids]
    ),
    "a log-probability": lambda delta: msgspec.structs.replace(
        delta,
        logprobs=delta.logprobs
        and [
            msgspec.structs.replace(each, logprobs=[each.logprobs[0] - 0.1, *each.logprobs[1:]])
            for each in delta.logprobs
        ],
    ),
    "a prompt's log-probability": lambda delta: msgspec.structs.replace(
        delta,
        prompt_logprobs=delta.prompt_logprobs
        and [
            each and msgspec.structs.replace(each, logprobs=[each.logprobs[0] - 0.1, *each.logprobs[1:]])
            for each in delta.prompt_logprobs
        ],
    ),
    "a reason": lambda delta: msgspec.structs.replace(
        delta, finish_reason="stop" if delta.finish_reason == "length" else delta.finish_reason
    ),
}


class OddServer:
    """The same server, whose decode engine goes wrong while it is asked."""

    def __init__(self, http: Any, engine: TalkingEngine, wrong: Any) -> None:
        self._http, self._engine, self._wrong = http, engine, wrong

    async def post(self, *args: Any, **kwargs: Any) -> Any:
        right = self._engine.generate

        async def generate(*given: Any, **options: Any) -> Any:
            async for delta in right(*given, **options):
                yield self._wrong(delta)

        self._engine.generate = generate  # type: ignore[method-assign]
        try:
            return await self._http.post(*args, **kwargs)
        finally:
            del self._engine.generate


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_wrong_in_one_of_them_is_found(served: Any, what: str, stream: bool):
    http, engines = served
    prompt = [20, 21, 22, 23]
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    told = {"stream": True, "logprobs": 2} if stream else {"prompt_logprobs": 1, "logprobs": 2}
    which = engines[0] if what.startswith("a prompt") else engines[1]
    if stream and what.startswith("a prompt"):
        pytest.skip("vLLM tells none in a stream")
    judge = Judge(OddServer(http, which, WRONG[what]), http, "m", "float32")  # type: ignore[arg-type]
    verdict = await judge.verdict(Case(0, "/v1/completions", body | told, again=False))
    assert verdict.difference
    assert next_token(prompt)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_refusal_by_one_of_them_is_a_difference(served: Any):
    http, _ = served

    class Refusing:
        async def post(self, path: str, json: Any) -> Any:
            return await http.post(path, json=json | {"max_tokens": -1})

    judge = Judge(Refusing(), http, "m", "float32")  # type: ignore[arg-type]
    verdict = await judge.verdict(Case(0, "/v1/completions", {"prompt": "w20", "max_tokens": 2}, again=False))
    assert verdict.difference.startswith("400")
