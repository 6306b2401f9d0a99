"""Comparisons of a mode with servers that are not ours, and the sentences with which others are refused."""

import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route

from ridgeline.contracts.former_names import FormerName
from ridgeline.loadtest import baseline as baseline_module
from ridgeline.loadtest.baseline import FORMER_KEY_VARIABLE, KEY_VARIABLE, BaselineVariant, baseline_of
from ridgeline.loadtest.compare import compare
from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.run import replay as replay_module
from ridgeline.loadtest.variants import Devices, Reached
from tests.support.http_server import listening
from tests.support.openai_server import Behaviour, running

CONTEXT_TOKENS = 8192
OURS = Devices("core", 2, {"colocated": 1})


@pytest.fixture(autouse=True)
def _plain_tokens(monkeypatch):
    """Numbers instead of a tokenizer's ids; the one called other has other numbers."""
    tokens = {"other": tuple(range(1, 5001))}
    for module in (replay_module, baseline_module):
        monkeypatch.setattr(module, "load_text_tokens", lambda name: tokens.get(name, tuple(range(5000))))
    monkeypatch.setattr("ridgeline.loadtest.run.server.is_at_hand", lambda _: True)


@pytest.fixture
def console():
    with Path("/dev/null").open("w") as nowhere:
        yield Console(file=nowhere)


def _plan(*urls: str, **fields) -> ComparePlan:
    plain = {"trace": "poisson:rate=50,input=40,output=6,n=6,seed=1", "settle_s": 0.02, "tokenizer": "ours", "pairs": 2}
    plain |= {
        "slo_ttft_ms": 200_000
    }  # no round is discarded, and repeated, because of a late client: it may be late by 4 s
    return ComparePlan(
        **plain | {"variants": "colocated", "baseline": ",".join(urls), "baseline_name": "vLLM"} | fields
    )


class _Ours:
    """Our side, whose server runs already."""

    mode, start_s, devices = "colocated", 0.0, OURS

    def __init__(self, url: str) -> None:
        self._url = url
        self._was_ready = False

    async def ready(self) -> Reached:
        is_fresh, self._was_ready = not self._was_ready, True
        return Reached(self._url, is_fresh)


async def _checked(plan: ComparePlan) -> tuple[BaselineVariant, tuple[str, ...]]:
    baseline = baseline_of(plan, OURS)
    return baseline, await baseline.check(plan, CONTEXT_TOKENS)


async def test_two_plain_servers_are_one_variant_that_gets_the_requests_in_turn(tmp_path, console):
    ours = Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated")
    plain = [Behaviour(ttft_s=0.01, tpot_s=0.001, has_metrics=False) for _ in range(2)]
    with running(ours) as url, running(plain[0]) as one, running(plain[1]) as other:
        plan = _plan(one, other, baseline_devices=2)
        baseline, notes = await _checked(plan)
        assert baseline.process_ids == {os.getpid()}
        notes += await baseline.same_model(url, plan)
        result = await compare((_Ours(url), baseline), plan, tmp_path, console, notes=notes, is_alone=False)
    assert result.conclusion.pairs == 2
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["variants"]["b"]["mode"], summary["variants"]["b"]["label"]) == ("baseline", "vLLM")
    assert summary["variants"]["b"]["completed"] == summary["variants"]["a"]["completed"] == 12
    assert summary["variants"]["b"]["pools"] == {}
    assert (summary["variants"]["b"]["per_device"]["devices"], summary["variants"]["b"]["per_device"]["unit"]) == (
        2,
        "core",
    )
    said = " ".join(summary["load"]["sentences"])
    assert "which get the requests in turn" in said
    assert "offers no way to empty its prefix cache" in said
    page = (tmp_path / "report.html").read_text()
    assert "colocated against vLLM" in page
    assert "offers no way to empty its prefix cache" in page
    probe, warm_up, of_rounds = 1, 4, 2 * 3
    assert [len(behaviour.bodies) for behaviour in plain] == [probe + warm_up + of_rounds] * 2
    for behaviour in plain:
        lengths = [len(prompt) for prompt in behaviour.prompts]
        assert lengths[probe:] == [40] * (warm_up + of_rounds)
    prompts = [tuple(prompt) for behaviour in plain for prompt in behaviour.prompts[probe:]]
    assert len(set(prompts)) == len(prompts), "none is sent to both"


