"""One request through a real router with workers without a model: its trace at a real collector, and its record."""

import asyncio
import io
import time
from collections import Counter

import pytest
from rich.console import Console

from ridgeline.cluster.commands.ended_request import show
from ridgeline.contracts.handoff import TransferResult
from ridgeline.contracts.tasks import LegTiming
from ridgeline.router.settings import TracingConfig
from tests.support.collector import collecting
from tests.support.fake_engine import FakeEngine
from tests.support.free_port import free_port
from tests.support.patience import PATIENCE_S, eventually
from tests.support.served_router import make_model, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
BODY = {"model": "m", "prompt": [5] * 70, "max_tokens": 4, "ignore_eos": True}
FETCHED = TransferResult(outcome="ok", wait_s=2e-4, wire_s=1e-4, num_bytes=8192, transport="shm")
STEP_S = 0.1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


def engines():
    """Engines that say that they were fast: prefill steps when told to."""
    prefill, decode = FakeEngine("prefill", stepping="manual"), FakeEngine("decode")
    prefill.timing = LegTiming(queue_s=1e-4, first_token_s=2e-4, compute_s=2e-4)
    decode.timing = LegTiming(queue_s=5e-4, first_token_s=1e-4, compute_s=3e-4, transfer_result=FETCHED)
    return prefill, decode


async def answered(http, prefill, headers=SENT, **body):
    """(Answer, seconds until it was there) to a prompt that is prefilled after `STEP_S`."""
    began_s = time.monotonic()
    asked = asyncio.ensure_future(http.post("/v1/completions", json=BODY | body, headers=headers))
    await eventually(lambda: prefill.running)
    await asyncio.sleep(STEP_S)
    prefill.step()
    answer = await asked
    assert answer.status_code == 200, answer.text
    return answer.json(), time.monotonic() - began_s


async def test_a_collector_gets_one_trace_with_both_legs_and_the_transfer_under_the_clients_parent(model):
    with collecting() as collector:
        tracing = TracingConfig(endpoint=collector.url)
        async with serving(model, engines(), tracing=tracing) as (http, router, prefill, _):
            answer, latency_s = await answered(http, prefill)
            told = (await http.get("/ridgeline/requests", params={"id": answer["id"]})).json()
            console = Console(file=io.StringIO(), width=140)
            await show(str(http.base_url), TRACE, admin_key_file=None, console=console)
            await router.stop()
    spans = {(one.service, one.name): one for one in collector.spans}
    assert len(spans) == len(collector.spans)
    whole = spans["ridgeline-router", "text_completion m"]
    assert (whole.trace_id, whole.parent_id) == (TRACE, PARENT)
    assert {one.trace_id for one in collector.spans} == {TRACE}
    assert {one.parent_id for one in collector.spans if one is not whole} == {whole.span_id}
    assert {*spans} >= {
        ("ridgeline-router", "preprocess"),
        ("ridgeline-prefill", "engine_queue"),
        ("ridgeline-prefill", "prefill"),
        ("ridgeline-decode", "handoff_wait"),
        ("ridgeline-decode", "wire"),
        ("ridgeline-decode", "decode"),
    }
    moved = spans["ridgeline-decode", "wire"].attributes
    assert (moved["ridgeline.handoff.transport"], moved["ridgeline.handoff.bytes"]) == ("shm", 8192)
    assert (moved["ridgeline.handoff.source"], moved["ridgeline.worker"]) == ("prefill-0", "decode-0")
    used = whole.attributes["gen_ai.usage.input_tokens"], whole.attributes["gen_ai.usage.output_tokens"]
    assert used == (70, 4)
    [record] = told["requests"]
    assert (record["trace_id"], record["http_request_id"]) == (TRACE, "mine")
    assert sum(stage["duration_s"] for stage in record["stages"]) == pytest.approx(record["latency_s"])
    assert STEP_S < record["latency_s"] <= latency_s
    assert record["latency_s"] == pytest.approx((whole.end_ns - whole.start_ns) / 1e9, abs=1e-5)
    assert "prefill-0 (prefill)" in console.file.getvalue()


async def test_without_a_collector_requests_are_kept_and_have_no_trace(model):
    async with serving(model, engines()) as (http, _, prefill, _):
        answer, _ = await answered(http, prefill)
        [record] = (await http.get("/ridgeline/requests", params={"id": answer["id"]})).json()["requests"]
        assert (record["trace_id"], record["outcome"], record["decision"]) == ("", "finished", None)
        names = Counter(stage["name"] for stage in record["stages"])
        assert names["prefill"] == names["decode"] == 1
        several, _ = await answered(http, prefill, {}, n=2)
        found = (await http.get("/ridgeline/requests", params={"id": several["id"]})).json()["requests"]
        assert sorted(one["request_id"][-3:] for one in found) == ["[0]", "[1]"]


@pytest.mark.parametrize("listens", [False, True])
async def test_a_collector_that_is_dead_delays_no_request_and_not_the_end(model, listens):
    with collecting(answers=False) as hanging:
        url = hanging.url if listens else f"http://127.0.0.1:{free_port()}"
        async with serving(model, engines(), tracing=TracingConfig(endpoint=url)) as (http, router, prefill, _):
            for _ in range(3):
                await answered(http, prefill)
            async with asyncio.timeout(PATIENCE_S):
                await router.stop()
            assert router.ended
