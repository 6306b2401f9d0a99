"""Open-loop replay of a trace: requests are sent at their time, whatever the server does.

Called by `cluster.commands.loadtest` and `loadtest.compare`, with a plan in which nothing is left to be measured.

It is open-loop because a load that waits for the server would hide the queue it is meant to measure.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import numpy as np
from rich.console import Console

from loadtest.errors import LoadTestError, ServerError
from loadtest.plan import ReplayPlan
from loadtest.run.client import Completion, ModelCard, complete, encode_body, first_model, open_client
from loadtest.run.progress import ReplayProgress, shown
from loadtest.run.records import RequestRecord
from loadtest.run.server_metrics import MetricsDelta, difference, fleet_change, scrape_settled
from loadtest.trace.prompts import PromptMaker, TextWindows, load_text_tokens
from loadtest.trace.readers import load_trace
from loadtest.trace.shape import fit_context, shape_trace
from loadtest.trace.trace import Trace

MAX_SEND_LAG_S = 0.5
WARMUP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class RoundRequests:
    """The requests of one round of a comparison."""

    trace: Trace
    ordinals_per_round: int
    """Prompts set apart for each round, so that no two rounds share one."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay: the records in the trace's order, its duration, and what the server counted meanwhile."""

    trace: Trace
    records: tuple[RequestRecord, ...]
    duration_s: float
    metrics: MetricsDelta | None
    warnings: tuple[str, ...]
    fleet_change: str | None = None
    """Which worker came, went or was restarted meanwhile."""

    @property
    def p99_send_lag_s(self) -> float:
        """The 99th percentile of how late requests were sent, in seconds."""
        return float(np.percentile([record.send_lag_s for record in self.records], 99))

    @property
    def max_send_lag_s(self) -> float:
        """How late the latest request was sent, in seconds."""
        return max(record.send_lag_s for record in self.records)

    @property
    def window_s(self) -> float:
        """Seconds in which requests arrived: to the last arrival and one mean gap more, or all if they came at once."""
        rate = self.trace.mean_rate
        return len(self.trace.rows) / rate if rate else self.duration_s


async def run_replay(
    base_url: str,
    plan: ReplayPlan,
    console: Console,
    *,
    label: str = "replay",
    round_index: int = 0,
    requests: RoundRequests | None = None,
) -> ReplayResult:
    """Warm up, scrape, replay, scrape. Raises LoadTestError; failed requests become records, not errors.

    `requests` are those of a round of a comparison; without them they are the plan's trace.
    """
    trace = requests.trace if requests else shape_trace(load_trace(plan.trace), plan)
    async with open_client(base_url) as client:
        card = await first_model(client, plan.served_name)
        trace = fit_context(trace, card.max_model_len)
        ordinals = requests.ordinals_per_round if requests else None
        maker = await asyncio.to_thread(prompt_maker, trace, plan, card, ordinals)
        await _warm_up(client, plan, card.id, maker, trace, round_index)
        before = await scrape_settled(client, plan.settle_s)
        progress = ReplayProgress(label, len(trace.rows))
        start = time.perf_counter()
        async with shown(console, progress):
            records = await _send_all(client, plan, card.id, maker, trace, round_index, progress)
        duration_s = time.perf_counter() - start
        after = await scrape_settled(client, plan.settle_s)
    change = fleet_change(before, after) if before and after else None
    metrics = difference(before, after, duration_s) if before and after else None
    warnings = (*_warnings(records), *([change] if change else []))
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return ReplayResult(trace, records, duration_s, metrics, warnings, change)


def prompt_maker(trace: Trace, plan: ReplayPlan, card: ModelCard, ordinals_per_round: int | None = None) -> PromptMaker:
    """Make prompts with the served model's tokenizer. Raises LoadTestError if it is not to be had."""
    tokenizer = plan.tokenizer or card.root
    if tokenizer is None:
        raise LoadTestError("the server does not say where its model's tokenizer is: pass --tokenizer PATH")
    windows = TextWindows(load_text_tokens(tokenizer), plan.seed)
    return PromptMaker(windows, trace, plan.warmup_requests, ordinals_per_round)


async def _warm_up(
    client: httpx.AsyncClient, plan: ReplayPlan, model: str, maker: PromptMaker, trace: Trace, round_index: int
) -> None:
    """Send a few requests of the trace's sizes, from small to large, one at a time; no figure counts them."""
    sizes = sorted(row.input_tokens for row in trace.rows)
    count = plan.warmup_requests
    for number in range(count):
        input_tokens = sizes[round(number * (len(sizes) - 1) / max(1, count - 1))]
        prompt = maker.warmup_prompt(number, round_index, input_tokens)
        body = encode_body(model, prompt, WARMUP_OUTPUT_TOKENS)
        request = Completion(number, 0.0, input_tokens, WARMUP_OUTPUT_TOKENS, body)
        record = await complete(client, request, time.perf_counter(), plan.deadline_s)
        if not record.ok:
            raise ServerError(f"warm-up request {number + 1} of {count} failed: {record.error}")


async def _send_all(
    client: httpx.AsyncClient,
    plan: ReplayPlan,
    model: str,
    maker: PromptMaker,
    trace: Trace,
    round_index: int,
    progress: ReplayProgress,
) -> tuple[RequestRecord, ...]:
    tasks: list[asyncio.Task[RequestRecord]] = []
    start = time.perf_counter()

    def ended(task: asyncio.Task[RequestRecord]) -> None:
        if not task.cancelled() and task.exception() is None:
            progress.add(task.result())

    async with asyncio.TaskGroup() as group:
        for index, row in enumerate(trace.rows):
            # The body is made before the wait, so that encoding never delays sending.
            body = encode_body(model, maker.prompt(index, round_index), row.output_tokens)
            request = Completion(index, row.arrival_s, row.input_tokens, row.output_tokens, body)
            await asyncio.sleep(max(0.0, row.arrival_s - (time.perf_counter() - start)))
            task = group.create_task(complete(client, request, start, plan.deadline_s))
            task.add_done_callback(ended)
            tasks.append(task)
            progress.sent += 1
    return tuple(task.result() for task in tasks)


def _warnings(records: Sequence[RequestRecord]) -> tuple[str, ...]:
    warnings = []
    lag_s = float(np.percentile([record.send_lag_s for record in records], 99))
    if lag_s > MAX_SEND_LAG_S:
        warnings.append(
            f"requests left late (p99 send lag {lag_s * 1e3:.0f} ms > {MAX_SEND_LAG_S * 1e3:.0f} ms): this client was "
            "too slow for the trace, so the offered load was not the trace's; lower the rate or use another machine"
        )
    failed = [record for record in records if not record.ok]
    if failed:
        warnings.append(f"{len(failed)} of {len(records)} requests failed; the first: {failed[0].error}")
    return tuple(warnings)
