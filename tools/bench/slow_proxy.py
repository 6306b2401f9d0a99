"""An HTTP proxy that makes a server's streamed answers slower by an exact amount, and changes nothing else.

A comparison of a server with itself behind such a proxy has a known right result. Each event of an answer is passed on
at its own due time, so a delayed event does not delay the reading of the next ones.

usage: python -m tools.bench.slow_proxy --server URL [--tpot-factor 1.1] [--late-share 0.1 --late-s 2]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import web

from tools.bench.served import serve_until_closed, served

MOST_BODY_BYTES: Final = 64 * 2**20
SESSION: Final = web.AppKey("session", aiohttp.ClientSession)
OF_ONE_CONNECTION: Final = {"connection", "host", "keep-alive", "transfer-encoding", "content-length"}


@dataclass(frozen=True, slots=True)
class Slowness:
    """What the proxy does to a streamed answer."""

    tpot_factor: float = 1.0
    """Factor on the time from the first event of an answer to each of the others."""
    late_share: float = 0.0
    """Fraction of the answers that come late as a whole, drawn at random."""
    late_s: float = 0.0
    """Seconds by which they are late."""

    def due_s(self, came_s: float, first_s: float, late_s: float) -> float:
        """Return when to pass an event on that came at `came_s`, in an answer whose first event came at `first_s`."""
        return first_s + self.tpot_factor * (came_s - first_s) + late_s


async def _pass_on(
    upstream: aiohttp.ClientResponse, downstream: web.StreamResponse, slowness: Slowness, late_s: float
) -> None:
    """Pass the parts of an answer on when they are due; reading goes on meanwhile."""
    clock = asyncio.get_running_loop().time
    parts: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()

    async def read() -> None:
        first_s: float | None = None
        async for part in upstream.content.iter_any():
            came_s = clock()
            first_s = came_s if first_s is None else first_s
            parts.put_nowait((slowness.due_s(came_s, first_s, late_s), part))
        parts.put_nowait(None)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        while (next_part := await parts.get()) is not None:
            due_s, part = next_part
            await asyncio.sleep(due_s - clock())
            await downstream.write(part)


def make_app(server: str, slowness: Slowness, seed: int = 0) -> web.Application:
    """Build the application that passes every request on to `server`."""
    chance = random.Random(seed)

    async def session(app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as opened:
            app[SESSION] = opened
            yield

    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        async with request.app[SESSION].request(
            request.method, server + request.path_qs, data=await request.read(), headers=headers, allow_redirects=False
        ) as upstream:
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in OF_ONE_CONNECTION}
            is_stream = upstream.content_type == "text/event-stream"
            if not is_stream:
                return web.Response(status=upstream.status, headers=kept, body=await upstream.read())
            late_s = slowness.late_s if chance.random() < slowness.late_share else 0.0
            downstream = web.StreamResponse(status=upstream.status, headers=kept)
            await downstream.prepare(request)
            await _pass_on(upstream, downstream, slowness, late_s)
            return downstream

    app = web.Application(client_max_size=MOST_BODY_BYTES)
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", pass_on)
    return app


@contextmanager
def proxied(server: str, slowness: Slowness) -> Iterator[str]:
    """Run a proxy of this server as a process of its own while the block runs; yield its URL."""
    numbers = ["--tpot-factor", str(slowness.tpot_factor), "--late-share", str(slowness.late_share)]
    with served("tools.bench.slow_proxy", "--server", server, *numbers, "--late-s", str(slowness.late_s)) as url:
        yield url


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    parser.add_argument("--tpot-factor", type=float, default=1.0)
    parser.add_argument("--late-share", type=float, default=0.0)
    parser.add_argument("--late-s", type=float, default=0.0)
    given = parser.parse_args()
    asyncio.run(serve_until_closed(make_app(given.server, Slowness(given.tpot_factor, given.late_share, given.late_s))))
