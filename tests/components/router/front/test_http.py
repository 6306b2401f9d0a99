"""Refusals and readiness over HTTP: vLLM's real app, real gRPC, engines without a model."""

import asyncio
import json
import re
import time

import httpx
import pytest
import pytest_asyncio
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.router.front.admin import MOST_WATCHERS
from ridgeline.router.front.single_flight import SingleFlight
from tests.support.patience import PATIENCE_S, eventually
from tests.support.series_table import STEP_MODEL, documented, worker_counters
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_OUTSTANDING = 4
LIMITS = {
    "max_concurrent_requests": MAX_OUTSTANDING,
    "max_logprobs_per_request": 29,
    "engine_args": {"max_logprobs": -1},
    "recovery_timeout_s": 60.0,
    "ready_deadline_s": 0.5,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(model):
    """(HTTP client, router, prefill engine, decode engine), for all tests but those that end it."""
    async with serving(model, **LIMITS) as parts:
        yield parts


@pytest.fixture
def served(router):
    """(HTTP client, prefill engine, decode engine)."""
    http, _, prefill, decode = router
    return http, prefill, decode


@pytest_asyncio.fixture(loop_scope="module")
async def accepted_are(router):
    """Waits until so many sequences have been let in; none of the tests before, which end just after their answers."""
    admission = router[1]._client._admission
    await eventually(lambda: admission.sequences == 0)
    return lambda count: eventually(lambda: admission.sequences == count)


@pytest_asyncio.fixture(loop_scope="module")
async def own(model):
    """The same and the router itself, for a test that ends it."""
    async with serving(model, **LIMITS) as parts:
        yield parts


def body(prompt_tokens=8, **fields):
    return {"model": "m", "prompt": [5] * prompt_tokens, "max_tokens": 3, "ignore_eos": True, **fields}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 1}),
        ("/v1/responses", {"input": "w1"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "w1"}]}),
    ],
)
async def test_a_chat_with_a_model_without_a_chat_template_is_refused_with_the_setting(served, path, asked):
    answer = await served[0].post(path, json={"model": "m", **asked})
    assert answer.status_code == 400, answer.text
    assert "server_args.chat_template" in answer.json()["error"]["message"]


async def send(http, **fields):
    """(status, Retry-After, what came) of one completion."""
    response = await http.post("/v1/completions", json=body(**fields))
    return response.status_code, response.headers.get("retry-after"), response.text


async def stepping(engine):
    while True:
        engine.step()
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_read_to_its_end_releases_no_hand_off_that_decode_has_fetched(own, stream):
    http, router, prefill, _ = own
    released = []
    router._orchestrator._legs._release_handoff = lambda handoff, after_s: released.append(handoff)
    stepper = asyncio.create_task(stepping(prefill))
    for _ in range(5):
        assert (await send(http, stream=stream))[0] == 200
        await eventually(lambda: not router._client.accepted)
    stepper.cancel()
    assert released == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_much_is_429_with_retry_after_in_a_stream_too_and_what_was_accepted_is_answered(
    served, accepted_are, stream
):
    http, prefill, _ = served
    accepted = [asyncio.create_task(send(http, prompt_tokens=1500)) for _ in range(2)]
    await accepted_are(2)
    status, retry_after, text = await send(http, prompt_tokens=300, stream=stream)
    assert (status, 1 <= int(retry_after) <= 60) == (429, True)
    assert "pools.decode.kv_cache_memory_bytes" in json.loads(text)["error"]["message"]
    accepted += [asyncio.create_task(send(http)) for _ in range(2)]
    await accepted_are(4)
    status, retry_after, text = await send(http, stream=stream)
    assert not any(one.done() for one in accepted), "it did not wait for room"
    assert (status, 1 <= int(retry_after) <= 60) == (429, True)
    assert "router.max_concurrent_requests" in json.loads(text)["error"]["message"]
    stepper = asyncio.create_task(stepping(prefill))
    assert [status for status, _, _ in await asyncio.gather(*accepted)] == [200] * 4
    await accepted_are(0)
    assert (await send(http, stream=stream))[0] == 200, "there is room again"
    stepper.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        pytest.param({"prompt_tokens": 3300}, "KV blocks", id="more than a worker holds"),
        pytest.param({"prompt_tokens": 4097}, "4096", id="beyond the context"),
        pytest.param({"stream_interval": 2**64}, "sent to a worker", id="what no message carries"),
        pytest.param({"use_beam_search": True, "n": 2}, "beam search", id="beams"),
    ],
)
async def test_what_can_never_be_served_is_a_bad_request_in_a_stream_too_and_holds_nothing(
    served, fields, named, stream
):
    for _ in range(MAX_OUTSTANDING + 1):
        status, retry_after, text = await send(served[0], stream=stream, **fields)
        assert (status, retry_after, named in text) == (400, None, True), text


