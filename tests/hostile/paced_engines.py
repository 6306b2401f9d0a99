"""One prefill and one decode worker without a model, in a process of their own, as they are in a deployment.

Their steps take as long as real ones. Prints both addresses once they serve, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

from cluster.runtime.handlers import HANDLERS
from tests.support.paced_engine import PacedEngine
from worker_runtime.host import WorkerHost


async def main() -> None:
    """Until nobody holds the other end of the standard input."""
    prefill = PacedEngine("prefill", step_s=0.03, max_num_seqs=128, prompt_tokens_per_s=20_000)
    decode = PacedEngine("decode", step_s=0.1, max_num_seqs=64)
    hosts = [WorkerHost(prefill, HANDLERS), WorkerHost(decode, HANDLERS)]
    pacing = [asyncio.create_task(engine.pace()) for engine in (prefill, decode)]
    sys.stdout.write(" ".join([await host.start() for host in hosts]) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for task in pacing:
        task.cancel()
    for host in hosts:
        await host.stop()


asyncio.run(main())
