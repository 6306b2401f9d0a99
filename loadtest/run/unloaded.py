"""Measures what a server takes for one request at a time, and for a batch on every worker.

Needed before the first round of a plan that leaves something to be measured. `ridgeline.loadtest.run.calibration` makes
rate and limits of it.
"""

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import httpx
import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import ServerError, TraceError
from ridgeline.loadtest.plan import AUTO, ReplayPlan
from ridgeline.loadtest.run.client.stream import Completion, LoadClient
from ridgeline.loadtest.run.progress import ReplayProgress, shown
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import BodyMaker, body_maker
from ridgeline.loadtest.run.server import Servers, as_servers, served_model
from ridgeline.loadtest.run.server_metrics import scrape
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import fit_context, rows_wanted, shape_trace
from ridgeline.loadtest.trace.trace import Trace

SIZE_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The middles of five equal parts of the trace's prompt lengths, so that their mean is about the trace's mean."""
LEAST_OUTPUT_TOKENS, MOST_OUTPUT_TOKENS = 8, 32
WARM_UP_OUTPUT_TOKENS = 4
BATCH_SEQUENCES = 8


class Unloaded(msgspec.Struct, frozen=True):
    """What requests take on a server that does nothing else. Times are in seconds."""

    input_tokens: tuple[int, ...]
    """Prompt lengths of the requests that were sent one at a time, ascending."""
    output_tokens: int
    median_ttft_s: float
    mean_ttft_s: float
    median_tpot_s: float
    batch_sequences: int
    """Sequences that each decoding worker had at once in the second measurement."""
    prefill_token_s: float
    """Seconds of prefill for a token of a prompt, alone or in the second measurement: the slower of both."""
    median_batch_gap_s: float
    """Median over these sequences of the mean gap between their last tokens."""
    workers: dict[str, int]
    """Workers by pool, as the server publishes them; empty for a server that is not Ridgeline's."""


def sizes_of(plan: ReplayPlan) -> Trace:
    """Return the plan's trace at its own times, for its sizes; nothing is started or sent.

    Raises TraceError for whatever the replay would refuse of the trace.
    """
    read = load_trace(plan.trace, plan.tokenizer, rows_wanted(plan))
    trace = shape_trace(read, plan.model_copy(update={"rate": None, "duration_s": None}))
    if plan.rate != AUTO:
        shape_trace(read, plan)
    elif trace.mean_rate is None:
        raise TraceError(f"the trace '{trace.name}' has no spread of arrivals to rescale to a measured rate")
    return trace


async def measure_unloaded(server: str | Servers, plan: ReplayPlan, console: Console, *, round_index: int) -> Unloaded:
    """Warm up the first server, send five requests one at a time, then a batch of the same sizes to each worker.

    No prompt of a round below `round_index` begins like one of these. Raises ServerError if a request fails or
    the server does not stream.
    """
    servers = as_servers(server)
    async with servers.open_first() as http, LoadClient(servers.urls[:1], servers.headers, plan.endpoint) as client:
        card = await served_model(http, servers, plan)
        trace = fit_context(sizes_of(plan), card.max_model_len, card.least_prompt_tokens)
        bodies = await asyncio.to_thread(body_maker, trace, plan, card)
        ordered = sorted(row.input_tokens for row in trace.rows)
        inputs = [ordered[round(quantile * (len(ordered) - 1))] for quantile in SIZE_QUANTILES]
        median_tokens = round(statistics.median(row.output_tokens for row in trace.rows))
        output_tokens = min(max(LEAST_OUTPUT_TOKENS, median_tokens), MOST_OUTPUT_TOKENS)
        if card.max_model_len is not None:
            inputs = [max(1, min(tokens, card.max_model_len - output_tokens)) for tokens in inputs]
        console.print(
            f"measuring this server: {len(inputs)} requests of {inputs[0]} to {inputs[-1]} tokens, one at a time, then "
            f"{BATCH_SEQUENCES} at once on each worker",
            highlight=False,
        )
        workers = await _workers(http)
        prefills, decodes = (workers.get(pool) or workers.get("colocated") or 1 for pool in ("prefill", "decode"))
        together = BATCH_SEQUENCES * decodes
        progress = ReplayProgress("measuring", 1 + len(inputs) + together)
        sender = _Sender(client, bodies, round_index, plan.deadline_s, progress)
        async with shown(console, progress):
            await sender.send(inputs[len(inputs) // 2], WARM_UP_OUTPUT_TOKENS)
            alone = [await sender.send(tokens, output_tokens) for tokens in inputs]
            ttfts_s = [record.ttft_s for record in alone if record.ttft_s is not None]
            tpots_s = [record.tpot_s for record in alone if record.tpot_s]
            # Answers last until the last prompt is in: their last tokens are those of a full batch.
            prefills_s = together / prefills * statistics.fmean(ttfts_s)
            batch_tokens = output_tokens + math.ceil(prefills_s / statistics.median(tpots_s or [math.inf]))
            if card.max_model_len is not None:
                batch_tokens = min(batch_tokens, card.max_model_len - inputs[-1])
            sizes = list(itertools.islice(itertools.cycle(inputs), together))
            batch = await asyncio.gather(*(sender.send(tokens, batch_tokens) for tokens in sizes))
    gaps_s = [statistics.fmean(record.itls_s[-output_tokens:]) for record in batch if record.itls_s]
    if not (tpots_s and gaps_s):
        raise ServerError(
            "the server sent no answer token by token, so nothing can be measured: give --rate, --slo-ttft-ms and "
            "--slo-tpot-ms instead of auto"
        )
    return Unloaded(
        input_tokens=tuple(inputs),
        output_tokens=output_tokens,
        median_ttft_s=statistics.median(ttfts_s),
        mean_ttft_s=statistics.fmean(ttfts_s),
        median_tpot_s=statistics.median(tpots_s),
        batch_sequences=BATCH_SEQUENCES,
        prefill_token_s=max(
            prefills * max(record.ttft_s or 0.0 for record in batch) / sum(sizes), sum(ttfts_s) / sum(inputs)
        ),
        median_batch_gap_s=statistics.median(gaps_s),
        workers=dict(workers),
    )


@dataclass(slots=True)
class _Sender:
    """Sends requests that must succeed, each with a prompt of its own."""

    client: LoadClient
    bodies: BodyMaker
    round_index: int
    deadline_s: float
    progress: ReplayProgress
    sent: int = 0

    async def send(self, input_tokens: int, output_tokens: int) -> RequestRecord:
        body = self.bodies.warmup_body(self.sent, self.round_index, input_tokens, output_tokens)
        request = Completion(self.sent, 0.0, input_tokens, output_tokens, body)
        self.sent += 1
        self.progress.set_sent(self.sent)
        record = await self.client.complete(request, time.perf_counter(), self.deadline_s)
        self.progress.add(record)
        if not record.ok:
            raise ServerError(
                f"a request of {input_tokens} tokens to the idle server failed while it was measured: {record.error}"
            )
        return record


async def _workers(http: httpx.AsyncClient) -> Mapping[str, int]:
    found = await scrape(http)
    gauges = found.gauges.items() if found else ()
    return {dict(labels)["pool"]: round(value) for (name, labels), value in gauges if name == "ridgeline_workers"}
