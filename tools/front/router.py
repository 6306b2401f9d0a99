"""One router in a process of its own.

usage: python -m tools.front.router MODEL PORT WORKER_ADDRESS...
Prints its URL once it serves, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from router.server import Router
from router.settings import RouterSettings

WINDOW_TOKENS = 100_000


async def main(model: str, port: int, addresses: list[str]) -> None:
    """Serve until the standard input is closed."""
    router = Router(
        RouterSettings(
            model_path=model,
            served_name="m",
            dtype="bfloat16",
            max_model_len_tokens=8192,
            host="127.0.0.1",
            port=port,
            mode="disaggregated",
            request_deadline_s=600.0,
            max_outstanding_requests=8192,
            overlap=True,
            min_remote_prefill_tokens=0,
            prefill_window_tokens={"prefill": WINDOW_TOKENS, "decode": WINDOW_TOKENS, "colocated": WINDOW_TOKENS},
            max_prompt_wait_s=60.0,
            recovery_timeout_s=60.0,
            ready_deadline_s=10.0,
        )
    )
    url = await router.serve(addresses, {})
    gc.collect()
    gc.freeze()  # as `cluster.runtime.services` does
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await router.stop()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
