"""HTTP as clients, proxies and load balancers expect it, at the real router with vLLM's real app."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import zlib
from typing import Any

import pytest
import pytest_asyncio

from ridgeline.engine.passed_args import front
from ridgeline.router.client_identity import hash_key
from ridgeline.router.front.http.routes import OPEN_PATHS
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
KEY = {"authorization": "Bearer a-clients-key"}
NEW_ID = re.compile(r"[0-9a-f]{32}")
TEXT: dict[str, Any] = {"model": "m", "prompt": "w1 w2", "max_tokens": 2, "ignore_eos": True}
CHAT_PATH = "/v1/chat/completions"
TALK = {"model": "m", "messages": [{"role": "user", "content": "w1"}], "max_tokens": 2}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    CHAT_PATH: TALK,
    "/v1/responses": {"model": "m", "input": "w1", "max_output_tokens": 2},
    "/v1/messages": TALK,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(model):
    engines = FakeEngine("prefill"), FakeEngine("decode")
    keys = frozenset({hash_key(b"a-clients-key")})
    settings = {"api_key_hashes": keys, "max_request_bytes": 100_000, "served_names": ("m", "org/second")}
    async with serving(model, engines, server_args=front({"chat_template": TEMPLATE}), **settings) as (client, *_):
        yield client


async def sent_raw(http: Any, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


# --- x-request-id


@pytest.mark.parametrize(
    ("what", "status"),
    [
        ({"url": "/v1/completions", "json": TEXT, "headers": KEY}, 200),
        ({"url": "/v1/completions", "json": TEXT | {"stream": True}, "headers": KEY}, 200),
        ({"url": "/v1/completions", "json": TEXT}, 401),
        ({"url": "/v1/completions", "json": TEXT | {"model": "x"}, "headers": KEY}, 404),
        ({"url": "/v1/completions", "json": TEXT | {"temperature": -1}, "headers": KEY}, 400),
        ({"url": "/v1/completions", "content": b"x" * 100_001, "headers": KEY}, 413),
        ({"url": "/ridgeline/drain", "json": {}, "headers": KEY}, 403),
        ({"url": "/nothing", "json": {}, "headers": KEY}, 404),
        ({"url": "/health", "json": {}, "headers": KEY}, 405),
    ],
)
async def test_every_answer_has_an_id_of_its_own_or_the_clients(http, what, status):
    answer = await http.post(**what)
    assert answer.status_code == status, answer.text
    assert NEW_ID.fullmatch(answer.headers["x-request-id"])
    headers = {**what.get("headers", {}), "X-Request-Id": "mine/1:~"}
    assert (await http.post(**(what | {"headers": headers}))).headers["x-request-id"] == "mine/1:~"


@pytest.mark.parametrize("unusable", [b"", b"two words", b"\xff", b"x" * 257])
async def test_an_id_that_cannot_be_echoed_is_replaced_in_the_header(http, unusable):
    answer = await http.get("/health", headers={"X-Request-Id": unusable})
    assert (answer.status_code, len(answer.headers.get_list("x-request-id"))) == (200, 1)
    assert NEW_ID.fullmatch(answer.headers["x-request-id"])


async def test_what_is_no_http_gets_an_id_and_an_error_object_too(http):
    answer = await sent_raw(http, b"nonsense\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head
    assert json.loads(body)["error"]["code"] == 400


# --- HEAD


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/v1/models", "/v1/models/x", "/version", "/nothing"])
async def test_head_is_answered_as_get_without_a_body(http, path):
    head, get = await http.head(path, headers=KEY), await http.get(path, headers=KEY)
    assert (head.status_code, head.content) == (get.status_code, b"")
    for name in ("content-type", "content-length"):
        assert head.headers.get(name) == get.headers.get(name) or path == "/metrics"  # whose numbers grow


async def test_a_probe_without_a_key_may_ask_with_head(http):
    assert {(await http.head(path)).status_code for path in ("/health", "/ready", "/metrics")} == {200}
    assert (await http.head("/v1/models")).status_code == 401


# --- streams behind proxies


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("stream", [True, False])
async def test_proxies_are_told_to_hold_no_stream_back_and_to_keep_none(http, path, stream):
    answer = await http.post(path, json=STREAMS[path] | {"stream": stream}, headers=KEY)
    assert answer.status_code == 200, answer.text
    told = (answer.headers.get("cache-control"), answer.headers.get("x-accel-buffering"))
    assert told == (("no-cache", "no") if stream else (None, None))


# --- models and paths


async def test_a_model_can_be_asked_for_by_its_name(http):
    listed = (await http.get("/v1/models", headers=KEY)).json()["data"]
    cards = [(await http.get(f"/v1/models/{name}", headers=KEY)).json() for name in ("m", "org/second")]
    for each in (*listed, *cards):
        each.pop("created")
        each.pop("permission")
    assert cards == listed
    assert (await http.get("/v1/models/", headers=KEY)).json()["data"][0]["id"] == "m"


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("name", ["m", "org/second"])
async def test_each_name_of_the_model_is_served_and_the_first_is_in_the_answer(http, path, name):
    answer = await http.post(path, json=STREAMS[path] | {"model": name}, headers=KEY)
    assert (answer.status_code, answer.json()["model"]) == (200, "m"), answer.text


@pytest.mark.parametrize("name", ["gpt-17", "org/model", "org%2Fmodel", "m/m"])
async def test_a_model_that_is_not_served_is_not_found(http, name):
    answer = await http.get(f"/v1/models/{name}", headers=KEY)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (404, "NotFoundError", "model")
    assert f"`{name.replace('%2F', '/')}` does not exist" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", CHAT_PATH),
        ("POST", "/v1/v1/chat/completions", CHAT_PATH),
        ("POST", "/v1//chat/completions", CHAT_PATH),
        ("POST", "/api/v1/Chat/Completions", CHAT_PATH),
        ("POST", "/messages", "/v1/messages"),
        ("POST", "/anthropic/v1/messages", "/v1/messages"),
        ("GET", "/v1//models", "/v1/models"),
        ("GET", "/models", "/v1/models"),
        ("GET", "/v1/health", "/health"),
        ("POST", "/v1/embeddings", "/openapi.json"),
        ("GET", "/v1/", "/openapi.json"),
        ("POST", "/drain", "/openapi.json"),
        ("GET", CHAT_PATH, "POST"),
    ],
)
async def test_the_answer_to_a_wrong_path_or_method_names_the_right_one(http, method, path, meant):
    answer = await http.request(method, str(http.base_url).rstrip("/") + path, headers=KEY)
    assert answer.status_code == (405 if meant == "POST" else 404), answer.text
    error = answer.json()["error"]
    assert path in error["message"]
    assert f"use {meant}" in error["message"] or f"GET {meant}" in error["message"]
    assert error["code"] == answer.status_code


# --- bodies


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress), ("br", bytes)])
async def test_a_packed_body_is_refused_in_a_sentence_and_never_unpacked(http, path, coding, pack):
    bomb = pack(json.dumps(TEXT | {"prompt": "w1 " * 20_000}).encode())[:100_000]
    answer = await http.post(path, content=bomb, headers=KEY | {"content-encoding": coding})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("half", [b"\\ud83d", b"\\udc00 w1", "w1 \ud800".encode("utf-8", "surrogatepass")])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"model":"m","prompt":"%s","max_tokens":1}'),
        ("/v1/chat/completions", b'{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":1}'),
        ("/v1/messages", b'{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":1}'),
        ("/v1/responses", b'{"model":"m","input":"%s","store":false}'),
        ("/tokenize", b'{"model":"m","prompt":"%s"}'),
    ],
)
async def test_half_a_surrogate_pair_is_refused_by_name(http, path, body, half):
    answer = await http.post(path, content=body % half, headers=KEY | {"content-type": "application/json"})
    assert answer.status_code == 400
    assert "U+D" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("tokens", [[1_000_000_000], [5, 200, 6], [2**40], [2**70], [-1]])
async def test_ids_outside_of_the_vocabulary_are_not_detokenized(http, tokens):
    assert (await http.post("/detokenize", json={"tokens": [5, 199, 6]}, headers=KEY)).json()["prompt"] == "w5 w199 w6"
    assert (await http.post("/detokenize", json={"tokens": []}, headers=KEY)).status_code == 200
    answer = await http.post("/detokenize", json={"tokens": tokens}, headers=KEY)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize(
    ("path", "body", "field", "refused"),
    [
        *(("/v1/completions", TEXT, field, False) for field in ("model", "user", "stop", "cache_salt")),
        ("/generative_scoring", {"query": "w1", "items": ["w2"], "label_token_ids": [1, 2]}, "cache_salt", True),
        ("/v1/completions", TEXT, "request_id", True),
        ("/v1/completions", TEXT | {"stream": True}, "request_id", True),
    ],
)
async def test_half_a_surrogate_pair_elsewhere_is_no_failure_and_reaches_no_worker(http, path, body, field, refused):
    content = json.dumps({"model": "m"} | body | {field: "\ud800"})
    answer = await http.post(path, content=content, headers=KEY | {"content-type": "application/json"})
    assert answer.status_code < 500, answer.text
    assert not refused or (answer.status_code, "U+D800" in answer.text) == (400, True), answer.text
