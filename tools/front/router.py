"""One router in a process of its own, or the dispatcher of several.

usage: python -m tools.front.router MODEL WORKER_ADDRESS...                              serves alone
       python -m tools.front.router MODEL --dispatcher WORKER_ADDRESS...                 the dispatcher
       python -m tools.front.router MODEL --shares DISPATCHER PORT WORKER_ADDRESS...     one of several
Prints its URL or address once it serves, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys
from typing import get_args

import uvloop

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.gc_schedule import GcSchedule
from ridgeline.router.server import Router
from ridgeline.router.settings import RouterSettings, SharedWith
from ridgeline.router.shared.dispatcher import Dispatcher
from tests.support.samples import router_settings

WINDOW_TOKENS = 100_000
SEVERAL = 2
"""Any number above one means that there is a dispatcher."""


def settings(model: str, routers: int) -> RouterSettings:
    """Return settings under which no request of the bench waits or is refused."""
    return router_settings(
        model_path=model,
        max_model_len_tokens=8192,
        routers=routers,
        request_deadline_s=600.0,
        max_outstanding_requests=8192,
        prefill_window_tokens=dict.fromkeys(get_args(Pool), WINDOW_TOKENS),
        max_prompt_wait_s=60.0,
        recovery_timeout_s=60.0,
        ready_deadline_s=10.0,
    )


async def main(model: str, words: list[str]) -> None:
    """Serve until the standard input is closed."""
    running: Router | Dispatcher
    match words:
        case ["--dispatcher", *workers]:
            running = dispatcher = Dispatcher(settings(model, SEVERAL))
            address = await dispatcher.serve(workers, "127.0.0.1", 0)
        case ["--shares", at, port, *workers]:
            running = router = Router(settings(model, SEVERAL))
            address = await router.serve(workers, {}, SharedWith(at, int(port), joins_port=port != "0"))
        case workers:
            running = router = Router(settings(model, 1))
            address = await router.serve(workers, {})
    gc_schedule = GcSchedule(lambda: running.streams if isinstance(running, Router) else 0)
    gc_schedule.start()  # as `ridgeline.cluster.runtime.services` does
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await running.stop()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2:]))
