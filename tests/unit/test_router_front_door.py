"""Keys, proxies and operators' paths at the real router with vLLM's real app: what a stranger can and cannot do."""

from __future__ import annotations

import ipaddress

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry
from served_router import make_model, serving

import router.guard
from router.client_identity import CLIENT, hash_key

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "a-clients-key"
BEARER = {"authorization": f"Bearer {KEY}"}
FORGED = {"x-forwarded-for": "192.0.2.7", "x-forwarded-proto": "https"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    make_model(directory)
    return directory


@pytest.fixture(scope="module")
def seen():
    """What the guard was told of each request, and what it told the app: the socket's peer and the client's name."""
    return []


@pytest.fixture(scope="module", autouse=True)
def a_careless_shell(seen):
    """Each router is the only one of its process, and is started as a shell would that trusts every proxy."""
    guarded = router.guard.guarded

    def watched(app, *args):
        async def inner(scope, receive, send):
            seen.append((scope["client"][0], CLIENT.get()))
            await app(scope, receive, send)

        return guarded(inner, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORWARDED_ALLOW_IPS", "*")
        patch.setattr("router.app.guarded", watched)
        yield patch


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(model, a_careless_shell):
    """(HTTP client, router, engines) of a router whose clients have a key."""
    a_careless_shell.setattr("router.app.REGISTRY", CollectorRegistry())
    async with serving(model, api_key_hashes=frozenset({hash_key(KEY.encode())})) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def behind_a_proxy(model, a_careless_shell):
    """The same without keys and with a proxy on this machine."""
    a_careless_shell.setattr("router.app.REGISTRY", CollectorRegistry())
    async with serving(model, trusted_proxies=(ipaddress.ip_network("127.0.0.0/8"),)) as served:
        yield served


async def test_a_clients_key_drains_no_worker(keyed):
    http, deployed, _, _ = keyed
    wish = {"worker": "decode-0", "timeout_s": 0, "force": True}
    assert (await http.post("/ridgeline/drain", json=wish, headers=BEARER)).status_code == 403
    assert (await http.get("/ridgeline/workers", headers=BEARER)).status_code == 403
    assert deployed._fleet.get("decode-0").load().usable


async def test_a_forwarded_address_changes_nothing_whatever_the_servers_environment_says(keyed, seen):
    http = keyed[0]
    seen.clear()
    assert (await http.get("/v1/models", headers={**BEARER, **FORGED})).status_code == 200
    assert seen == [("127.0.0.1", hash_key(KEY.encode()).hex()[:12])]


async def test_a_trusted_proxy_names_the_client_and_the_peer_stays_the_proxy(behind_a_proxy, seen):
    http = behind_a_proxy[0]
    seen.clear()
    assert (await http.get("/v1/models", headers=FORGED)).status_code == 200
    assert (await http.get("/v1/models")).status_code == 200
    assert seen == [("127.0.0.1", "192.0.2.7"), ("127.0.0.1", "127.0.0.1")]


async def test_whoever_comes_through_a_trusted_proxy_is_no_operator(behind_a_proxy):
    http, deployed, _, _ = behind_a_proxy
    for headers in ({}, FORGED, {"x-forwarded-for": "127.0.0.1"}):
        wish = {"worker": "decode-0", "timeout_s": 0, "force": True}
        assert (await http.post("/ridgeline/drain", json=wish, headers=headers)).status_code == 403
        assert (await http.get("/ridgeline/workers", headers=headers)).status_code == 403
    assert deployed._fleet.get("decode-0").load().usable
