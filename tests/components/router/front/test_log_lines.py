"""What a router and its workers log of requests, workers and modes: real HTTP and gRPC, engines without a model."""

import logging

from tests.support.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.served_router import serving

DISPATCH, HOST = "ridgeline.router.dispatch", "ridgeline.worker_runtime.host"


async def lines_of(http, caplog, tokens):
    """What is logged of one answer of so many tokens: (who, what, on which worker)."""
    caplog.clear()
    answer = await http.post(
        "/v1/completions", json={"model": "m", "prompt": [5] * 40, "max_tokens": tokens, "ignore_eos": True}
    )
    assert answer.status_code == 200, answer.text
    await eventually(lambda: caplog.messages.count("task ended") == 2 and "finished" in caplog.messages)
    known_as = answer.json()["id"]
    (request_id,) = {one.request for one in caplog.records if getattr(one, "client_request", "").startswith(known_as)}
    of_it = [one for one in caplog.records if getattr(one, "request", "").startswith(request_id)]
    return [
        (one.name.removesuffix(".request").removesuffix(".orchestrator"), one.message, getattr(one, "worker", None))
        for one in of_it
    ]


async def test_each_change_of_a_request_is_one_line_with_its_worker_however_many_tokens_it_has(model, caplog):
    caplog.set_level(logging.DEBUG, "ridgeline")
    async with serving(model, (FakeEngine("prefill"), FakeEngine("decode"))) as (http, router, *_):
        lines = await lines_of(http, caplog, 4)
        prefill, decode = (router.fleet.pool(pool)[0].worker_id for pool in ("prefill", "decode"))
        assert [line for line in lines if line[0] == DISPATCH] == [
            (DISPATCH, "prefilling", prefill),
            (DISPATCH, "handoff", decode),
            (DISPATCH, "decoding", decode),
            (DISPATCH, "finished", None),
        ]
        assert sorted(line for line in lines if line[0] == HOST) == sorted(
            (HOST, what, worker) for what in ("task begins", "task ended") for worker in (prefill, decode)
        )
        assert sorted(await lines_of(http, caplog, 64)) == sorted(lines)


async def test_by_default_a_request_that_is_served_is_no_line_and_one_that_fails_is_one_with_the_reason(model, caplog):
    caplog.set_level(logging.INFO, "ridgeline")
    prefill, decode = FakeEngine("prefill"), FakeEngine("decode")
    async with serving(model, (prefill, decode)) as (http, *_):
        caplog.clear()
        asked = {"model": "m", "prompt": [5] * 40, "max_tokens": 4, "ignore_eos": True}
        assert (await http.post("/v1/completions", json=asked)).status_code == 200
        assert caplog.messages == []
        answer = await http.post("/v1/completions", json=asked, headers={"x-ridgeline-timeout-s": "0.000001"})
        assert answer.status_code >= 500
    (failed,) = [one for one in caplog.records if one.message == "failed"]
    assert "x-ridgeline-timeout-s" in failed.why
    assert failed.request in failed.why


async def test_a_worker_that_drains_is_a_line_on_both_sides_and_ready_tells_the_mode(model, caplog):
    caplog.set_level(logging.INFO, "ridgeline")
    async with serving(model, (FakeEngine("prefill"), FakeEngine("decode"))) as (http, router, *_):
        assert (await http.get("/ready")).json()["mode"] == "disaggregated"
        worker = router.fleet.pool("decode")[0]
        await worker.client.drain(1.0)
        await eventually(lambda: "worker is draining" in caplog.messages)
    told = [(one.message, one.worker) for one in caplog.records if hasattr(one, "worker")]
    assert told.count(("worker is usable", worker.worker_id)) == 1
    assert ("drains", worker.worker_id) in told
    assert ("worker is draining", worker.worker_id) in told
