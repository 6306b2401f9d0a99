"""Warms up every worker of a server that has just started. Called by `loadtest.compare`.

A router sends requests that come one at a time to the same worker, so a few of them leave the others cold, and their
first request of a size would be measured with what an engine does only once for it.
"""

import asyncio
import time

import httpx
from rich.console import Console

from loadtest.errors import ServerError
from loadtest.plan import ReplayPlan
from loadtest.run.client import Completion, complete, encode_body, first_model, open_client
from loadtest.run.replay import WARMUP_OUTPUT_TOKENS, RoundRequests, prompt_maker
from loadtest.run.server_metrics import scrape, scrape_settled, steps_by_worker
from loadtest.trace.prompts import PromptMaker

LEAST_REQUESTS, MOST_REQUESTS = 4, 64
MOST_WAVES = 6


async def warm_up_workers(
    base_url: str, plan: ReplayPlan, requests: RoundRequests, round_index: int, console: Console
) -> None:
    """Send waves of concurrent requests of the trace's sizes until each worker has made a step since.

    Raises ServerError if a worker has made none after six waves, or a request fails.
    """
    async with open_client(base_url) as client:
        card = await first_model(client, plan.served_name)
        maker = await asyncio.to_thread(prompt_maker, requests.trace, plan, card, requests.ordinals_per_round)
        before = await scrape(client)
        steps = steps_by_worker(before) if before else {}
        each = min(MOST_REQUESTS, max(LEAST_REQUESTS, 2 * len(steps)))
        for wave in range(MOST_WAVES):
            await _send_wave(client, plan, card.id, maker, requests, round_index, wave * each, each)
            after = await scrape_settled(client, plan.settle_s)
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
    client: httpx.AsyncClient,
    plan: ReplayPlan,
    model: str,
    maker: PromptMaker,
    requests: RoundRequests,
    round_index: int,
    first: int,
    count: int,
) -> None:
    sizes = sorted(row.input_tokens for row in requests.trace.rows)

    async def send(number: int) -> None:
        input_tokens = sizes[round(number * (len(sizes) - 1) / max(1, count - 1))]
        prompt = maker.warmup_prompt(first + number, round_index, input_tokens)
        request = Completion(
            number, 0.0, input_tokens, WARMUP_OUTPUT_TOKENS, encode_body(model, prompt, WARMUP_OUTPUT_TOKENS)
        )
        record = await complete(client, request, time.perf_counter(), plan.deadline_s)
        if not record.ok:
            raise ServerError(f"a warm-up request of {input_tokens} tokens failed: {record.error}")

    await asyncio.gather(*(send(number) for number in range(count)))
