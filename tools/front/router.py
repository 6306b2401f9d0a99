"""One router in a process of its own, under settings by which no request of the bench waits or is refused.

usage: python -m tools.front.router MODEL WORKER_ADDRESS...
"""

from __future__ import annotations

import sys
from typing import get_args

import uvloop

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.gc_schedule import GcSchedule
from ridgeline.router.server import Router
from tests.support.samples import router_settings
from tools.child import serve_until_stdin_ends


async def main(model: str, workers: list[str]) -> None:
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
    url = await router.serve(workers, {})
    GcSchedule(lambda: router.streams).start()  # as `ridgeline.cluster.runtime.services` does
    await serve_until_stdin_ends(url=url)
    await router.stop()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2:]))