@pytest.mark.parametrize("field", [{"min_p": 0.1}, {"logit_bias": {"3": 1.0}}], ids=["min_p", "logit_bias"])
async def test_what_engines_that_speculate_refuse_is_a_bad_request_before_one_is_asked(model, field):
    async with serving(model, speculates=True) as (http, _, prefill, decode):
        answer = await http.post("/v1/completions", json=body(**field))
        assert answer.status_code == 400, answer.text
        assert "speculative decoding" in answer.json()["error"]["message"]
        assert not prefill.calls
        assert not decode.calls


async def test_log_probabilities_of_an_answer_count_where_they_are_written_in_one_piece(served, accepted_are):
    stepper = asyncio.create_task(stepping(served[1]))
    for fields in ({"logprobs": 9}, {"prompt_logprobs": 3}, {"prompt_logprobs": -1, "n": 2}):
        status, _, text = await send(served[0], **fields)
        assert (status, "router.max_logprobs_per_request" in text) == (400, True), text
    assert (await send(served[0], logprobs=9, stream=True))[0] == 200
    await accepted_are(0)
    stepper.cancel()


@pytest.mark.parametrize("fields", [{"cache_salt": "tenant-a"}, {}], ids=["salted", "plain"])
async def test_a_cache_salt_reaches_the_engine_of_every_leg(served, fields):
    http, prefill, decode = served
    stepper = asyncio.create_task(stepping(prefill))
    counts = len(prefill.calls), len(decode.calls)
    assert (await send(http, **fields))[0] == 200
    stepper.cancel()
    calls = [*prefill.calls[counts[0] :], *decode.calls[counts[1] :]]
    assert [call.cache_salt for call in calls] == [fields.get("cache_salt")] * 2


async def test_text_comes_in_the_clients_chunks_while_workers_send_every_token(served):
    http, prefill, decode = served
    stepper = asyncio.create_task(stepping(prefill))
    answer = await http.post(
        "/v1/completions", json=body(max_tokens=9, stream=True, stream_interval=1000, return_token_ids=True)
    )
    stepper.cancel()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    chunks = [choice["token_ids"] for event in events for choice in event["choices"] if choice["token_ids"]]
    assert [len(chunk) for chunk in chunks] == [1, 8]
    assert {call.params.stream_interval for call in (prefill.calls[-1], decode.calls[-1])} == {None}


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}])
async def test_tool_choice_without_a_parser_is_a_bad_request_that_names_the_setting(served, choice):
    http, _, _ = served
    chat = {"model": "m", "messages": [{"role": "user", "content": "w1"}], "tools": [TOOL], "tool_choice": choice}
    response = await http.post("/v1/chat/completions", json=chat)
    assert response.status_code == 400
    assert "server_args.tool_call_parser to be set" in response.json()["error"]["message"]
    assert "--" not in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_id_that_is_too_long_is_a_bad_request_and_workers_never_see_the_clients(served, stream):
    http, prefill, decode = served
    stepper = asyncio.create_task(stepping(prefill))
    for length, status in ((60_000, 400), (200, 200)):
        answer = await http.post("/v1/completions", json=body(stream=stream), headers={"X-Request-Id": "i" * length})
        assert answer.status_code == status, answer.text[:300]
    assert "i" * 200 in answer.text, "the client's id is in its answer"
    assert max(len(call.request_id) for engine in (prefill, decode) for call in engine.calls) < 40
    assert (await http.post("/v1/completions", json=body(request_id="i" * 60_000))).status_code == 400
    stepper.cancel()


