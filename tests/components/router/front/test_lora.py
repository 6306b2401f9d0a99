"""LoRA adapters over HTTP: vLLM's routes and bodies for all workers, and `model` chooses one of them."""

import pytest
import pytest_asyncio

from ridgeline.router.client_identity import hash_key
from tests.support.fake_engine import FakeEngine
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPERATOR = {"authorization": "Bearer an-admin-key"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest_asyncio.fixture(loop_scope="module")
async def served(model):
    """(HTTP client, prefill engine, decode engine); chat is there from the start."""
    engines = FakeEngine("prefill"), FakeEngine("decode")
    for engine in engines:
        engine.adapter_digests = {"/chat": "v1", "/sql": "v1"}
    settings = {
        "engine_args": {"enable_lora": True, "max_lora_rank": 8},
        "lora_modules": [{"name": "chat", "path": "/chat"}],
        "admin_key_hashes": frozenset({hash_key(b"an-admin-key")}),
    }
    async with serving(model, engines, **settings) as (http, _, prefill, decode):
        yield http, prefill, decode


async def models(http):
    cards = (await http.get("/v1/models")).json()["data"]
    return {card["id"]: (card["parent"], card["root"]) for card in cards if card["parent"]}


async def complete(http, model, **fields):
    body = {"model": model, "prompt": [5] * 70, "max_tokens": 3, "ignore_eos": True, **fields}
    return await http.post("/v1/completions", json=body)


async def load(http, name, path, headers=OPERATOR, **fields):
    return await http.post(LOAD, json={"lora_name": name, "lora_path": path, **fields}, headers=headers)


async def test_adapters_are_listed_chosen_by_model_loaded_replaced_and_unloaded(served):
    http, prefill, decode = served
    assert await models(http) == {"chat": ("m", "/chat")}
    loaded = await load(http, "sql", "/sql")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await models(http) == {"chat": ("m", "/chat"), "sql": ("m", "/sql")}
    for name in ("sql", "chat", "m"):
        answer = await complete(http, name)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
    for engine in (prefill, decode):
        assert [call.adapter and call.adapter.key for call in engine.calls] == ["sql@v1", "chat@v1", None]
    for engine in (prefill, decode):
        engine.adapter_digests["/sql"] = "v2"
    assert (await load(http, "sql", "/sql")).status_code == 400
    assert (await load(http, "sql", "/sql", load_inplace=True)).status_code == 200
    await complete(http, "sql", n=2)
    assert {call.adapter.key for call in prefill.calls[3:]} == {"sql@v2"}
    removed = await http.post(UNLOAD, json={"lora_name": "sql"}, headers=OPERATOR)
    assert (removed.status_code, removed.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert await models(http) == {"chat": ("m", "/chat")}


async def test_an_unknown_adapter_is_404_as_an_unknown_model_is(served):
    http, *_ = served
    answer = await complete(http, "none")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NotFoundError")
    assert (await http.post(UNLOAD, json={"lora_name": "none"}, headers=OPERATOR)).status_code == 404


@pytest.mark.parametrize(("name", "path"), [("m", "/sql"), ("none", "/none"), ("none", ""), ("", "/sql")])
async def test_what_cannot_be_loaded_is_400_and_changes_nothing(served, name, path):
    http, prefill, _ = served
    before = await models(http)
    answer = await load(http, name, path)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert (await models(http), [*prefill.adapters]) == (before, ["chat@v1"])


async def test_only_operators_change_adapters(served):
    http, *_ = served
    for path in (LOAD, UNLOAD):
        assert (await http.post(path, json={"lora_name": "chat", "lora_path": "/chat"})).status_code == 401
