"""The real router over HTTP before two real hosts whose engines take a known time; a process of its own, so that the
client's clock is the client's. Prints its URL and serves until its standard input is closed.

usage: python -m tests.replay.timed_router MODEL_DIRECTORY
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ridgeline.contracts.tasks import TokenDelta
from tests.support import served_router
from tests.support.fake_engine import FakeEngine  # imports vLLM with its warnings silenced

PREFILL_S, STEP_S = 0.15, 0.035
"""Each in the middle of a bucket."""


class TimedEngine(FakeEngine):
    """Takes so long for each token."""

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[TokenDelta, None]:
        async for delta in super().generate(*args, **options):
            await asyncio.sleep(PREFILL_S if self.config.pool == "prefill" else STEP_S)
            yield delta


async def main(model: str) -> None:
    """Serve until standard input ends."""
    engines = (TimedEngine("prefill"), TimedEngine("decode"))
    async with served_router.serving(Path(model), engines, max_concurrent_requests=64) as (http, *_):
        print(f"url {http.base_url}", flush=True)  # noqa: T201 - what the parent waits for
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
