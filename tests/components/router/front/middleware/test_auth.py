"""API keys, body and header limits at the HTTP port: a real uvicorn with the guard, before an app like vLLM's."""

import asyncio
import hashlib
import ipaddress
import json
import re
import socket
import time
from contextlib import asynccontextmanager
from functools import partial

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

import ridgeline.router.front.middleware.auth
import ridgeline.router.front.middleware.http_protocol
import ridgeline.router.front.middleware.ingress
from ridgeline.cluster.config.api_keys import ApiKeyError, KeyHashes, key_hashes, open_to_all
from ridgeline.router.client_identity import AddressClients, hash_key
from ridgeline.router.flow.held_bodies import HeldBodies
from ridgeline.router.front.app import behind
from ridgeline.router.front.http.context import WithContext, current
from ridgeline.router.front.middleware.auth import Access, KeyGuard
from ridgeline.router.front.middleware.http_protocol import MAX_HEAD_BYTES, BoundedHeads
from ridgeline.router.front.middleware.ingress import Gates, Ingress
from tests.support.http_server import listening
from tests.support.patience import PATIENCE_S, eventually
from tests.support.samples import router_settings

KEY = "k" * 32
LIMIT = 4096
BEARER = {"authorization": f"Bearer {KEY}"}
NAME = hashlib.sha256(KEY.encode()).hexdigest()[:12]


async def _echo(request):
    return JSONResponse({"bytes": len(await request.body()), "client": current().client})


async def _open(request):
    return PlainTextResponse("secret" if request.url.path == "/v1/models" else "fine")


def _app():
    """Routes as vLLM has them: its mount of /metrics takes every path that begins so."""
    metrics = Mount("/metrics", Route("/{rest:path}", _open))
    metrics.path_regex = re.compile("^/metrics(?P<path>.*)$")
    paths = ("/", "/health", "/ping", "/ready", "/v1/models", "/version", "/docs", "/openapi.json", "/load")
    return Starlette(
        routes=[
            *(Route(path, _open, methods=["GET", "POST"]) for path in paths),
            Route("/v1/completions", _echo, methods=["POST"]),
            Route("/tokenize", _echo, methods=["POST"]),
            metrics,
        ]
    )


def guarded(app, access, limit):
    gates = Gates(lambda client, coming: None, 1, HeldBodies(limit, lambda why: None))
    ingress = partial(Ingress, settings=router_settings(max_request_bytes=limit), gates=gates)
    return behind(app, (WithContext, partial(KeyGuard, access=access), ingress))


@asynccontextmanager
async def serving(*keys, limit=LIMIT, **access):
    access = Access(frozenset(hash_key(key.encode()) for key in keys), **access)
    app = guarded(_app(), access, limit)
    async with (
        listening(app, http=BoundedHeads, proxy_headers=False) as url,
        asyncio.timeout(PATIENCE_S),
        httpx.AsyncClient(base_url=url) as client,
    ):
        client.port = client.base_url.port
        yield client


