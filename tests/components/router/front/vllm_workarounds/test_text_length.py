"""Long texts: refused before they are tokenised, and never in the way of another client's."""

import threading

import pytest
import pytest_asyncio

from ridgeline.router.flow.concurrency_limiter import AT_A_TIME
from ridgeline.router.front.vllm_workarounds.text_length import CHARACTERS_PER_TOKEN
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTEXT = 4096


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, vLLM's renderer)."""
    engines = FakeEngine("prefill"), FakeEngine("decode")
    async with serving(model, engines, max_model_len=CONTEXT) as parts:
        yield parts[0], parts[1]._client.renderer


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": 10}, {"truncate_prompt_tokens": -1}], ids=str)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_a_text_that_takes_minutes_to_tokenise_is_a_bad_request(served, path, fields):
    http, _ = served
    text = "w1" * (CONTEXT * CHARACTERS_PER_TOKEN // 2 + 1)
    answer = await http.post(path, json={"model": "m", "prompt": text, **fields})
    assert (answer.status_code, "characters" in answer.text) == (400, True), answer.text[:300]


async def test_a_text_longer_than_the_context_can_still_be_counted(served):
    http, _ = served
    answer = await http.post("/tokenize", json={"model": "m", "prompt": "w1 " * (2 * CONTEXT)})
    assert answer.json()["count"] == 2 * CONTEXT


async def test_texts_of_one_client_do_not_keep_anothers_from_being_tokenised(served):
    http, renderer = served
    done = threading.Event()
    for _ in range(AT_A_TIME - 1):
        renderer._executor.submit(done.wait)
    try:
        answer = await http.post("/v1/completions", json={"model": "m", "prompt": "w1 w2", "max_tokens": 2})
        assert answer.status_code == 200
    finally:
        done.set()
