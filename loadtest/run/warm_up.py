"""Warms up every worker of a server that has just started.

A router sends requests that come one at a time to the same worker, so a few of them leave the others cold, and their
first request of a size would be measured with what an engine does only once for it.
"""

import asyncio

from rich.console import Console

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run.client.stream import LoadClient
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run.replay import RoundRequests, body_maker, send_warm_up
from ridgeline.loadtest.run.server import Servers, as_servers, served_model
from ridgeline.loadtest.run.server_metrics import scrape, scrape_settled, steps_by_worker

LEAST_REQUESTS, MOST_REQUESTS = 4, 64
MOST_WAVES = 6


async def warm_up_workers(
    server: str | Servers, plan: ReplayPlan, requests: RoundRequests, round_index: int, console: Console
) -> None:
    """Send waves of concurrent requests of the trace's sizes until each worker has made a step since.

    Of servers that publish no steps, each gets its part of one wave, with prompts of all sizes.
    Raises ServerError if a worker has made none after six waves, or a request fails.
    """
    servers = as_servers(server)
    loading = LoadClient(servers.urls, servers.headers, plan.endpoint)
    async with servers.open_first() as http, loading as client:
        card = await served_model(http, servers, plan)
        bodies = await asyncio.to_thread(body_maker, requests.trace, plan, card, requests.ordinals_per_round)
        before = await scrape(http) if servers.counted else None
        steps = steps_by_worker(before) if before else {}
        each = min(MOST_REQUESTS, max(LEAST_REQUESTS * len(servers.urls), 2 * len(steps)))
        for wave in range(MOST_WAVES):
            sending = (
                send_warm_up(client, plan, bodies, requests.trace, round_index, number, each, first=wave * each)
                for number in range(each)
            )
            await asyncio.gather(*sending)
            after = await scrape_settled(http, plan.settle_s) if before else None
            idle = (
                [worker for worker, count in steps_by_worker(after).items() if count <= steps.get(worker, 0.0)]
                if after
                else []
            )
            if not idle:
                console.print(
                    f"warmed up {_told(len(steps), servers)} with {(wave + 1) * each} requests",
                    style="dim",
                    highlight=False,
                )
                return
    names = ", ".join(f"{worker} ({pool})" for pool, worker in sorted(idle))
    raise ServerError(
        f"{names} took part in none of {MOST_WAVES * each} warm-up requests, so rounds would meet it cold"
    )


def _told(workers: int, servers: Servers) -> str:
    if workers:
        return counted(workers, "worker")
    return "the workers" if servers.counted else f"{len(servers.urls)} servers"
