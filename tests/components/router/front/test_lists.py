"""Lists of prompts: what is limited in one request is limited in a list too. vLLM's app, engines without a model."""

import pytest
import pytest_asyncio

from tests.support.patience import eventually
from tests.support.served_router import serving
from tests.support.talking_router import TalkingEngine, make_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_OUTSTANDING, SHARE = 8, 6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    """(HTTP client, admission) of a router whose pools have 100 KV blocks of 32 tokens each."""
    model = tmp_path_factory.mktemp("model")
    make_model(model)
    engines = TalkingEngine("prefill"), TalkingEngine("decode")
    limits = {"max_concurrent_requests": MAX_OUTSTANDING, "max_client_share": 0.75, "max_logprobs_per_request": 29}
    async with serving(model, engines, **limits) as parts:
        yield parts[0], parts[1]._admission


async def complete(http, **fields):
    body = {"model": "m", "prompt": [[5] * 8] * 3, "max_tokens": 1, "ignore_eos": True, **fields}
    return await http.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"logprobs": 9}, "may have 30 log-probabilities"),
        ({"prompt_logprobs": 1}, "may have 32 log-probabilities"),
        (
            {"prompt": [[5] * 1100] * 3},
            "the first 3 prompts of the list take 105 KV blocks, and the decode pool has 100",
        ),
        (
            {"prompt": [[5] * 1700] * 2, "stream": True},
            "the first 2 prompts of the list take 108 KV blocks, and the decode pool has 100",
        ),
    ],
    ids=["logprobs", "prompt_logprobs", "KV blocks", "KV blocks in a stream"],
)
async def test_a_list_whose_prompts_fit_alone_but_never_together_is_a_bad_request(served, fields, says):
    http, admission = served
    answer = await complete(http, **fields)
    assert (answer.status_code, says in answer.text) == (400, True), answer.text
    await eventually(lambda: admission.sequences == 0)
    assert (await complete(http)).status_code == 200
    await eventually(lambda: admission.sequences == 0)  # they end just after their answer


async def test_a_list_of_chats_that_could_never_be_served_at_a_time_is_a_bad_request(served):
    http, admission = served
    chat = {"model": "m", "max_tokens": 1, "messages": [[{"role": "user", "content": "w9"}]] * SHARE}
    assert (await http.post("/v1/chat/completions/batch", json=chat)).status_code == 200
    await eventually(lambda: admission.sequences == 0)
    chat["messages"] = chat["messages"] + chat["messages"][:1]
    answer = await http.post("/v1/chat/completions/batch", json=chat)
    assert (answer.status_code, "router.max_client_share" in answer.text) == (400, True), answer.text
    await eventually(lambda: admission.sequences == 0)
