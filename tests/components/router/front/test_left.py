"""What counts as left before its end, over HTTP: vLLM's real app, real gRPC, engines without a model."""

import asyncio

import pytest
import pytest_asyncio

from ridgeline.engine.passed_args import front
from ridgeline.router.fleet.request_route import NoWorker
from ridgeline.router.flow.admission_rules import Ask
from tests.support.patience import PATIENCE_S, eventually
from tests.support.served_router import serving
from tests.support.talking_router import TalkingEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_OUTSTANDING, SHARE = 16, 12


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, admission) of a router whose clients have three quarters each."""
    engines = TalkingEngine("prefill"), TalkingEngine("decode")
    for engine in engines:
        engine.num_kv_blocks = 10_000
    vllm = front({"chat_template": "{{ messages[0].content }}"})
    limits = {"max_concurrent_requests": MAX_OUTSTANDING, "max_client_share": 0.75}
    async with serving(model, engines, server_args=vllm, **limits) as parts:
        yield parts[0], parts[1]._admission


async def ask(http, **fields):
    body = {"model": "m", "prompt": [5] * 900, "max_tokens": 3, "ignore_eos": True, **fields}
    return await http.post("/v1/completions", json=body)


async def test_a_list_of_prompts_that_was_refused_in_its_middle_is_not_held_against_its_client(served):
    http, admission = served
    ticket = admission.admit("127.0.0.1", Ask(1, 8, 8))  # the same client's, and it goes on
    for _ in range(3):
        refused = await ask(http, prompt=[[5] * 8] * SHARE)
        assert (refused.status_code, f"you may have {SHARE}" in refused.text) == (429, True), refused.text
    ticket.sequence_ended(left=False)
    await eventually(lambda: admission.sequences == 0)
    answer = await ask(http)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 1}, {"n": 2}, {"logprobs": 1, "stream": True}, {"stop": ["w"], "max_tokens": 30}],
    ids=str,
)
async def test_what_was_answered_whole_does_not_count_as_left(served, fields):
    http, admission = served
    admission._left.clear()
    for _ in range(4):
        answer = await ask(http, **fields)
        assert answer.status_code == 200, answer.text
    await eventually(lambda: admission.sequences == 0)
    assert not admission._left


async def test_a_list_of_prompts_that_could_never_be_served_at_a_time_is_a_bad_request(served):
    http, _ = served
    answer = await ask(http, prompt=[[5] * 8] * (SHARE + 1))
    assert (answer.status_code, "13 sequences" in answer.text) == (400, True), answer.text
    assert "router.max_client_share" in answer.text
    assert (await ask(http, prompt=[[5] * 8] * 2, n=SHARE // 2)).status_code == 200
    assert (await ask(http, prompt=[[5] * 8] * 2, n=SHARE // 2 + 1)).status_code == 400


@pytest.mark.parametrize("fields", [{"n": 3}, {"prompt": [[5] * 8] * 3}], ids=["n", "a list"])
async def test_sequences_that_end_because_another_one_failed_do_not_count_as_left(served, monkeypatch, fields):
    async def fails_if_first(self, request, emit):
        if request.client_request_id.endswith(("[0]", "-0")):
            raise NoWorker("there is no worker")
        await asyncio.sleep(PATIENCE_S)

    http, admission = served
    admission._left.clear()
    monkeypatch.setattr("ridgeline.router.dispatch.orchestrator.Orchestrator.run", fails_if_first)
    assert (await ask(http, **fields)).status_code == 503
    await eventually(lambda: admission.sequences == 0)
    assert not admission._left


async def test_a_list_of_chats_that_could_never_be_served_at_a_time_is_a_bad_request(served):
    http, admission = served
    chats = [[{"role": "user", "content": "w9"}]] * (SHARE + 1)
    for asked, status in ((chats[1:], 200), (chats, 400)):
        body = {"model": "m", "max_tokens": 1, "messages": asked}
        answer = await http.post("/v1/chat/completions/batch", json=body)
        assert answer.status_code == status, answer.text
        await eventually(lambda: admission.sequences == 0)
