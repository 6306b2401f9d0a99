"""`tools.bench.modes` with the real client of vLLM, against servers without a model, one of whose modes is slow."""

import asyncio
import io
import json
from collections import Counter
from contextlib import AsyncExitStack

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from ridgeline.cluster.model_store import prepare_model
from tests.replay.null_server import make_app
from tools.bench.modes import Client, Measured, measure, options, table

TTFT_S, TPOT_S, SLOW_S = 0.2, 0.02, 3.0
"""Far above what a busy machine adds; the SLO on TTFT is 0.8 s."""


class Modes:
    """The route that changes the mode, and what the server was sent."""

    def __init__(self):
        self.mode, self.prompts, self.slos = "colocated", Counter(), set()

    async def get(self, _):
        return web.json_response({"mode": self.mode, "modes": ["colocated", "disaggregated"], "why_not": {}})

    async def post(self, request):
        self.mode = json.loads(await request.read())["mode"]
        return web.json_response({"rerouted_prompts": 0, "took_s": 0.0})


async def test_each_mode_and_the_server_beside_get_the_same_arrivals_and_prompts_of_their_own(tmp_path):
    async with AsyncExitStack() as servers:
        modes, urls = Modes(), []

        @web.middleware
        async def late(request, handler):
            if request.path == "/v1/completions":
                modes.prompts[json.loads(await request.read())["prompt"]] += 1
                modes.slos.add(request.headers.get("x-ridgeline-ttft-ms"))
                if modes.mode == "disaggregated":
                    await asyncio.sleep(SLOW_S)
            return await handler(request)

        for middlewares in ([late], []):
            app = make_app(TTFT_S, TPOT_S, None)
            app.middlewares.extend(middlewares)
            app.router.add_get("/ridgeline/mode", modes.get)
            app.router.add_post("/ridgeline/mode", modes.post)
            server = await servers.enter_async_context(TestServer(app))
            urls.append(str(server.make_url("")).rstrip("/"))
        out = tmp_path / "rounds.jsonl"
        given = options().parse_args(
            f"--url {urls[0]} --beside plain={urls[1]} --modes colocated,disaggregated --shapes 16/4 --loads 0.2 "
            f"--rounds 1 --requests 6 --out {out}".split()
        )
        console = Console(file=io.StringIO(), width=200)
        client = Client(str(prepare_model("smollm2-135m")), "null")
        rounds = await measure(client, given, console)
    assert {one.spec.mode: (one.in_time, one.requests) for one in rounds} == {
        "colocated": (6, 6),
        "disaggregated": (0, 6),
        "plain": (6, 6),
    }
    assert [msgspec.json.decode(line, type=Measured) for line in out.read_bytes().splitlines()] == rounds
    assert max(modes.prompts.values()) == 1
    assert len(modes.slos - {None}) == 1
    console.print(table(rounds))
    assert "6 of 6" in console.file.getvalue()
    assert "0 of 6" in console.file.getvalue()
