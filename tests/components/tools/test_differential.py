"""Random requests are the same for the same seed, and a difference between two servers is found."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.support.talking_router import WORDS, TalkingEngine, make_model, talking_router
from tools.differential.cases import NOT_DRAFTED, Case, Material, drawn
from tools.differential.compare import Judge
from tools.differential.plain import PlainServerEnded, serving
from tools.differential.run import Both, judged

COUNT = 25


class WordTokenizer:
    """Of the fakes' model."""

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(f"w{token}" for token in token_ids)


BOOK = [5 + position * 31 % (WORDS - 5) for position in range(9000)]
MATERIAL = Material(BOOK, WordTokenizer(), WORDS, step_tokens=64, longest_tokens=256)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return drawn(MATERIAL, at=3, count=COUNT)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tmp_path_factory.mktemp("model")
    make_model(model)
    async with talking_router(model) as (http, _, engines):
        yield http, engines


def test_the_same_seed_draws_the_same_requests_and_no_two_alike(cases: list[Case]):
    assert drawn(MATERIAL, at=3, count=COUNT) == cases
    assert [case.number for case in cases] == list(range(COUNT))
    assert not any(
        one.body == other.body and one.again == other.again for one, other in itertools.combinations(cases, 2)
    )


def test_requests_draw_an_adapter_or_none_and_those_beside_drafts_are_greedy_without_what_drafts_lack():
    adapted = drawn(replace(MATERIAL, adapters=("one", "two")), at=3, count=COUNT)
    assert {case.body.get("model") for case in adapted} == {None, "one", "two"}
    for case in drawn(replace(MATERIAL, speculates=True), at=3, count=COUNT):
        assert case.body.get("temperature", 0.0) == 0.0
        assert case.body.keys().isdisjoint(NOT_DRAFTED)


