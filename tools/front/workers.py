"""One prefill and one decode worker without a model, in a process of their own: real worker hosts over real gRPC.

Prefill answers at once. Decode sends one token of each of its sequences at every step, in one message for each router,
and each step is as long as given.

usage: python -m tools.front.workers STEP_S
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import msgspec

from ridgeline.cluster.runtime.handlers import HANDLERS
from ridgeline.contracts.tasks import TokenDelta
from ridgeline.worker_runtime.host import WorkerHost
from tests.support.fake_engine import FakeEngine
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


async def main(step_s: float) -> None:
    """Serve until the standard input is closed."""
    engines = PacedEngine("prefill"), PacedEngine("decode", stepping="manual")
    for engine in engines:
        engine.config = replace(engine.config, max_num_seqs=MAX_NUM_SEQS)
    hosts = [WorkerHost(cast(Any, engine), HANDLERS) for engine in engines]
    addresses = [await host.start() for host in hosts]
    pacing = asyncio.create_task(engines[1].pace(step_s))
    await serve_until_stdin_ends(prefill=addresses[0], decode=addresses[1])
    pacing.cancel()
    await asyncio.gather(*(host.stop() for host in hosts))


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1])))
