"""What a request may take before it is read: turns, its client's share, the cost of its body, its times and memory."""

import asyncio
import json
from contextlib import AsyncExitStack
from http import HTTPStatus

import httpx
import pytest
import pytest_asyncio
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse

from ridgeline.router.client_identity import hash_key
from ridgeline.router.dispatch.orchestrator import Orchestrator
from ridgeline.router.flow.admission_rules import Refused
from ridgeline.router.flow.concurrency_limiter import AT_A_TIME, ConcurrencyLimiter
from ridgeline.router.flow.held_bodies import MOST_BODIES, HeldBodies
from ridgeline.router.front.http.context import WithContext, current
from ridgeline.router.front.http.errors import HttpRefusal
from ridgeline.router.front.middleware.ingress import MAX_COST, Gates, Ingress, cost, read_limit_s, read_timeout_s
from ridgeline.router.settings import LONGEST_LIMIT_MS, SHORTEST_LIMIT_MS
from tests.support.fake_engine import FakeEngine
from tests.support.http_server import listening
from tests.support.patience import eventually
from tests.support.samples import router_settings
from tests.support.served_router import serving

BODY = {"model": "m", "prompt": [5] * 8, "max_tokens": 3, "ignore_eos": True}


def ingress(app, limiter=None, check_share=lambda client, coming: None, **settings):
    gates = Gates(check_share, 1, HeldBodies(1 << 23, lambda why: None), limiter or ConcurrencyLimiter())
    return WithContext(Ingress(app, router_settings(**settings), gates))


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


# --- turns


class Bench:
    """Requests that stay inside until told."""

    def __init__(self):
        self.limiter, self.inside, self.tasks, self._done = ConcurrencyLimiter(), [], {}, {}

    async def come(self, client, number):
        for one in range(number):
            name = f"{client}-{one}"
            self._done[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name, client))
            await settle()

    async def _stay(self, name, client):
        async with self.limiter.turn(client):
            self.inside.append(name)
            await self._done[name].wait()

    async def finish(self, name):
        self._done[name].set()
        await self.tasks[name]
        await settle()


@pytest.fixture
async def bench():
    bench = Bench()
    yield bench
    for task in bench.tasks.values():
        task.cancel()
    await asyncio.gather(*bench.tasks.values(), return_exceptions=True)
    assert bench.limiter.of("a") == bench.limiter.of("b") == 0


async def test_one_client_cannot_take_all_turns_and_those_who_wait_go_in_by_turns(bench):
    await bench.come("a", 20)
    assert (len(bench.inside), bench.limiter.of("a")) == (AT_A_TIME - 1, 20)
    await bench.come("b", 3)
    assert bench.inside[-1] == "b-0", "at once"
    for name in list(bench.inside)[:4]:
        await bench.finish(name)
    assert "b-1" in bench.inside[: AT_A_TIME + 2]


async def test_who_leaves_while_it_waits_keeps_nobody_out(bench):
    await bench.come("a", AT_A_TIME + 2)
    waiting = [name for name in bench.tasks if name not in bench.inside]
    bench.tasks[waiting[0]].cancel()
    await settle()
    await bench.finish(bench.inside[0])
    assert bench.inside[-1] == waiting[1]


