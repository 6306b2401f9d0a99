"""Warms up every worker of a server that has just started. Called by `loadtest.compare`.

A router sends requests that come one at a time to the same worker, so a few of them leave the others cold, and their
first request of a size would be measured with what an engine does only once for it.
"""

import asyncio
import time

from rich.console import Console

from loadtest.errors import ServerError
from loadtest.plan import ReplayPlan
from loadtest.run.client.stream import Completion, LoadClient
from loadtest.run.replay import WARMUP_OUTPUT_TOKENS, BodyMaker, RoundRequests, body_maker
from loadtest.run.server import first_model, key_headers, open_http
from loadtest.run.server_metrics import scrape, scrape_settled, steps_by_worker

LEAST_REQUESTS, MOST_REQUESTS = 4, 64
MOST_WAVES = 6


async def warm_up_workers(
    base_url: str, plan: ReplayPlan, requests: RoundRequests, round_index: int, console: Console
) -> None:
    """Send waves of concurrent requests of the trace's sizes until each worker has made a step since.

    Raises ServerError if a worker has made none after six waves, or a request fails.
    """
    async with open_http(base_url) as http, LoadClient(base_url, key_headers(), plan.endpoint) as client:
        card = await first_model(http, plan.served_name)
        bodies = await asyncio.to_thread(body_maker, requests.trace, plan, card, requests.ordinals_per_round)
        before = await scrape(http)
        steps = steps_by_worker(before) if before else {}
        each = min(MOST_REQUESTS, max(LEAST_REQUESTS, 2 * len(steps)))
        for wave in range(MOST_WAVES):
            await _send_wave(client, plan, bodies, requests, round_index, wave * each, each)
            after = await scrape_settled(http, plan.settle_s)
            idle = (
                [worker for worker, count in steps_by_worker(after).items() if count <= steps.get(worker, 0.0)]
                if after
                else []
            )
            if not idle:
                console.print(
                    f"warmed up {len(steps) or 'the'} workers with {(wave + 1) * each} requests",
                    style="dim",
                    highlight=False,
                )
                return
    names = ", ".join(f"{worker} ({pool})" for pool, worker in sorted(idle))
    raise ServerError(
        f"{names} took part in none of {MOST_WAVES * each} warm-up requests, so rounds would meet it cold"
    )


async def _send_wave(
    client: LoadClient,
    plan: ReplayPlan,
    bodies: BodyMaker,
    requests: RoundRequests,
    round_index: int,
    first: int,
    count: int,
) -> None:
    sizes = sorted(row.input_tokens for row in requests.trace.rows)

    async def send(number: int) -> None:
        input_tokens = sizes[round(number * (len(sizes) - 1) / max(1, count - 1))]
        body = bodies.warmup_body(first + number, round_index, input_tokens, WARMUP_OUTPUT_TOKENS)
        request = Completion(number, 0.0, input_tokens, WARMUP_OUTPUT_TOKENS, body)
        record = await client.complete(request, time.perf_counter(), plan.deadline_s)
        if not record.ok:
            raise ServerError(f"a warm-up request of {input_tokens} tokens failed: {record.error}")

    await asyncio.gather(*(send(number) for number in range(count)))
