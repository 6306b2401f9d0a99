"""Turns as clients write them, and the one sentence that says what is wrong with a body, at vLLM's real app."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from ridgeline.engine.passed_args import front
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
