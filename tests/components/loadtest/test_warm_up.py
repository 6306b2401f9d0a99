"""Warm-up requests against a real local HTTP server."""

import io

from rich.console import Console

from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run import replay as module
from ridgeline.loadtest.run.replay import run_replay
from tests.support.openai_server import Behaviour, running


async def test_no_warm_up_request_is_longer_than_the_model_can_hold(monkeypatch):
    """The longest prompt fits with its own short answer, and not with the longer one of a warm-up."""
    monkeypatch.setattr(module, "load_text_tokens", lambda _: tuple(range(5000)))
    behaviour = Behaviour(ttft_s=0.0, tpot_s=0.0, max_model_len=64)
    plan = ReplayPlan(trace="poisson:rate=50,input=62,output=2,n=2", settle_s=0.01, tokenizer="unused")
    with running(behaviour) as url:
        await run_replay(url, plan, Console(file=io.StringIO()))
    assert len(behaviour.bodies) == 2 + 2
    assert [len(body["prompt"]) + body["max_tokens"] for body in behaviour.bodies] == [64] * 4
