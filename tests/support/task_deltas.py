"""A task's deltas as an async generator, for tests that look at one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ridgeline.contracts.tasks import GenerateTask, TokenDelta
from ridgeline.worker_runtime.client import WorkerClient


async def task_deltas(client: WorkerClient, task: GenerateTask) -> AsyncGenerator[TokenDelta, None]:
    """Run the task and yield its deltas; raise what it raises. Closing the generator cancels it."""
    came: asyncio.Queue[TokenDelta | None] = asyncio.Queue()

    def take(delta: TokenDelta) -> bool:
        came.put_nowait(delta)
        return False

    running = asyncio.create_task(client.run_task(task, take))
    running.add_done_callback(lambda _: came.put_nowait(None))
    try:
        while (delta := await came.get()) is not None:
            yield delta
        await running
    finally:
        running.cancel()
        await asyncio.wait((running,))
