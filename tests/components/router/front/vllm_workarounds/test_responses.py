"""Refusals of /v1/responses at the real router with vLLM's real app: the status comes first, in a stream too."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from ridgeline.engine.passed_args import front
from ridgeline.router.flow.admission_rules import Ask
from tests.support.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, admission) of a router that is full with one sequence."""
    engines = FakeEngine("prefill"), FakeEngine("decode")
    settings = {"server_args": front({"chat_template": TEMPLATE}), "max_concurrent_requests": 1}
    async with serving(model, engines, **settings) as (http, router, *_):
        yield http, router._client._admission


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "w1 w2", "max_output_tokens": 2, "store": False, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input": ""}, "cannot be empty"),
        ({"input": "w1 " * 3300}, "KV blocks"),
        ({"top_k": 10**30}, "cannot be sent to a worker"),
        ({"request_id": "\ud800"}, "the request id has half a surrogate pair"),
    ],
)
async def test_a_refusal_of_responses_has_its_status_in_a_stream_too(served, fields, says, stream):
    http, admission = served
    content = json.dumps(body(stream=stream, **fields))
    answer = await http.post("/v1/responses", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]
    assert admission.sequences == 0


async def test_a_full_server_refuses_a_stream_with_429_and_when_to_try_again(served, monkeypatch):
    http, admission = served
    monkeypatch.setattr(admission, "check", lambda *_: None)  # it became full after vLLM had asked
    others = admission.admit("another", Ask(1, 2, 2))
    answer = await http.post("/v1/responses", json=body(stream=True))
    others.sequence_ended()
    assert (answer.status_code, "retry-after" in answer.headers) == (429, True), answer.text
    assert admission.sequences == 0


async def test_a_stream_that_is_not_refused_comes_to_its_end_and_says_that_it_was_cut_off(served):
    http, admission = served
    answer = await http.post("/v1/responses", json=body(stream=True))
    assert answer.text.count("event: response.created") == answer.text.count("event: response.incomplete") == 1
    assert answer.text.count('"output_tokens":2') == 1
    await eventually(lambda: admission.sequences == 0)  # it ends just after its last token is sent
