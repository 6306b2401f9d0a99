"""Tests of the proxy that plants differences: what it delays, and that it changes nothing else."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tools.bench.slow_proxy import Slowness, make_app

PARTS = tuple(f"data: {number}\n\n".encode() for number in range(5))
GAP_S = 0.04


async def _stream(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-echo": body.decode()})
    await response.prepare(request)
    for part in PARTS:
        await response.write(part)
        await asyncio.sleep(GAP_S)
    return response


async def _plain(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path_qs}, status=418)


@asynccontextmanager
async def _proxied(app: web.Application, slowness: Slowness) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Serve the application behind the proxy; yield a session and the proxy's URL."""
    async with TestServer(app) as server:
        proxy_app = make_app(str(server.make_url("")).rstrip("/"), slowness)
        async with TestServer(proxy_app) as proxy, aiohttp.ClientSession() as session:
            yield session, str(proxy.make_url("")).rstrip("/")


async def _times_s(slowness: Slowness) -> tuple[list[float], bytes]:
    """Return when the parts of one answer came, counted from the first, and the answer."""
    app = web.Application()
    app.router.add_post("/stream", _stream)
    async with _proxied(app, slowness) as (session, url), session.post(f"{url}/stream", data=b"abc") as response:
        assert response.headers["x-echo"] == "abc"
        clock = asyncio.get_running_loop().time
        came = [(clock(), part) async for part in response.content.iter_any()]
    return [at_s - came[0][0] for at_s, _ in came], b"".join(part for _, part in came)


async def test_an_answer_passes_unchanged_and_its_gaps_grow_by_the_factor() -> None:
    slow_s, answer = await _times_s(Slowness(tpot_factor=4.0))
    assert answer == b"".join(PARTS)
    assert slow_s[-1] >= 4.0 * GAP_S * (len(PARTS) - 1) * 0.95


@pytest.mark.parametrize(("came_s", "due_s"), [(10.0, 10.0), (11.0, 11.1), (12.0, 12.2)])
def test_the_delay_of_an_event_counts_from_the_first_one(came_s: float, due_s: float) -> None:
    assert Slowness(tpot_factor=1.1).due_s(came_s, 10.0, 0.0) == pytest.approx(due_s)


def test_a_late_answer_is_late_as_a_whole() -> None:
    slowness = Slowness(late_share=1.0, late_s=3.0)
    dues = [slowness.due_s(came_s, 10.0, slowness.late_s) for came_s in (10.0, 10.5, 11.5)]
    assert dues == [13.0, 13.5, 14.5]
    assert [after - before for before, after in itertools.pairwise(dues)] == [0.5, 1.0]


async def test_an_answer_that_is_no_stream_passes_with_its_status_and_query() -> None:
    app = web.Application()
    app.router.add_get("/plain", _plain)
    async with _proxied(app, Slowness()) as (session, url), session.get(f"{url}/plain?a=1") as response:
        assert response.status == 418
        assert await response.json() == {"path": "/plain?a=1"}
