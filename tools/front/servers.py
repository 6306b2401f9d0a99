"""What the bench runs in processes of their own: a router, and workers without a model behind real gRPC.

No request of the bench waits or is refused by the router's settings. Prefill answers at once. Decode sends one token of
each of its sequences at every step, in one message for each router, and each step is as long as given.

usage: python -m tools.front.servers router MODEL WORKER_ADDRESS... | workers STEP_S
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast, get_args

import msgspec
import uvloop

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.gc_schedule import GcSchedule
from ridgeline.router.server import Router
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine
from tests.support.samples import router_settings
from tools.child import serve_until_stdin_ends

MAX_NUM_SEQS = 4096
FIRST_TOKEN_ID, BETWEEN_TOKEN_IDS = 1000, 20
"""Ordinary words of a vocabulary, for the fake's tokens, which are below 1,000: its first ones are no text."""


class PacedEngine(FakeEngine):
    """A fake with room for all streams, whose tokens are words."""

    num_kv_blocks = 1_000_000

    async def pace(self, step_s: float) -> None:
        """Make a step every `step_s`, late ones included, until cancelled."""
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while True:
            due_s += step_s
            await asyncio.sleep(due_s - clock())
            self.stats.stall.moved()
            self.step()

    async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[TokenDelta, None]:
        self.calls.clear()  # it would remember the prompts of all streams
        async for delta in super().generate(*arguments, **options):
            words = [FIRST_TOKEN_ID + BETWEEN_TOKEN_IDS * token for token in delta.token_ids]
            yield msgspec.structs.replace(delta, token_ids=words)


async def serve_router(model: str, *workers: str) -> None:
    """Serve until the standard input is closed."""
    settings = router_settings(
        model_path=model,
        max_model_len=8192,
        request_timeout_s=600.0,
        max_concurrent_requests=8192,
        prefill_window_tokens=dict.fromkeys(get_args(Pool), 100_000),
        max_queue_time_s=60.0,
        recovery_timeout_s=60.0,
        ready_deadline_s=10.0,
    )
    router = Router(settings)
    url = await router.serve(list(workers), {})
    GcSchedule(lambda: router.streams).start()  # as `ridgeline.cluster.runtime.services` does
    await serve_until_stdin_ends(url=url)
    await router.stop()


async def serve_workers(step_s: str) -> None:
    """Serve until the standard input is closed."""
    engines = PacedEngine("prefill"), PacedEngine("decode", stepping="manual")
    for engine in engines:
        engine.config = replace(engine.config, max_num_seqs=MAX_NUM_SEQS)
    hosts = [WorkerHost(cast(Any, engine), HANDLERS) for engine in engines]
    addresses = [await host.start() for host in hosts]
    pacing = asyncio.create_task(engines[1].pace(float(step_s)))
    await serve_until_stdin_ends(prefill=addresses[0], decode=addresses[1])
    pacing.cancel()
    await asyncio.gather(*(host.stop() for host in hosts))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "router":
        uvloop.run(serve_router(*arguments))
    else:
        asyncio.run(serve_workers(*arguments))