@pytest.mark.slow
def test_the_draws_have_every_kind_of_log_probability_also_for_prompts_of_several_steps():
    def steps(case: Case) -> int:
        prompt = case.body.get("prompt") or [case.body.get("query")]
        ids = max((each for each in prompt if isinstance(each, list)), key=len, default=prompt)
        return -(-len(ids) // MATERIAL.step_tokens) if isinstance(ids, list) else 0

    many = drawn(MATERIAL, at=1, count=500)
    scoring = [case for case in many if case.path == "/generative_scoring"]
    scored = [case for case in many if "prompt_logprobs" in case.body]
    echoed = [case for case in many if case.body.get("echo") and "logprobs" in case.body]
    named = [case for case in many if "logprob_token_ids" in case.body]
    for kind in (scoring, scored, echoed, named):
        assert len(kind) >= 10
        assert max(steps(case) for case in kind) >= 3
    assert {case.path for case in scored} == {"/v1/completions", "/v1/chat/completions"}


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


@pytest.mark.asyncio(loop_scope="module")
async def test_a_refusal_by_one_of_them_is_a_difference(served: Any):
    http, _ = served

    class Refusing:
        async def post(self, path: str, json: Any) -> Any:
            return await http.post(path, json=json | {"max_tokens": -1})

    judge = Judge(Refusing(), http, "m", "float32")  # type: ignore[arg-type]
    verdict = await judge.verdict(Case(0, "/v1/completions", {"prompt": "w20", "max_tokens": 2}, again=False))
    assert verdict.difference.startswith("400")


@pytest.mark.asyncio(loop_scope="module")
async def test_scores_are_compared_and_other_ones_are_found(served: Any):
    http, engines = served
    body = {"query": [20, 21], "items": [[22], [23]], "label_token_ids": [30, 31], "apply_softmax": False}
    case = Case(0, "/generative_scoring", body, again=False)
    assert (await Judge(http, http, "m", "float32").verdict(case)).difference == ""

    def wrong(delta: Any) -> Any:
        told = [msgspec.structs.replace(each, logprobs=[-0.5, -3.0, -3.0]) for each in delta.logprobs or ()]
        return msgspec.structs.replace(delta, logprobs=told or delta.logprobs)

    odd: Any = OddServer(http, engines[0], wrong)
    verdict = await Judge(odd, http, "m", "float32").verdict(case)
    assert verdict.difference.startswith("score 0 is 0.04")


class Undecided:
    """A server of two tokens that are almost equally good to it: the second is so much behind."""

    def __init__(self, behind_nat: float) -> None:
        self.behind_nat = behind_nat
        self.asked: list[dict[str, Any]] = []

    async def post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        self.asked.append(json)
        bias = json.get("logit_bias", {})
        second = bias.get("8", 0.0) - self.behind_nat > bias.get("7", 0.0)
        choice = {"index": 0, "text": "", "token_ids": [5, 8 if second else 7], "prompt_token_ids": [1]}
        if "stream" not in json and "prompt_logprobs" in json:  # which no stream has
            choice["prompt_logprobs"] = [None]
        return httpx.Response(200, json={"choices": [choice]})


@pytest.mark.parametrize(("behind_nat", "forgiven_nat"), [(0.01, 0.03125), (0.1, 0.125), (0.2, 0.25), (0.3, None)])
@pytest.mark.asyncio(loop_scope="module")
async def test_another_token_is_a_tie_where_plain_vllm_says_it_after_a_nudge_that_the_format_may_give(
    behind_nat: float, forgiven_nat: float | None
):
    ours, plain = Undecided(-1.0), Undecided(behind_nat)
    body = {"prompt": [1], "temperature": 0.8, "seed": 4, "repetition_penalty": 1.3}
    verdict = await Judge(ours, plain, "m", "bfloat16").verdict(Case(0, "/v1/completions", body, again=False))  # type: ignore[arg-type]
    if forgiven_nat is None:
        assert verdict.difference == "choice 0: token 1 is [8] for [7] of [5, 8] for [5, 7]"
    else:
        assert verdict.difference == ""
        assert verdict.ties == [f"choice 0: token 1 is [8] for [7], {forgiven_nat:.2g} nat at most"]
    assert all(body.items() <= asked.items() for asked in plain.asked), "asked with all of the request's own wishes"


@pytest.mark.parametrize(("body", "same"), [({"model": "one"}, True), ({}, False)])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_for_an_adapter_is_compared_with_the_plain_server_that_has_adapters(
    body: dict[str, Any], same: bool
):
    ours, alone, adapted = Undecided(-1.0), Undecided(1.0), Undecided(-1.0)
    judge = Judge(ours, alone, "m", "float32", adapted=adapted)  # type: ignore[arg-type]
    verdict = await judge.verdict(Case(0, "/v1/completions", {"prompt": [1], **body}, again=False))
    assert (verdict.difference == "") == same


class Listing(Undecided):
    """A server that answers with one token, and lists these as the likeliest ones."""

    def __init__(self, top: dict[str, float]) -> None:
        super().__init__(1.0)
        listed = {"tokens": ["token_id:5"], "token_logprobs": [top["token_id:5"]], "top_logprobs": [top]}
        self.choice = {"index": 0, "text": "", "token_ids": [5], "prompt_token_ids": [1], "logprobs": listed}

    async def post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        return httpx.Response(200, json={"choices": [self.choice]})


@pytest.mark.parametrize(
    ("ours", "same"),
    [
        ({"token_id:5": -2.0, "token_id:6": -1.0}, True),
        ({"token_id:5": -2.0, "token_id:6": -1.0, "token_id:7": -1.99}, True),
        ({"token_id:5": -2.0, "token_id:6": -1.0, "token_id:7": -1.5}, False),
        ({"token_id:5": -2.0, "token_id:6": -1.0, "token_id:7": -1.99, "token_id:8": -1.99}, False),
        ({"token_id:5": -2.0, "token_id:7": -1.0}, True),
        ({"token_id:5": -2.0, "token_id:7": -0.5}, False),
        ({"token_id:5": -2.1, "token_id:6": -1.0}, False),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_sampled_token_that_is_almost_among_the_likeliest_is_listed_beside_them_or_not(
    ours: dict[str, float], same: bool
):
    theirs = Listing({"token_id:5": -2.0, "token_id:6": -1.0})
    judge = Judge(Listing(ours), theirs, "m", "bfloat16")  # type: ignore[arg-type]
    judge.tolerance_nat = 0.05
    verdict = await judge.verdict(Case(0, "/v1/completions", {"prompt": [1], "logprobs": 1}, again=False))
    assert (verdict.difference == "") == same, verdict.difference


class Fickle(Undecided):
    """A server that says another token each time."""

    async def post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        self.asked.append(json)
        choice = {"index": 0, "text": "", "token_ids": [50 + len(self.asked)], "prompt_token_ids": [1]}
        return httpx.Response(200, json={"choices": [choice]})


@pytest.mark.asyncio(loop_scope="module")
async def test_a_plain_server_that_differs_from_itself_is_told_with_the_difference():
    body = {"prompt": [1], "temperature": 0}
    judge = Judge(Undecided(1.0), Fickle(0.0), "m", "float32")  # type: ignore[arg-type]
    verdict = await judge.verdict(Case(0, "/v1/completions", body, again=False))
    assert "plain vLLM differs from itself" in verdict.difference


class Broken(Undecided):
    """A server that fails: never, in streams, always."""

    def __init__(self, when: str) -> None:
        super().__init__(1.0)
        self.when = when

    async def post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        response = await super().post(path, json)
        fails = self.when == "always" or (self.when == "in streams" and "stream" in json)
        return httpx.Response(500, text="29") if fails else response


@pytest.mark.parametrize(
    ("ours", "plain", "found"),
    [
        ("never", "in streams", ""),
        ("never", "always", "plain failed"),
        ("always", "always", ""),
        ("in streams", "never", "difference"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_plain_server_that_fails_is_asked_for_one_piece_and_is_no_difference_but_ours_is(
    ours: str, plain: str, found: str
):
    judge = Judge(Broken(ours), Broken(plain), "m", "float32")  # type: ignore[arg-type]
    body = {"prompt": [1], "stream": True, "stream_interval": 2, "prompt_logprobs": 0}
    verdict = await judge.verdict(Case(0, "/v1/completions", body, again=False))
    assert verdict.plain_failed == ("29" if found == "plain failed" else "")
    assert bool(verdict.difference) == (found == "difference")


class Failing(Undecided):
    """A server that breaks the connection of every second request."""

    async def post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        response = await super().post(path, json)
        if len(self.asked) % 2:
            raise httpx.ReadError("connection reset")
        return response


@pytest.mark.asyncio(loop_scope="module")
async def test_a_broken_connection_is_told_with_its_case_and_the_next_case_is_judged():
    said: list[str] = []
    checked = SimpleNamespace(check=lambda: None)
    judge = Judge(Failing(1.0), Undecided(1.0), "m", "float32")  # type: ignore[arg-type]
    servers = Both(None, None, [checked], judge)  # type: ignore[arg-type]
    cases = [Case(number, "/v1/completions", {"prompt": [1]}, again=False) for number in (6, 7)]
    first, second = await judged(servers, cases, said.append)
    assert first.difference == "no answer from ours: ReadError connection reset"
    assert second.difference == ""
    assert "in case 6: " in said[0]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_plain_server_that_has_ended_is_told_with_its_exit_code_and_its_last_words():
    ends = [sys.executable, "-c", "print('CPU Generator does not use offset'); raise SystemExit(3)"]
    async with serving(ends, os.environ, "http://127.0.0.1:9") as server:
        with pytest.raises(
            PlainServerEnded, match=r"exit code 3; its last lines:\n  CPU Generator does not use offset"
        ):
            await server.ready()


def test_plain_vllm_gets_the_remedy_for_seeds_when_its_model_is_loaded(monkeypatch: pytest.MonkeyPatch):
    class Runner:
        device = "cpu"
        lora_config = None

        def load_model(self, *, load_dummy_weights: bool = False) -> None:
            self.loaded = True

        def _sample(self) -> None: ...

        def _bookkeeping_sync(self) -> None: ...

    vllms = SimpleNamespace(CPUModelRunner=Runner)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.cpu_model_runner", vllms)
    importlib.import_module("tools.differential.worker")
    runner = Runner()
    runner.load_model(load_dummy_weights=False)
    assert runner.loaded
    assert {"_sample", "_bookkeeping_sync"} <= vars(runner).keys(), (
        "put back by ridgeline.engine.vllm_workarounds.model_runner"
    )