async def test_a_failure_that_nobody_has_foreseen_ends_the_request_with_500(served, monkeypatch):
    async def fails(*_):
        raise ZeroDivisionError

    http, _, _ = served
    monkeypatch.setattr("ridgeline.router.dispatch.orchestrator.Orchestrator.run", fails)
    for _ in range(MAX_OUTSTANDING + 1):
        status, _, text = await send(http)
        assert (status, "failed to serve" in text) == (500, True)


async def test_a_client_that_leaves_while_its_prompt_waits_makes_room(served, accepted_are):
    http, prefill, _ = served
    sent = [asyncio.create_task(send(http, prompt_tokens=1500, stream=True)) for _ in range(2)]
    await accepted_are(2)
    await eventually(lambda: prefill.running)
    for one in sent:
        one.cancel()
    await asyncio.gather(*sent, return_exceptions=True)
    await eventually(lambda: not prefill.running)
    stepper = asyncio.create_task(stepping(prefill))
    assert (await send(http, prompt_tokens=3000))[0] == 200
    stepper.cancel()


async def test_ready_is_a_probe_through_both_pools_and_names_the_one_that_is_stuck(router, monkeypatch):
    http, deployed, prefill, decode = router
    readiness, ago_s = deployed._readiness, 0.0
    monkeypatch.setattr(readiness, "_clock", lambda: time.monotonic() + ago_s)
    ago_s = 60.0  # since the tokens of the tests before
    stuck = await http.get("/ready")
    assert stuck.status_code == 503
    assert stuck.json()["ready"] is False
    assert "router.ready_deadline_s" in stuck.json()["pools"]["prefill"]["why"]
    ago_s = 0.0
    monkeypatch.setattr(readiness, "check", SingleFlight(readiness._look_now, PATIENCE_S, burst=1))
    monkeypatch.setattr(readiness, "_deadline_s", PATIENCE_S)
    monkeypatch.setattr("ridgeline.router.front.health.RECENT_S", 0.0)
    stepper = asyncio.create_task(stepping(prefill))
    before = len(decode.calls)
    ready = await http.get("/ready")
    assert (ready.status_code, ready.json()["ready"], len(decode.calls) - before) == (200, True, 1)
    again = await http.get("/ready")
    assert (again.status_code, len(decode.calls) - before) == (200, 1)
    stepper.cancel()
    assert (await http.get("/health")).status_code == 200
    metrics = (await http.get("/metrics")).text
    assert 'ridgeline_canaries_total{result="ok"} 1.0' in metrics
    assert 'ridgeline_canaries_total{result="late"} 1.0' in metrics


async def test_every_series_that_a_router_publishes_is_in_the_documented_table_and_no_other(router):
    http, deployed, prefill, _ = router
    deployed.fleet.workers[0].outstanding.favours = "prefill"
    await deployed.note_wanted({"decode": 3})
    prefill.stats.counters, prefill.stats.step_model = worker_counters(), STEP_MODEL
    stepper = asyncio.create_task(stepping(prefill))
    assert (await send(http))[0] == 200
    stepper.cancel()
    page = await http.get("/metrics", headers={"accept": "application/openmetrics-text"}, follow_redirects=True)
    text = page.text
    assert page.headers["content-type"] == CONTENT_TYPE_PLAIN_0_0_4, "the format in which it is written"
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    helps = dict(re.findall(r"^# HELP (ridgeline_\w+) (.*)$", text, re.MULTILINE))
    types = dict(re.findall(r"^# TYPE (ridgeline_\w+) (\w+)$", text, re.MULTILINE))
    table = documented()
    published = {name: (types[name], helps[name]) for name in helps if not name.endswith("_created")}
    assert published == {name: (kind, meaning) for name, (kind, meaning, _) in table.items()}
    samples = re.findall(r"^(ridgeline_\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? \S+$", text, re.MULTILINE)
    labels = {name: set(re.findall(r'(\w+)="', found)) - {"le"} for name, found in samples if name in published}
    assert labels == {name: table[name][2] for name in labels}
    assert labels.keys() >= {"ridgeline_ttft_seconds", "ridgeline_leases", "ridgeline_workers"}


