"""Errors as Anthropic's clients expect them, each by its own path through the real router, read by their own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.engine.passed_args import front
from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.middleware.anthropic_errors import anthropic_errors
from tests.support.fake_engine import FakeEngine
from tests.support.patience import PATIENCE_S, eventually
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
KEY = "a-clients-key"
KEYED = {"authorization": f"Bearer {KEY}"}
WISH: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "w1 w2"}]}
KEEP_ALIVE_S = 1
CONTEXT_TOKENS = 2048
TOO_LONG = json.dumps({"error": {"message": "too long", "code": 400}}).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    """(HTTP client, router, prefill, decode); prefill makes steps when it is told to."""
    vllm = {"chat_template": TEMPLATE, "sse_keep_alive_interval": KEEP_ALIVE_S}
    async with serving(
        model,
        (FakeEngine("prefill"), FakeEngine("decode")),
        server_args=front(vllm),
        api_key_hashes=frozenset({hash_key(KEY.encode())}),
        max_request_bytes=100_000,
        max_concurrent_requests=1,
        max_model_len=CONTEXT_TOKENS,
    ) as parts:
        yield parts


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served):
    async with AsyncAnthropic(base_url=str(served[0].base_url), api_key=KEY, max_retries=0) as made:
        yield made


async def nothing_is_served(router: Any) -> None:
    """Wait until the one place is free: a client may have a whole answer before its request has left the router."""
    await eventually(lambda: router._client._admission.sequences == 0)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _one_place_is_free(served):
    await nothing_is_served(served[1])


def kind(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == error.request_id
    return str(body["error"]["type"])


WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, 400, "invalid_request_error", "input_schema"),
    ({"kv_transfer_params": {"a": 1}}, 400, "invalid_request_error", "kv_transfer_params"),
    ({"messages": [{"role": "user", "content": "w1 " * 5000}]}, 400, "invalid_request_error", "context"),
    ({"model": "claude"}, 404, "not_found_error", "claude"),
    ({"system": "w" * 100_001}, 413, "request_too_large", "max_request_bytes"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("changes", "status", "expected", "words"), WRONG, ids=lambda value: str(value)[:40])
async def test_a_wrong_request_is_told_in_anthropics_shape(client, changes, status, expected, words, stream):
    with pytest.raises(anthropic.APIStatusError) as raised:
        await client.post("/v1/messages", body=WISH | changes | {"stream": stream}, cast_to=object)
    assert (raised.value.status_code, kind(raised.value)) == (status, expected)
    assert words in raised.value.body["error"]["message"]


async def test_without_a_key_on_a_wrong_path_and_by_a_wrong_method_too(served, client):
    stranger = client.with_options(api_key="other")
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await stranger.messages.create(**WISH)
    assert kind(refused.value) == "authentication_error"
    assert refused.value.response.headers["www-authenticate"]
    for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)):
        answer = await served[0].request(method, path, headers=KEYED)
        assert (answer.status_code, answer.json()["type"]) == (status, "error"), answer.text
    packed = await served[0].post("/v1/messages/count_tokens", headers=KEYED | {"content-encoding": "gzip"})
    assert (packed.status_code, packed.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_a_full_server_is_a_rate_limit_with_retry_after_and_a_failure_is_the_apis(served, client, monkeypatch):
    http, router, prefill, _ = served
    monkeypatch.setattr(prefill, "_stepping", "manual")
    first = asyncio.create_task(client.messages.create(**WISH))
    await eventually(lambda: prefill.running)
    for stream in (False, True):
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**WISH, stream=stream)
        assert kind(refused.value) == "rate_limit_error"
        assert int(refused.value.response.headers["retry-after"]) >= 1
    first.cancel()
    await nothing_is_served(router)

    async def fails(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ridgeline.router.dispatch.orchestrator.Orchestrator.run", fails)
    with pytest.raises(anthropic.InternalServerError) as failed:
        await client.messages.create(**WISH)
    assert kind(failed.value) == "api_error"
    late = await http.post("/v1/completions", json=WISH | {"prompt": "w1"}, headers=KEYED)
    assert set(late.json()["error"]) == {"message", "type", "param", "code"}, "other paths speak OpenAI's form"


async def test_an_error_in_the_middle_of_a_stream_is_an_event_that_the_client_raises(served, client, monkeypatch):
    _, _, _, decode = served
    monkeypatch.setattr(decode, "_stepping", "manual")
    with pytest.raises(anthropic.APIStatusError) as raised:  # noqa: PT012 - the stream has begun before
        async with client.with_options(default_headers={"x-ridgeline-timeout-s": "1.5"}).messages.stream(
            **WISH
        ) as stream:
            async for event in stream:
                assert event.type in ("message_start", "content_block_start", "content_block_delta", "text")
    assert kind(raised.value) == "timeout_error"
    assert "x-ridgeline-timeout-s" in raised.value.body["error"]["message"]


# --- what else /v1/messages and /v1/responses do as their clients expect


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", WISH),
        ("/v1/responses", {"model": "m", "input": "w1 w2", "store": False, "max_output_tokens": 4}),
    ],
)
async def test_a_stream_has_comments_while_its_prompt_waits_and_leaving_then_frees_the_worker(
    served, monkeypatch, path, body
):
    http, router, prefill, _ = served
    monkeypatch.setattr(prefill, "_stepping", "manual")
    async with http.stream("POST", path, json=body | {"stream": True}, headers=KEYED) as answer:
        assert answer.status_code == 200
        async with asyncio.timeout(PATIENCE_S):
            async for line in answer.aiter_lines():
                if line == ": keep-alive":
                    break
        assert prefill.running
    await nothing_is_served(router)
    await eventually(lambda: not prefill.running)


async def test_a_limit_above_the_context_is_cut_to_what_the_prompt_leaves(client):
    answer = await client.messages.create(**WISH | {"max_tokens": 32_000}, timeout=PATIENCE_S)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", CONTEXT_TOKENS - 2)


# --- the layer alone


@given(
    status=st.sampled_from([200, 400, 401, 418, 429, 500, 503]),
    parts=st.one_of(
        st.lists(st.binary(max_size=40), max_size=3),
        st.integers(0, 60).map(lambda cut: [TOO_LONG[:cut], TOO_LONG[cut:]]),
    ),
    path=st.sampled_from(["/v1/messages", "/v1/messages/count_tokens", "/v1/messagesx", "/v1/chat/completions"]),
    ends_later=st.booleans(),
)
async def test_whatever_an_app_answers_an_error_is_told_once_and_everything_else_is_left_alone(
    status, parts, path, ends_later
):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"x", b"y")]})
        for number, part in enumerate(parts, 1):
            more = ends_later or number < len(parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})
        if b"".join(parts) == TOO_LONG:
            assert sent, "the client has the error, also if the end of the answer is still to come"
        if ends_later or not parts:
            await send({"type": "http.response.body", "body": b""})

    await anthropic_errors(app)({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
    body, headers = b"".join(message.get("body", b"") for message in sent[1:]), dict(sent[0]["headers"])
    assert (sent[0]["status"], headers[b"x"]) == (status, b"y")
    if status < 400 or path not in ("/v1/messages", "/v1/messages/count_tokens"):
        assert body == b"".join(parts)
    else:
        assert (int(headers[b"content-length"]), json.loads(body)["type"]) == (len(body), "error")
        assert b"".join(parts) != TOO_LONG or json.loads(body)["error"]["message"] == "too long"
