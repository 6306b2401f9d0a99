"""Structured outputs over HTTP: what is refused and why, what reaches an engine, how an engine refuses one it runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import pytest_asyncio

from ridgeline.contracts.errors import InvalidTask
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

NESTED = "((a{0,200}){0,200}){0,200}"
TOO_LONG = "structured output: this grammar takes too long"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, decode engine)"""
    async with serving(model, (FakeEngine("prefill"), FakeEngine("decode"))) as (client, _, _, decode):
        yield client, decode


async def ask(http: Any, path: str = "/v1/completions", **fields: Any) -> Any:
    return await http.post(path, json={"model": "m", "prompt": [5, 6], "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"choice": [f"item number {number}" for number in range(20_000)]}, "server.max_grammar_bytes"),
        ({"json": {"anyOf": [{}] * 2500}}, "server.max_grammar_bytes"),
        ({"json": {"type": "integer", "multipleOf": 99_991}}, "multipleOf"),
        ({"regex": "[a-"}, "Grammar error"),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "any_tokens"}})}, "any_tokens"),
        (None, "server.max_grammar_bytes"),
    ],
)
async def test_what_would_hold_an_engine_is_refused_before_it_gets_there(served, asked, why):
    http, decode = served
    calls = len(decode.calls)
    schema = {"type": "object", "properties": {f"x{number}": {"type": "string"} for number in range(5000)}}
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    response = await ask(http, **({"structured_outputs": asked} if asked else {"response_format": wanted}))
    assert response.status_code == 400, response.text
    assert why in response.json()["error"]["message"]
    assert len(decode.calls) == calls


async def test_an_engine_gets_grammars_for_the_backend_that_bounds_them(served):
    http, decode = served
    response = await ask(http, structured_outputs={"regex": NESTED})
    assert response.status_code == 200, response.text
    structured = decode.calls[-1].params.structured_outputs
    assert (structured.regex, structured._backend) == (NESTED, "guidance")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_an_engine_ends_is_the_clients_error(served, stream, monkeypatch):
    http, decode = served

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InvalidTask(TOO_LONG)
        yield

    monkeypatch.setattr(decode, "generate", refuse)
    response = await ask(http, structured_outputs={"regex": NESTED}, stream=stream)
    assert TOO_LONG in response.text
    error = json.loads(response.text.split("data: ")[1] if stream else response.text)["error"]
    assert error["code"] == 400


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
TALK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", lambda strict: TALK | {"response_format": _json_schema(strict)}, "response_format"),
        (
            "/v1/chat/completions",
            lambda strict: TALK | {"tools": [{"type": "function", "function": _function("parameters", strict)}]},
            "tools (f)",
        ),
        (
            "/v1/responses",
            lambda strict: {
                "input": "Hi",
                "text": {"format": {"type": "json_schema", "name": "f", "schema": UNIQUE, "strict": strict}},
            },
            "text.format",
        ),
        (
            "/v1/messages",
            lambda strict: TALK | {"max_tokens": 4, "tools": [_function("input_schema", strict)]},
            "tools (f)",
        ),
    ],
    ids=["chat", "chat tool", "responses", "messages tool"],
)
async def test_a_strict_schema_with_a_keyword_that_is_not_enforced_is_refused_by_its_name(served, path, body, field):
    answers = [
        await served[0].post(path, json={"model": "m", "store": False, **body(strict)}) for strict in (True, False)
    ]
    assert answers[0].status_code == 400
    assert f'{field}: Unimplemented keys: ["uniqueItems"]' in answers[0].json()["error"]["message"]
    assert "uniqueItems" not in answers[1].text


def _json_schema(strict: bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": UNIQUE, "strict": strict}}


def _function(key: str, strict: bool) -> dict[str, Any]:
    return {"name": "f", key: UNIQUE, "strict": strict}