async def raw(port, *parts):
    """What comes back for these bytes, whatever a client library would make of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


# --- keys


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        *((good, 200) for good in (BEARER, {"x-api-key": KEY}, {"authorization": f"bearer   {KEY}"})),
        ({}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": KEY}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"authorization": f"Bearer {hash_key(KEY.encode()).hex()}"}, 401),
        ({"x-api-key": ""}, 401),
        ({"cookie": f"api_key={KEY}"}, 401),
    ],
)
async def test_a_good_key_is_let_in_by_either_header_and_nothing_else_is(headers, status):
    async with serving("other-key", KEY) as client:
        reply = await client.post("/v1/completions", content=b"{}", headers=headers)
    assert reply.status_code == status
    if status == 200:
        assert reply.json()["client"] == NAME
    else:
        assert reply.headers["www-authenticate"].startswith("Bearer")
        assert "Authorization: Bearer" in reply.json()["error"]["message"]
        assert KEY not in reply.text


async def test_only_the_page_health_ready_ping_and_metrics_are_open_and_only_to_get():
    async with serving(KEY) as client:
        for path in ("/", "/health", "/ready", "/ping", "/metrics"):
            assert (await client.get(path)).status_code == 200, path
            assert (await client.post(path)).status_code == 401, path
            assert (await client.options(path)).status_code == 401, path
        for path in ("/v1/models", "/version", "/docs", "/openapi.json", "/load", "/nothing"):
            assert (await client.get(path)).status_code == 401, path
        assert (await client.post("/tokenize", content=b"{}")).status_code == 401
        assert (await client.get("/v1/models", headers=BEARER)).text == "secret"


@pytest.mark.parametrize(
    "target",
    [
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/health%2f..%2fv1%2fmodels",
        "/%76%31/models",
        "/v1%2fmodels",
        "//v1/models",
        "/metrics/../v1/models",
        "/metrics2",
        "/v1/models;/health",
        "/HEALTH",
        "/health%00",
        "http://x/health/../v1/models",
    ],
)
async def test_no_way_of_writing_a_path_leads_past_the_key(target):
    async with serving(KEY) as client:
        answer = await raw(client.port, f"GET {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert answer.split()[1] in (b"401", b"400"), answer
    assert b"secret" not in answer


async def test_a_websocket_needs_a_key_too():
    async with serving(KEY) as client:
        upgrade = "connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n"
        answer = await raw(client.port, f"GET /v1/realtime HTTP/1.1\r\nhost: x\r\n{upgrade}\r\n".encode())
    assert answer.split()[1] == b"401", answer


async def test_without_keys_everybody_is_let_in_and_known_by_address():
    async with serving() as client:
        reply = await client.post("/v1/completions", content=b"{}")
    assert reply.json() == {"bytes": 2, "client": "127.0.0.1"}
    assert current().client == "anonymous"


def test_keys_come_from_file_and_variable_and_only_their_hashes_are_kept(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# clients\nfirst-key\n\n  second-key  \n")
    found = key_hashes(str(path), None, {"RIDGELINE_API_KEYS": "third-key, first-key"}).clients
    assert found == {hash_key(key) for key in (b"first-key", b"second-key", b"third-key")}
    assert key_hashes(None, None, {}) == key_hashes(None, None, {"RIDGELINE_API_KEYS": ""}) == KeyHashes()


@pytest.mark.parametrize("content", [b"", b"# none\n", b"two words\n", b"\xff\xfe", "schlüssel\n".encode(), None])
def test_a_file_or_variable_that_cannot_close_the_server_is_refused_without_showing_a_key(tmp_path, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ApiKeyError) as caught:
        key_hashes(str(path), None, {})
    assert "words" not in str(caught.value)
    with pytest.raises(ApiKeyError, match="RIDGELINE_API_KEYS"):
        key_hashes(None, None, {"RIDGELINE_API_KEYS": " , "})


def test_an_open_server_that_others_can_reach_is_warned_about():
    hosts = {"127.0.0.1": False, "localhost": False, "::1": False, "0.0.0.0": True, "10.0.0.7": True}
    assert {host: bool(open_to_all(host)) for host in hosts} == hosts


async def test_of_many_keys_in_a_head_two_are_looked_at(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        ridgeline.router.front.middleware.auth, "hash_key", lambda key: hashed.append(key) or hash_key(key)
    )
    many = [("x-api-key", f"guess-{i}") for i in range(900)]
    bearers = [("authorization", f"Bearer guess-{i}") for i in range(900)]
    async with serving(KEY, *(f"key-{i}" for i in range(100))) as client:
        assert (await client.get("/v1/models", headers=[*many, *bearers])).status_code == 401
        assert sorted(hashed) == [b"guess-0", b"guess-0"]
        assert (await client.get("/v1/models", headers=[*many, ("x-api-key", KEY)])).status_code == 401
        assert (await client.get("/v1/models", headers=[("x-api-key", KEY), *many])).status_code == 200
        hashed.clear()
        assert (await client.get("/v1/models", headers={"x-api-key": "k" * 60_000})).status_code == 401
        assert hashed == [], "no key is so long"


# --- names of clients without keys


def name(peer, *forwarded_for, trusted=()):
    clients = AddressClients([ipaddress.ip_network(each) for each in trusted])
    return clients.name(peer, [value.encode() for value in forwarded_for])


@pytest.mark.parametrize(
    ("forwarded_for", "client"),
    [
        (["192.0.2.7"], "192.0.2.7"),
        (["192.0.2.7:4711"], "192.0.2.7"),
        (["2001:db8:1:2:3::4"], "2001:db8:1:2::/64"),
        (["[2001:db8:1:2:3::4]:4711"], "2001:db8:1:2::/64"),
        (["::ffff:192.0.2.7"], "192.0.2.7"),
        (["203.0.113.9, 192.0.2.7"], "192.0.2.7"),  # what the client has written itself stands on the left
        (["192.0.2.7", "10.0.0.5"], "192.0.2.7"),  # through two trusted proxies
        (["203.0.113.9, 192.0.2.7, 10.0.0.5, 10.0.0.6"], "192.0.2.7"),
        (["127.0.0.1, 192.0.2.7"], "192.0.2.7"),
        (["10.0.0.8"], "10.0.0.8"),  # a proxy's own request
        ([], "10.0.0.1"),
        (["garbage"], "10.0.0.1"),
        (["garbage, 192.0.2.7"], "192.0.2.7"),
        (["192.0.2.7, garbage"], "10.0.0.1"),
        (["192.0.2.7, unknown, 10.0.0.5"], "10.0.0.5"),
        (["192.0.2.7, 10.0.0.5:x:y"], "10.0.0.1"),
        (["[::1"], "::/64"),
        (["\u00b2.0.0.1"], "10.0.0.1"),
        (["," * 60_000 + "192.0.2.7"], "192.0.2.7"),
        (["192.0.2.7" + ",10.0.0.2" * 7_000], "10.0.0.2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_client_is_the_last_address_that_is_no_trusted_proxys(forwarded_for, client):
    assert name("10.0.0.1", *forwarded_for, trusted=["10.0.0.0/24"]) == client
    assert name("::ffff:10.0.0.1", *forwarded_for, trusted=["10.0.0.0/24"]) == client


@pytest.mark.parametrize(
    ("peer", "trusted", "client"),
    [
        pytest.param("127.0.0.1", (), "127.0.0.1", id="no proxy is trusted"),
        pytest.param("192.0.2.1", ("198.51.100.0/24",), "192.0.2.1", id="another one is"),
        pytest.param("::ffff:192.0.2.1", (), "192.0.2.1", id="IPv4 written as IPv6"),
        pytest.param("2001:db8:0:2::1", (), "2001:db8:0:2::/64", id="one IPv6 network is one client"),
        pytest.param("2001:db8:0:2::12c", (), "2001:db8:0:2::/64", id="whatever the address in it"),
        pytest.param("2001:db8::1", ("2001:db8::1/128",), "192.0.2.7", id="a proxy trusted by IPv6"),
        pytest.param("2001:db8::2", ("2001:db8::1/128",), "2001:db8::/64", id="its neighbour"),
        pytest.param("fe80::1%eth0", ("fe80::/10",), "192.0.2.7", id="with a scope"),
        pytest.param(None, (), "anonymous", id="no address"),
        pytest.param("", (), "anonymous", id="an empty one"),
        pytest.param("unix", (), "unix", id="a socket's name"),
    ],
)
def test_who_the_client_is_by_its_peer(peer, trusted, client):
    assert name(peer, "192.0.2.7", trusted=trusted) == client


async def test_the_name_is_the_guards_over_a_real_socket_too():
    forged = {"x-forwarded-for": "192.0.2.7"}
    async with serving() as client:
        assert (await client.post("/v1/completions", headers=forged)).json()["client"] == "127.0.0.1"
    behind = AddressClients([ipaddress.ip_network("127.0.0.1")])
    async with serving(addresses=behind) as client:
        assert (await client.post("/v1/completions", headers=forged)).json()["client"] == "192.0.2.7"
    async with serving(KEY, addresses=behind) as client:
        reply = await client.post("/v1/completions", headers={**forged, **BEARER})
        assert reply.json()["client"] == NAME, "a key says who it is"


# --- sizes


async def chunks():
    for _ in range(4):
        yield bytes(LIMIT // 4)


async def test_a_body_up_to_the_limit_is_read_and_a_longer_one_refused():
    async with serving() as client:
        assert (await client.post("/v1/completions", content=bytes(LIMIT))).json()["bytes"] == LIMIT
        assert (await client.post("/v1/completions", content=chunks())).json()["bytes"] == LIMIT
        reply = await client.post("/v1/completions", content=bytes(LIMIT + 1))
        longer = await client.post("/v1/completions", content=bytes(20 << 20))  # sent whole before it reads
        assert longer.status_code == 413
    assert reply.status_code == 413
    assert "server.max_request_bytes" in reply.json()["error"]["message"]


@pytest.fixture
def a_short_linger(monkeypatch):
    """A refused client that sends on and never closes is read from for a tenth of a second only."""
    monkeypatch.setattr(ridgeline.router.front.middleware.ingress, "LINGER_S", 0.1)
    monkeypatch.setattr(ridgeline.router.front.middleware.http_protocol, "LINGER_S", 0.1)


POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNK = b"%x\r\n%s\r\n" % (1024, bytes(1024))


@pytest.mark.usefixtures("a_short_linger")
@pytest.mark.parametrize(
    ("parts", "status"),
    [
        pytest.param([POST + b"content-length: %d\r\n\r\n" % (1 << 40)], 413, id="announces too much"),
        pytest.param([POST + b"transfer-encoding: chunked\r\n\r\n", *[CHUNK] * 5], 413, id="is too long, and goes on"),
        pytest.param([POST + b"content-length: 100\r\n\r\n", b"half"], 408, id="stops in the middle"),
    ],
)
async def test_a_body_that_is_not_waited_for(monkeypatch, parts, status):
    monkeypatch.setattr(ridgeline.router.front.middleware.ingress, "BODY_PART_WITHIN_S", 0.2)
    async with serving() as client:
        answer = await raw(client.port, *parts)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == status


async def test_a_router_that_stood_still_does_not_refuse_a_body_that_came_meanwhile(monkeypatch):
    monkeypatch.setattr(ridgeline.router.front.middleware.ingress, "BODY_PART_WITHIN_S", 0.2)
    monkeypatch.setattr(ridgeline.router.front.middleware.ingress, "LATE_S", 0.2)
    asked, answered = [], []

    async def receive():
        asked.append(1)
        if len(asked) == 1:
            stand_still(1.0)
            await asyncio.Event().wait()  # what came meanwhile is there only after the time is over
        return {"type": "http.request", "body": b"whole"}

    async def send(message):
        answered.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await guarded(_app(), Access(), LIMIT)(scope, receive, send)
    assert len(asked) == 2
    assert json.loads(answered[1]["body"])["bytes"] == 5


def stand_still(seconds):
    time.sleep(seconds)


@pytest.fixture
def heads_read(monkeypatch):
    """The connections on which a head has been read to its end, once for each head: what is sent then is a new read."""
    whole, read = BoundedHeads.on_headers_complete, []

    def note(self):
        whole(self)
        read.append(self)

    monkeypatch.setattr(BoundedHeads, "on_headers_complete", note)
    return read


async def test_a_body_longer_than_a_head_may_be_is_no_head_however_it_arrives(heads_read):
    size = 3 * MAX_HEAD_BYTES
    async with serving(limit=size) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for number in (1, 2):  # the second request on the same connection
            writer.write(head)
            await eventually(lambda number=number: len(heads_read) == number)
            writer.write(bytes(size))
            await writer.drain()
            assert (await reader.readuntil(b"}")).split()[1] == b"200"
        writer.close()


@pytest.mark.usefixtures("a_short_linger")
async def test_a_head_that_does_not_end_is_refused_and_many_short_ones_are_not():
    async with serving() as client:
        # The last part makes it too long: one sent after the refusal might find the connection closed.
        endless = [b"GET /health HTTP/1.1\r\nx: ", *[b"a" * 16384] * (MAX_HEAD_BYTES // 16384)]
        assert b"431" in await raw(client.port, *endless)
        for _ in range(300):
            assert (await client.get("/health", headers={"x": "a" * 1000})).status_code == 200


async def test_the_refusal_of_a_head_arrives_however_much_is_still_on_its_way(monkeypatch):
    monkeypatch.setattr(ridgeline.router.front.middleware.http_protocol, "LINGER_S", PATIENCE_S)
    async with serving() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES)
        await writer.drain()
        await asyncio.sleep(0.05)
        for _ in range(20):
            writer.write(b"a" * MAX_HEAD_BYTES)
            await writer.drain()
        assert b"431" in await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
        writer.close()


@pytest.mark.usefixtures("a_short_linger")
async def test_a_trailer_that_does_not_end_is_refused(heads_read):
    async with serving() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
        writer.write(head)
        await eventually(lambda: heads_read)
        writer.write(b"a" * (MAX_HEAD_BYTES + 1))
        assert b"431" in await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()


@pytest.fixture
def heads_within(monkeypatch):
    """Sets how long a head may take of which the wait has not begun."""
    return partial(monkeypatch.setattr, ridgeline.router.front.middleware.http_protocol, "HEAD_WITHIN_S")


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nhost:", b"\r\n"], ids=repr)
async def test_a_connection_on_which_no_head_ends_is_not_kept(begun, heads_within):
    heads_within(0.2)
    async with serving() as client:
        connection = socket.create_connection(("127.0.0.1", client.port))
        connection.sendall(begun)  # before the server, which waits for this task, takes the connection
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        assert (await reader.read()).split()[1] == b"408"
        writer.close()


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\nhost:", b"\r\n"], ids=repr)
async def test_a_connection_on_which_no_second_head_ends_is_not_kept(begun, heads_within):
    async with serving() as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"fine")).split()[1] == b"200"
        heads_within(0.2)
        writer.write(begun)
        assert (await reader.read()).split()[1] == b"408"
        writer.close()


async def test_an_idle_connection_is_kept_for_the_next_request_and_half_of_one_does_not_end_an_answer(heads_within):
    began, go = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send):
        began.set()
        await go.wait()
        await PlainTextResponse("fine")(scope, receive, send)

    async with listening(app, http=BoundedHeads) as url, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await began.wait()
        heads_within(0.1)
        writer.write(b"GET / HTTP/1.1\r\n")
        await asyncio.sleep(0.3)  # the second head is late, and the first answer goes on
        heads_within(2 * PATIENCE_S)
        await asyncio.sleep(0.3)
        go.set()
        assert (await reader.readuntil(b"fine")).split()[1] == b"200"
        writer.write(b"host: x\r\n\r\n")
        assert (await reader.readuntil(b"fine")).split()[1] == b"200"
        heads_within(0.1)
        await asyncio.sleep(0.3)  # idle for longer than a head may take: nothing is waited for
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"fine")).split()[1] == b"200"
        writer.close()


async def test_a_connection_too_many_is_told_so_and_the_others_are_served(monkeypatch):
    monkeypatch.setattr(ridgeline.router.front.middleware.http_protocol, "MOST_CONNECTIONS", 3)
    async with serving() as client:
        opened = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        assert (await reader.read()).split()[1] == b"503"
        writer.close()
        first_reader, first = opened[0]
        first.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await first_reader.readuntil(b"fine")).split()[1] == b"200"
        for _, one in opened:
            one.close()
