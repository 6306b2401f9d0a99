"""What is kept of bodies is bounded, for one client and for all, and given back when a request has been answered."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
import pytest_asyncio

from ridgeline.router.client_identity import hash_key
from ridgeline.router.flow.held_bodies import MOST_BODIES
from tests.support.fake_engine import FakeEngine
from tests.support.patience import eventually
from tests.support.served_router import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONGEST = 4096
KEYS = frozenset({hash_key(b"polite"), hash_key(b"hostile")})
HELD_BY_ONE = MOST_BODIES * 3 // 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model):
    engines = FakeEngine("prefill"), FakeEngine("decode", stepping="manual")
    settings = {"max_request_bytes": LONGEST, "max_concurrent_requests": 500, "api_key_hashes": KEYS}
    async with serving(model, engines, **settings) as parts:
        yield parts


async def begun(stack, port, path):
    """A request whose body has come but for its last byte; its reader."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    head = f"POST {path} HTTP/1.1\r\nhost: s\r\nauthorization: Bearer hostile\r\ncontent-length: {LONGEST}\r\n\r\n"
    writer.write(head.encode() + b" " * (LONGEST - 1))
    await writer.drain()
    return reader, writer


async def ask(http, client, **fields):
    body = {"model": "m", "prompt": [5] * 8, "max_tokens": 3, "ignore_eos": True, **fields}
    return await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {client}"})


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_bodies_that_do_not_end_are_kept_up_to_the_share_of_their_client(served, path):
    http, _, _, decode = served
    async with AsyncExitStack() as stack:
        begun_ones = [await begun(stack, http.base_url.port, path) for _ in range(HELD_BY_ONE)]
        await eventually(lambda: _held(served) >= HELD_BY_ONE * LONGEST)
        reader, writer = await begun(stack, http.base_url.port, path)
        writer.write(b" ")
        assert b" 429 " in await reader.readline()
        models = await http.get("/v1/models", headers={"authorization": "Bearer hostile"})
        assert models.status_code == 200, "what has no body is not refused"
        answer = asyncio.create_task(ask(http, "polite"))
        await eventually(lambda: decode.running)
        while not answer.done():
            decode.step()
            await asyncio.sleep(0.001)
        assert (await answer).status_code == 200
        reader, writer = begun_ones[0]
        writer.write(b" ")
        assert b" 400 " in await reader.readline(), "one that was let in is read to its end"
    await eventually(lambda: _held(served) == 0)


async def test_bodies_of_requests_that_are_answered_count_until_they_are(served):
    http, _, _, decode = served
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60, limits=limits) as many:
        long = {"user": "u" * (LONGEST - 200)}
        asked = [asyncio.create_task(ask(many, "hostile", **long)) for _ in range(HELD_BY_ONE + 20)]
        while not all(one.done() for one in asked):
            if any(one.done() for one in asked):
                decode.step()
            await asyncio.sleep(0.001)
        statuses = sorted([(await one).status_code for one in asked])
    assert 200 in statuses
    assert statuses[-1] == 429
    await eventually(lambda: _held(served) == 0)


def _held(served):
    return served[1]._gates.bodies.held_bytes