async def test_the_baseline_is_asked_in_its_own_way_with_its_own_key_and_our_side_is_not(
    tmp_path, console, monkeypatch
):
    monkeypatch.setattr(replay_module, "prompt_text", lambda _, prompt, most: " ".join(map(str, prompt[:most])))
    monkeypatch.setenv("RIDGELINE_API_KEY", "ours")
    monkeypatch.setenv(KEY_VARIABLE, "theirs")
    ours = Behaviour(ttft_s=0.01, tpot_s=0.001, mode="colocated", key="ours")
    theirs = Behaviour(ttft_s=0.01, tpot_s=0.001, has_metrics=False, key="theirs", resets_cache=True)
    with running(ours) as url, running(theirs) as other:
        plan = _plan(other + "/v1", baseline_endpoint="chat")
        baseline, notes = await _checked(plan)
        assert "the prefix cache of vLLM is emptied before each round" in notes
        notes += await baseline.same_model(url, plan)
        await compare((_Ours(url), baseline), plan, tmp_path, console, notes=notes, is_alone=False)
    in_rounds = 2 * 6
    assert ours.slos[-in_rounds:] == ["200000"] * in_rounds, "mode adaptive goes by what came before its turn"
    assert set(theirs.slos) == {None}
    assert all("messages" in body for body in theirs.bodies)
    assert all("prompt" in body for body in ours.bodies)
    assert theirs.cache_resets == 1 + 2, "at the check and before each round"
    assert ours.cache_resets == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [summary["variants"][side]["failed"] for side in "ab"] == [0, 0]


async def test_an_baseline_that_cannot_be_compared_with_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    async def refused(url: str, **fields) -> str:
        with pytest.raises(ServerError) as caught:
            await _checked(_plan(url, **fields))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no OpenAI-compatible server answers at http://127.0.0.1:9" in await refused("http://127.0.0.1:9")
    async with listening(Starlette(routes=[]), log_level="critical") as url:
        assert "GET /v1/models gets HTTP 404" in await refused(url)
    page = Starlette(routes=[Route("/{path:path}", lambda _: HTMLResponse("<h1>It works</h1>"))])
    async with listening(page, log_level="critical") as url:
        assert "GET /v1/models gets no list of models" in await refused(url)
    with running(Behaviour(key="secret")) as url:
        assert f"asks for an API key: set {KEY_VARIABLE}" in await refused(url)
    with running(Behaviour()) as url:
        assert "does not serve 'big'; it serves fake" in await refused(url, baseline_served_name="big")
    with running(Behaviour(max_model_len=4096)) as url:
        assert "ours by --set model.max_model_len_tokens=4096" in await refused(url)
    with running(Behaviour(faults={0: "refuse"})) as url:
        assert "does not answer as a comparison needs it (completions): HTTP 503" in await refused(url)


def test_the_key_is_known_by_its_former_name_for_one_version(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv(FORMER_KEY_VARIABLE, "theirs")
    with pytest.warns(FormerName, match=f"{FORMER_KEY_VARIABLE} is now {KEY_VARIABLE}"):
        baseline = baseline_of(_plan("http://127.0.0.1:9"), OURS)
    assert baseline.servers.headers == {"authorization": "Bearer theirs"}


async def test_another_tokenizer_is_refused_and_another_name_is_said():
    with running(Behaviour(tokenizer="/models/ours")) as url, running(Behaviour(tokenizer="/models/ours")) as other:
        plan = _plan(other, tokenizer=None, baseline_tokenizer="other")
        baseline, _ = await _checked(plan)
        with pytest.raises(ServerError, match="the tokenizers /models/ours and other differ, so vLLM serves another"):
            await baseline.same_model(url, plan)
        baseline, _ = await _checked(_plan(other))
        assert "made with the tokenizer of our model" in (await baseline.same_model(url, plan))[0]
        baseline.cards[0].id, baseline.cards[0].root = "llama", None
        assert "vLLM calls its model 'llama' and we serve 'fake'" in (await baseline.same_model(url, plan))[-1]


async def test_a_cache_that_is_not_emptied_any_more_ends_the_comparison():
    behaviour = Behaviour(resets_cache=True)
    with running(behaviour) as url:
        baseline, _ = await _checked(_plan(url))
        assert (await baseline.ready()).is_fresh
        assert not (await baseline.ready()).is_fresh
        behaviour.resets_cache = False
        with pytest.raises(ServerError, match="has not emptied its prefix cache"):
            await baseline.ready()
