"""When a request arrived, as what serves it sees it: real uvicorn with the router's parser."""

import asyncio
import time

import httpx
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from ridgeline.router.front.app import behind
from ridgeline.router.front.http.context import WithContext, current
from ridgeline.router.front.middleware.http_protocol import BoundedHeads
from tests.support.http_server import listening
from tests.support.patience import PATIENCE_S

HEAD = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\nconnection: close\r\n\r\n"


async def tell(request):
    """When it arrived, asked late and from a task of its own."""
    await request.body()

    async def ask():
        return current().head_read_s

    return JSONResponse(await asyncio.create_task(ask()))


APP = Starlette(routes=[Route("/", tell, methods=["POST"])])


async def test_a_request_arrives_when_its_head_was_read_however_late_its_body_comes():
    called = asyncio.Event()

    async def app(scope, receive, send):
        called.set()
        await APP(scope, receive, send)

    async with listening(WithContext(app), http=BoundedHeads) as url, asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        before_s = time.monotonic()
        writer.write(HEAD)
        await called.wait()
        without_body_s = time.monotonic()
        writer.write(b"body")
        answer = await reader.read()
        writer.close()
    assert before_s <= float(answer.rpartition(b"\r\n\r\n")[2]) <= without_body_s


async def test_what_the_loop_made_a_request_wait_after_its_head_was_read_is_in_its_latencies():
    blocked_s = []

    class Parser(BoundedHeads):
        def on_headers_complete(self):
            super().on_headers_complete()
            time.sleep(0.05)  # what else the loop does before it runs the app
            blocked_s.append(time.monotonic())

    async with listening(WithContext(APP), http=Parser) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.post("/", content=b"body")).json() <= blocked_s[0] - 0.05


async def test_what_no_client_asked_for_has_no_arrival_and_passes_no_layer():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    await behind(app, (WithContext,))({"type": "lifespan", "state": {}}, None, None)
    assert (seen, current().head_read_s) == (["lifespan"], None)


async def test_what_a_layer_notes_is_seen_by_tasks_of_that_request_and_by_no_other():
    seen = []

    async def app(scope, receive, send):
        current().client = scope["path"]

        async def ask():
            await asyncio.sleep(0)
            seen.append((scope["path"], current().client))
            current().retry_after_s = 7

        await asyncio.create_task(ask())
        assert current().retry_after_s == 7

    layer = WithContext(app)
    await asyncio.gather(
        *(layer({"type": "http", "method": "GET", "headers": [], "path": path}, None, None) for path in ("/a", "/b"))
    )
    assert seen == [("/a", "/a"), ("/b", "/b")]
    assert (current().client, current().retry_after_s) == ("anonymous", 1)