async def test_a_turn_ends_when_the_request_is_taken_in_and_not_when_it_is_answered():
    limiter, answered = ConcurrencyLimiter(), asyncio.Event()

    async def app(scope, receive, send):
        current().taken_in()
        current().taken_in()
        await answered.wait()

    async def receive():
        return {"type": "http.request", "body": b"{}"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    layer = ingress(app, limiter)
    running = [asyncio.create_task(layer(scope, receive, None)) for _ in range(3 * AT_A_TIME)]
    await settle()
    assert not limiter.of(current().client)
    answered.set()
    await asyncio.gather(*running)


# --- what is refused


async def echo(scope, receive, send):
    limits = [current().timeout_s, current().ttft_limit_s, current().tpot_limit_s]
    await JSONResponse({"bytes": len(await Request(scope, receive).body()), "limits": limits})(scope, receive, send)


@pytest_asyncio.fixture
async def layer():
    """An HTTP client of the layer alone, with a limit for TTFT."""
    async with listening(ingress(echo, ttft_ms=2000.0)) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


async def test_a_client_over_its_share_is_refused_with_its_body_read_and_not_parsed():
    asked = []

    def check_share(client, coming):
        asked.append(coming)
        raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "client_share", "you hold your share", 7)

    async with listening(ingress(echo, check_share=check_share)) as url, httpx.AsyncClient(base_url=url) as http:
        answer = await http.post("/v1/completions", content=b"x" * 3_000_000, headers={"connection": "close"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["code"] == 429
        assert (await http.post("/tokenize", content=b"{}")).status_code == 200
    assert asked == [0]


async def test_a_body_that_costs_too_much_is_refused_before_it_is_parsed_and_others_come_whole(layer):
    long = json.dumps({"prompt": [5] * 900_000}).encode()
    assert (await layer.post("/", content=long)).json()["bytes"] == len(long)
    assert (await layer.get("/")).json()["bytes"] == 0
    assert (await layer.post("/", content=json.dumps({"prompt": [[]] * 900_000}).encode())).status_code == 400


@pytest.mark.parametrize(
    ("body", "too_much"),
    [
        pytest.param({"prompt": [5] * (MAX_COST + 10)}, True, id="a million numbers"),
        pytest.param({"prompt": ["a"] * (MAX_COST // 20)}, True, id="strings"),
        pytest.param({"messages": [{"role": "user", "content": "a"}] * (MAX_COST // 150)}, True, id="objects"),
        pytest.param({"x": [[]] * (MAX_COST // 2)}, True, id="lists"),
        pytest.param({"prompt": [123456] * 900_000}, False, id="a long prompt"),
        pytest.param({"prompt": "one, two, {three}: " * 200_000}, False, id="a long text"),
        pytest.param({"prompt": 'she said "no", {} [] \\ \\" ' * 200_000}, False, id="a long text of JSON"),
        pytest.param(
            {"messages": [{"role": "user", "content": 'def f(x): return {"a": [x, 1]}\n' * 200}] * 2000},
            False,
            id="a long chat",
        ),
        pytest.param(b'{"prompt": "never ends, {{{{', False, id="no JSON"),
        pytest.param(b"\xff" * 1000, False, id="no text"),
    ],
)
def test_the_cost_of_a_body(body, too_much):
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    assert (cost(content) > MAX_COST) is too_much


# --- the times that a client allows

TTFT, TPOT, TIMEOUT = b"x-ridgeline-ttft-ms", b"x-ridgeline-tpot-ms", b"x-ridgeline-timeout-s"
NO_NUMBERS = ["", "soon", "1,5", "1_000", "0x10", "nan", "inf", "-inf", "1 2", "--1"]
OUT_OF_BOUNDS = ["0", "-0.0", "-20", "1e-400", "0.0001", "3600000.1", "1e300"]
number_like = st.text("0123456789.eE+-_ infa", max_size=12).map(str.encode)
anything = st.one_of(st.binary(max_size=60), number_like, st.floats().map(lambda number: str(number).encode()))


@given(anything)
@example(b"9" * 400)
@example("٢٠".encode())  # digits to Python's str, though not to its bytes
def test_any_value_is_a_time_within_the_bounds_or_is_refused_by_name(value):
    reads = {name: lambda name=name: read_limit_s({name: value}, name) for name in (TTFT, TPOT)}
    for name, read in (reads | {TIMEOUT: lambda: read_timeout_s({TIMEOUT: value})}).items():
        found_s = None
        try:
            found_s = read()
        except HttpRefusal as refusal:
            bad = refusal
        if found_s is None:
            assert bad.param == name.decode()
            assert len(str(bad)) < 300, "a refusal does not repeat whatever it was sent"
        else:
            assert 0 < found_s < float("inf")
            assert found_s == float(value.decode("ascii")) / (1 if name == TIMEOUT else 1e3)
            assert name == TIMEOUT or SHORTEST_LIMIT_MS / 1e3 <= found_s <= LONGEST_LIMIT_MS / 1e3


async def test_times_are_read_from_headers_and_what_is_not_given_is_the_configurations(layer):
    assert (await layer.get("/")).json()["limits"] == [None, 2.0, None]
    given_all = {"x-ridgeline-timeout-s": "9", "X-Ridgeline-TTFT-ms": "1500", "X-Ridgeline-TPOT-ms": "62.5"}
    assert (await layer.get("/", headers=given_all)).json()["limits"] == [9.0, 1.5, 0.0625]
    assert (await layer.get("/")).json()["limits"] == [None, 2.0, None], "a request leaves nothing to the next"


@pytest.mark.parametrize("name", [TTFT.decode(), TPOT.decode()])
async def test_a_limit_that_means_nothing_is_a_bad_request_that_names_the_header(layer, name):
    for value in NO_NUMBERS + OUT_OF_BOUNDS:
        refused = await layer.get("/", headers={name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name), value


@pytest_asyncio.fixture
async def sequences(model, monkeypatch):
    """(HTTP client, the sequences that it and /ready have begun) of a router with a limit for TPOT."""
    begun = []
    run = Orchestrator.run

    async def noted(self, request, emit):
        begun.append(request)
        await run(self, request, emit)

    monkeypatch.setattr(Orchestrator, "run", noted)
    async with serving(model, (FakeEngine("prefill"), FakeEngine("decode")), tpot_ms=250.0) as (http, *_):
        begun.clear()
        yield http, begun


async def test_limits_come_with_every_sequence_of_a_request_and_a_probe_has_none(sequences):
    http, begun = sequences
    own = {"x-ridgeline-ttft-ms": "800", "x-ridgeline-tpot-ms": "40"}
    assert (await http.get("/ready", headers=own)).status_code == 200
    assert [(one.probe, one.ttft_limit_s, one.tpot_limit_s) for one in begun] == [(True, None, None)]
    begun.clear()
    asked = [({}, {}), ({"n": 3}, {"x-ridgeline-ttft-ms": "800"}), ({"stream": True}, own)]
    for fields, headers in asked:
        assert (await http.post("/v1/completions", json=BODY | fields, headers=headers)).status_code == 200
    limits = [(one.ttft_limit_s, one.tpot_limit_s) for one in begun]
    assert limits == [(None, 0.25), *[(0.8, 0.25)] * 3, (0.8, 0.04)]
    begun.clear()
    for fields in ({}, {"stream": True}, {"n": 2}):
        refused = await http.post("/v1/completions", json=BODY | fields, headers={"x-ridgeline-ttft-ms": "0"})
        assert refused.status_code == 400
    assert not begun, "none reaches a worker"


# --- memory for bodies

LONGEST = 4096
HELD_BY_ONE = MOST_BODIES * 3 // 4


@pytest_asyncio.fixture
async def keyed(model):
    """(HTTP client, bytes of bodies held, decode engine, which steps when told to)."""
    engines = FakeEngine("prefill"), FakeEngine("decode", stepping="manual")
    keys = frozenset({hash_key(b"polite"), hash_key(b"hostile")})
    settings = {"max_request_bytes": LONGEST, "max_concurrent_requests": 500, "api_key_hashes": keys}
    async with serving(model, engines, **settings) as (http, router, _, decode):
        yield http, lambda: router._gates.bodies.held_bytes, decode
        await eventually(lambda: router._gates.bodies.held_bytes == 0)


async def ask(http, client, **fields):
    return await http.post("/v1/completions", json=BODY | fields, headers={"authorization": f"Bearer {client}"})


@pytest.mark.parametrize("length", [f"content-length: {LONGEST}", "transfer-encoding: chunked"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_bodies_that_do_not_end_are_kept_up_to_the_share_of_their_client(keyed, path, length):
    http, held, decode = keyed
    chunked = "chunked" in length
    head = f"POST {path} HTTP/1.1\r\nhost: s\r\nauthorization: Bearer hostile\r\n{length}\r\n\r\n".encode()
    begun, last = (b"%x\r\n" % LONGEST, b" \r\n0\r\n\r\n") if chunked else (b"", b" ")

    async with AsyncExitStack() as stack:

        async def begin():
            """A request whose body has come but for its last byte."""
            reader, writer = await asyncio.open_connection("127.0.0.1", http.base_url.port)
            stack.callback(writer.close)
            writer.write(head + begun + b" " * (LONGEST - 1))
            await writer.drain()
            return reader, writer

        first, *_ = [await begin() for _ in range(HELD_BY_ONE)]
        await eventually(lambda: held() >= HELD_BY_ONE * (LONGEST - 1))
        if chunked:
            await begin()  # has room for a byte
        reader, writer = await begin()
        writer.write(last)
        assert b" 429 " in await reader.readline()
        models = await http.get("/v1/models", headers={"authorization": "Bearer hostile"})
        assert models.status_code == 200, "what has no body is not refused"
        answer = asyncio.create_task(ask(http, "polite"))
        await eventually(lambda: decode.running)
        while not answer.done():
            decode.step()
            await asyncio.sleep(0.001)
        assert (await answer).status_code == 200
        if not chunked:  # one that was let in is read to its end
            first[1].write(last)
            assert b" 400 " in await first[0].readline()


async def test_bodies_of_requests_that_are_answered_count_until_they_are(keyed):
    http, _, decode = keyed
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60, limits=limits) as many:
        asked = [asyncio.create_task(ask(many, "hostile", user="u" * (LONGEST - 200))) for _ in range(HELD_BY_ONE + 20)]
        while not all(one.done() for one in asked):
            if any(one.done() for one in asked):
                decode.step()
            await asyncio.sleep(0.001)
        statuses = sorted([(await one).status_code for one in asked])
    assert (statuses[0], statuses[-1]) == (200, 429)