async def test_a_router_tells_what_it_was_asked_for_lately(router):
    http, deployed, prefill, _ = router
    stepper = asyncio.create_task(stepping(prefill))
    assert (await send(http))[0] == 200
    stepper.cancel()
    load = await deployed.load(60.0)
    assert (load.mode, load.pools, load.waiting_prompts) == ("disaggregated", ("prefill", "decode"), 0)
    assert load.requests
    assert not (await deployed.load(0.0)).requests
    await deployed.note_wanted({"decode": 3})
    assert 'ridgeline_wanted_workers{pool="decode"} 3.0' in (await http.get("/metrics")).text


# --- the end of a router


async def test_a_drain_waits_for_what_was_accepted_and_tells_what_is_left(own):
    http, router, prefill, _ = own
    sent = asyncio.create_task(send(http))
    await eventually(lambda: prefill.running)
    assert await router.drain(0.05) == 1
    assert (await send(http))[0] == 503
    draining = asyncio.create_task(router.drain(20))
    await asyncio.sleep(0.05)
    assert not draining.done()
    stepper = asyncio.create_task(stepping(prefill))
    assert (await sent)[0] == 200
    assert await draining == 0
    stepper.cancel()


async def test_a_router_whose_inside_has_failed_says_that_it_has_ended(own, monkeypatch):
    http, router, _, _ = own
    assert not router.ended

    async def fails():
        raise ZeroDivisionError

    monkeypatch.setattr(router.fleet.workers[0], "refresh", fails)
    await eventually(lambda: router.ended)
    with pytest.raises(httpx.TransportError):
        await http.get("/health")
    with pytest.raises(ExceptionGroup):
        await router.stop()


async def test_of_pages_that_come_together_no_more_watch_than_may(model):
    async def events(http):
        async with http.stream("GET", "/ridgeline/state/stream") as answer:
            return [line async for line in answer.aiter_lines()]

    async with serving(model) as (http, router, *_):
        pages = [asyncio.create_task(events(http)) for _ in range(MOST_WATCHERS + 5)]
        await eventually(lambda: sum(page.done() for page in pages) == 5)
        await router.stop()
        assert sorted(map(bool, await asyncio.gather(*pages))) == [False] * 5 + [True] * MOST_WATCHERS


async def test_the_live_pages_state_comes_whole_and_as_a_stream_that_ends_with_the_server(model):
    async with serving(model) as (http, router, *_):
        state = (await http.get("/ridgeline/state")).json()
        assert [bar["id"] for bar in state["resources"]] == ["router", "prefill", "link", "kv", "bandwidth"]
        assert [worker["id"] for pool in state["pools"] for worker in pool["workers"]] == ["prefill-0", "decode-0"]
        docs = (await http.get("/docs")).text
        assert re.findall(r'<script src="([^"]*)"', docs) == ["/static/swagger-ui-bundle.js"], "it has operators' keys"
        assert (await http.get("/static/swagger-ui-bundle.js")).status_code == 200
        async with http.stream("GET", "/ridgeline/state/stream") as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            lines = events.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert first["schema"] == state["schema"]
            await router.stop()
            assert all(line == "" or line.startswith("data: ") for line in [line async for line in lines])
