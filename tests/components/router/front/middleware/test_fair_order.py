"""Requests are taken in a few at a time, fair among clients; who holds its share is refused with its body unparsed."""

import asyncio
import json
from http import HTTPStatus

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from ridgeline.router.flow.admission_rules import Refused
from ridgeline.router.flow.concurrency_limiter import AT_A_TIME, ConcurrencyLimiter
from ridgeline.router.flow.held_bodies import HeldBodies
from ridgeline.router.front.http.context import WithContext, current
from ridgeline.router.front.middleware.ingress import Gates, Ingress
from tests.support.http_server import listening
from tests.support.samples import router_settings


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def ingress(app, limiter=None, check_share=lambda client, coming: None):
    limiter = limiter or ConcurrencyLimiter()
    gates = Gates(check_share, 1, HeldBodies(1 << 23, lambda why: None), limiter)
    return WithContext(Ingress(app, router_settings(), gates))


class Bench:
    """Requests that stay inside until told."""

    def __init__(self):
        self.limiter = ConcurrencyLimiter()
        self.inside = []
        self.tasks = {}
        self._done = {}

    async def come(self, name, client):
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
    assert (bench.limiter._inside, bench.limiter._waiting) == ({}, {})


async def test_one_client_cannot_take_all_turns_and_the_next_one_goes_in_at_once(bench):
    for number in range(20):
        await bench.come(f"flood-{number}", "flood")
    assert len(bench.inside) == AT_A_TIME - 1
    assert bench.limiter.of("flood") == 20
    await bench.come("polite", "polite")
    assert bench.inside[-1] == "polite"


async def test_clients_that_wait_go_in_by_turns(bench):
    for number in range(12):
        await bench.come(f"a-{number}", "a")
    for name in ("b-0", "b-1", "b-2"):
        await bench.come(name, "b")
    first = list(bench.inside)
    for name in first[:4]:
        await bench.finish(name)
    assert {"b-0", "b-1"} <= {*bench.inside[:10]}


async def test_who_leaves_while_it_waits_keeps_nobody_out(bench):
    for number in range(AT_A_TIME + 2):
        await bench.come(f"a-{number}", "a")
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
        assert not limiter._inside
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


async def test_a_client_over_its_share_is_refused_with_its_body_read_and_not_parsed():
    asked, served = [], []

    def check_share(client, coming):
        asked.append(coming)
        raise Refused(HTTPStatus.TOO_MANY_REQUESTS, "client_share", "you hold your share", 7)

    async def app(scope, receive, send):
        served.append(scope["path"])
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with (
        listening(ingress(app, check_share=check_share)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        answer = await http.post("/v1/completions", content=b"x" * 3_000_000, headers={"connection": "close"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"] == {
            "message": "you hold your share",
            "type": "Too Many Requests",
            "param": None,
            "code": 429,
        }
        assert (await http.post("/tokenize", content=b"{}")).status_code == 200
    assert (asked, served) == ([0], ["/tokenize"])


async def test_a_body_that_costs_too_much_is_refused_before_it_is_parsed_and_others_come_whole():
    async def app(scope, receive, send):
        body = await Request(scope, receive).body()
        await JSONResponse({"bytes": len(body)})(scope, receive, send)

    async with listening(ingress(app)) as url, httpx.AsyncClient(base_url=url) as http:
        long = json.dumps({"prompt": [5] * 900_000}).encode()
        assert (await http.post("/", content=long)).json() == {"bytes": len(long)}
        assert (await http.get("/")).json() == {"bytes": 0}
        refused = await http.post("/", content=json.dumps({"prompt": [[]] * 900_000}).encode())
        assert refused.status_code == 400
        assert "too many parts" in refused.json()["error"]["message"]
