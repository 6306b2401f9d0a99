"""Turns as clients write them, and the one sentence that says what is wrong with a body, at vLLM's real app."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import pytest_asyncio

from ridgeline.engine.passed_args import front
from ridgeline.router.flow.concurrency_limiter import AT_A_TIME
from ridgeline.router.front.vllm_workarounds.bodies import CHARACTERS_PER_TOKEN
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
SPOKEN = [{"type": "output_text", "text": "w2 w3"}]
USER, LAST = {"role": "user", "content": "w1"}, {"role": "user", "content": "w4"}
TURNS: dict[str, dict[str, Any]] = {
    "neither type nor id": {"role": "assistant", "content": SPOKEN},
    "a type": {"type": "message", "role": "assistant", "content": SPOKEN},
    "an id": {"id": "msg_1", "role": "assistant", "content": SPOKEN},
    "a text": {"role": "assistant", "content": "w2 w3"},
    "a status": {"role": "assistant", "status": "completed", "content": SPOKEN},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, prefill engine) of a router."""
    engines = FakeEngine("prefill"), FakeEngine("decode")
    async with serving(model, engines, server_args=front({"chat_template": TEMPLATE})) as (http, _, prefill, _):
        yield http, prefill


async def prompt(served: Any, path: str, **fields: Any) -> list[int]:
    http, prefill = served
    prefill.calls.clear()
    answer = await http.post(path, json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    (call,) = prefill.calls
    return list(call.prompt_token_ids)


@pytest.mark.parametrize("turn", TURNS)
async def test_a_turn_of_the_assistant_is_read_with_or_without_what_openai_lets_out(served, turn):
    asked = {"input": [USER, TURNS[turn], LAST], "max_output_tokens": 2, "store": False}
    assert await prompt(served, "/v1/responses", **asked) == [1, 2, 3, 4]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
async def test_a_text_is_a_text_by_each_of_its_names(served, path, kind):
    turns = [USER, {"role": "assistant", "content": [{"type": kind, "text": "w2 w3"}]}, LAST]
    assert await prompt(served, path, messages=turns, max_tokens=2) == [1, 2, 3, 4]


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "w1"}, message]}


WRONG: list[tuple[str, Any, str | None, str]] = [
    ("/v1/responses", {"input": [USER, {"role": "user"}]}, "input.1.content", "is missing"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text", ""),
    ("/v1/responses", {"input": [{"role": "tool", "content": "a"}]}, "input.0.role", "not 'tool'"),
    ("/v1/responses", {"input": [{"type": "nonsense"}]}, "input.0.type", "'function_call_output'"),
    ("/v1/responses", {"input": ["a"]}, "input.0", "dictionary"),
    ("/v1/responses", {"input": 5}, "input", "a valid string or a valid list, not '5'"),
    ("/v1/responses", {"input": "w1", "tools": [{"name": "f"}]}, "tools.0.type", "is missing"),
    ("/v1/responses", {"input": "w1", "tools": [{"type": "nonsense"}]}, "tools.0.type", "'function' or "),
    ("/v1/responses", {"input": "w1", "tools": [{"type": "namespace", "name": "n"}]}, "tools.0.description", ""),
    ("/v1/responses", {"input": "w1", "tools": [{"type": "function", "name": 5}]}, "tools.0.name", "string"),
    ("/v1/responses", {"input": "w1", "tools": [{"type": "function", "function": {}}]}, "tools.0.name", "is missing"),
    ("/v1/chat/completions", chat(role="user", content=5), "messages.1.content", "string"),
    ("/v1/chat/completions", chat(content="w1"), "messages.1.role", "is missing"),
    ("/v1/chat/completions", chat(role="user", content=[{"type": "x"}]), "content.0.type", "'text' or 'image_url'"),
    ("/v1/chat/completions", chat(role="user", content=[{"type": "text"}]), "content.0.text", "is missing"),
    ("/v1/chat/completions", {"messages": "w1"}, "messages", "list"),
    ("/v1/chat/completions", chat(**USER) | {"tools": [{"type": "web_search"}]}, "tools.0.type", "not 'web_search'"),
    ("/v1/completions", {"prompt": [[1, "a"]]}, "prompt.0.1", "integer"),
    ("/v1/completions", {"prompt": "w1", "temperature": "hot"}, "temperature", "not 'hot'"),
    ("/v1/completions", {"prompt": "w1", "logit_bias": {"k" * 10_000: "a"}}, f"logit_bias.{'k' * 64}", "number"),
    ("/v1/completions", [], None, "the body should be"),
    ("/v1/completions", b"{", None, "the body: JSON decode error"),
    ("/v1/completions", b"[" * 9, None, "the body: JSON decode error"),
]


@pytest.mark.parametrize(("path", "body", "place", "words"), WRONG)
async def test_what_is_wrong_is_told_in_one_sentence_with_its_place(served, path, body, place, words):
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = await served[0].post(path, headers={"content-type": "application/json"}, **sent)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, 400, place), answer.text
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 1500


async def test_a_body_that_is_no_json_by_its_head_is_refused(served):
    answer = await served[0].post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


# --- long texts

CONTEXT = 4096


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(model):
    """(HTTP client, vLLM's renderer) of a router whose model has a short context."""
    engines = FakeEngine("prefill"), FakeEngine("decode")
    async with serving(model, engines, max_model_len=CONTEXT) as parts:
        yield parts[0], parts[1]._client.renderer


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": 10}, {"truncate_prompt_tokens": -1}], ids=str)
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_a_text_that_takes_minutes_to_tokenise_is_a_bad_request(small, path, fields):
    text = "w1" * (CONTEXT * CHARACTERS_PER_TOKEN // 2 + 1)
    answer = await small[0].post(path, json={"model": "m", "prompt": text, **fields})
    assert (answer.status_code, "characters" in answer.text) == (400, True), answer.text[:300]


async def test_a_text_longer_than_the_context_can_still_be_counted(small):
    answer = await small[0].post("/tokenize", json={"model": "m", "prompt": "w1 " * (2 * CONTEXT)})
    assert answer.json()["count"] == 2 * CONTEXT


async def test_texts_of_one_client_do_not_keep_anothers_from_being_tokenised(small):
    http, renderer = small
    done = threading.Event()
    for _ in range(AT_A_TIME - 1):
        renderer._executor.submit(done.wait)
    try:
        answer = await http.post("/v1/completions", json={"model": "m", "prompt": "w1 w2", "max_tokens": 2})
        assert answer.status_code == 200
    finally:
        done.set()
