"""Open-loop replay of a trace: requests are sent at their time, whatever the server does.

Its plan leaves nothing to be measured.

It is open-loop because a load that waits for the server would hide the queue it is meant to measure.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from rich.console import Console

from ridgeline.loadtest.errors import LoadTestError, ServerError
from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run.client.driver import client_process
from ridgeline.loadtest.run.client.process import ClientLoad, Job
from ridgeline.loadtest.run.client.stream import Completion, Endpoint, LoadClient, encode_body
from ridgeline.loadtest.run.machine import parse_cores
from ridgeline.loadtest.run.progress import ReplayProgress, shown
from ridgeline.loadtest.run.records import RecordFile, RequestRecord, counted
from ridgeline.loadtest.run.server import ModelCard, Servers, as_servers, served_model
from ridgeline.loadtest.run.server_metrics import MetricsDelta, watch_all
from ridgeline.loadtest.trace.prompts import (
    PromptMaker,
    TextWindows,
    load_text_tokens,
    load_tokenizer,
    prompt_text,
    text_parts,
)
from ridgeline.loadtest.trace.readers import load_trace
from ridgeline.loadtest.trace.shape import fit_context, rows_wanted, shape_trace
from ridgeline.loadtest.trace.trace import Trace

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
    deltas: Mapping[str, MetricsDelta]
    """What each server that publishes /metrics counted, by the URL of its page."""
    warnings: tuple[str, ...]
    fleet_change: str | None = None
    """Which worker came, went or was restarted meanwhile."""
    client: ClientLoad | None = None
    """What the sending took of the client's own process."""

    @property
    def metrics(self) -> MetricsDelta | None:
        """What a Ridgeline server counted; None if none is among the servers."""
        return next((each for each in self.deltas.values() if each.is_ridgeline), None)

    @property
    def counted_records(self) -> tuple[RequestRecord, ...]:
        """Those that figures and attainment are made of: without requests that were due after the window."""
        return counted(self.records)

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
        """Seconds in which requests arrived: to the last arrival and one mean gap more, or all if they came at once.

        A later turn of a session arrives when it is due, which the trace alone does not say. Those that were due after
        the last session had begun are not counted.
        """
        due_s = [record.scheduled_s for record in counted(self.records)]
        last_s, requests = max(due_s), len(due_s)
        return last_s * requests / (requests - 1) if self.trace.mean_rate and last_s else self.duration_s


def check_client(plan: ReplayPlan) -> None:
    """Raise LoadTestError for cores or a tokenizer that the plan names and this machine does not have."""
    parse_cores(plan.client_cores)
    if plan.tokenizer is not None:
        load_tokenizer(plan.tokenizer)


async def run_replay(
    server: str | Servers,
    plan: ReplayPlan,
    console: Console,
    *,
    label: str = "replay",
    round_index: int = 0,
    requests: RoundRequests | None = None,
    record_file: RecordFile | None = None,
) -> ReplayResult:
    """Warm up, scrape, replay, scrape. Raises LoadTestError; failed requests become records, not errors.

    `requests` are those of a round of a comparison; without them they are the plan's trace. A `record_file` gets each
    record as its request ends.
    """
    trace = requests.trace if requests else _trace_of(plan)
    servers = as_servers(server)
    async with servers.open_first() as http:
        card = await served_model(http, servers, plan)
        if requests is None:
            trace = fit_context(trace, card.max_model_len, card.least_prompt_tokens)
            trace = replace(trace, notes=(*trace.notes, *card.notes))
        ordinals = requests.ordinals_per_round if requests else None
        bodies = await asyncio.to_thread(body_maker, trace, plan, card, ordinals)
        told = servers.urls, servers.headers, plan.endpoint
        job = Job(*told, plan.deadline_s, len(trace.rows), parse_cores(plan.client_cores))
        records: list[RequestRecord] = []
        progress = ReplayProgress(label, len(trace.rows))

        def take(record: RequestRecord) -> None:
            records.append(record)
            progress.add(record)
            if record_file is not None:
                record_file.add(record)

        async with shown(console, progress), client_process(job, completions(trace, bodies, round_index)) as client:
            async with LoadClient(*told) as warming:
                for number in range(plan.warmup_requests):
                    await send_warm_up(warming, plan, bodies, trace, round_index, number, plan.warmup_requests)
            async with watch_all(servers, plan.settle_s) as seen:
                load = await client.run(progress.set_sent, take)
    records.sort(key=lambda record: record.index)
    change = next(filter(None, (one.fleet_change for one in seen.values())), None)
    deltas = {url: delta for url, one in seen.items() if (delta := one.delta(load.duration_s)) is not None}
    warnings = (*_warnings(records), *([change] if change else []))
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return ReplayResult(trace, tuple(records), load.duration_s, deltas, warnings, change, load)


def _trace_of(plan: ReplayPlan) -> Trace:
    return shape_trace(load_trace(plan.trace, plan.tokenizer, rows_wanted(plan)), plan)


@dataclass(frozen=True, slots=True)
class BodyMaker:
    """Makes the bodies of one trace's requests, for one server and endpoint."""

    prompts: PromptMaker
    card: ModelCard
    endpoint: Endpoint
    as_text: Callable[[list[int], int], str] | None
    """Turns a prompt into text of at most so many tokens; None if prompts are sent as token ids."""

    def body(self, trace: Trace, index: int, round_index: int) -> bytes:
        """Return the body for the trace's row `index`."""
        return self._encoded(self.prompts.prompt(index, round_index), trace.rows[index].output_tokens)

    def warmup_body(self, number: int, round_index: int, input_tokens: int, output_tokens: int) -> bytes:
        """Return a body whose prompt begins like no other one's of any round, shorter where the model holds no more."""
        if self.card.max_model_len is not None:
            input_tokens = max(1, min(input_tokens, self.card.max_model_len - output_tokens))
        return self._encoded(self.prompts.warmup_prompt(number, round_index, input_tokens), output_tokens)

    def _encoded(self, prompt: list[int], output_tokens: int) -> bytes:
        most_tokens = len(prompt) - self.card.least_prompt_tokens + 1
        sent = prompt if self.as_text is None else self.as_text(prompt, most_tokens)
        return encode_body(self.card.id, sent, output_tokens, self.endpoint)


def body_maker(trace: Trace, plan: ReplayPlan, card: ModelCard, ordinals_per_round: int | None = None) -> BodyMaker:
    """Make prompts with the served model's tokenizer, or texts without it, as the card says.

    Raises LoadTestError if it is needed and not to be had.
    """
    tokenizer, as_text = plan.tokenizer or card.root, None
    if card.tokens_per_part is not None:
        parts = text_parts(card.tokens_per_part)
        tokens, as_text = parts.ids, parts.text
    elif tokenizer is not None:
        tokens = load_text_tokens(tokenizer)
        as_text = partial(prompt_text, tokenizer) if plan.sends_text else None
    else:
        raise LoadTestError(
            "the server does not say where its model's tokenizer is: pass --tokenizer PATH, or --text-prompts"
        )
    prompts = PromptMaker(TextWindows(tokens, plan.seed), trace, plan.warmup_requests, ordinals_per_round)
    return BodyMaker(prompts, card, plan.endpoint, as_text)


def completions(trace: Trace, bodies: BodyMaker, round_index: int) -> Iterator[Completion]:
    """Yield the requests of a round in the trace's order, with their bodies."""
    for index, row in enumerate(trace.rows):
        body = bodies.body(trace, index, round_index)
        due_s = row.arrival_s + row.offset_s
        yield Completion(index, due_s, row.input_tokens, row.output_tokens, body, row.after, row.think_s)


async def send_warm_up(
    client: LoadClient,
    plan: ReplayPlan,
    bodies: BodyMaker,
    trace: Trace,
    round_index: int,
    number: int,
    count: int,
    first: int = 0,
) -> None:
    """Send request `number` of `count`, whose sizes are the trace's from small to large; no figure counts it.

    `first` is the number of warm-up requests that the round had before these. Raises ServerError if it fails.
    """
    sizes = sorted(row.input_tokens for row in trace.rows)
    input_tokens = sizes[round(number * (len(sizes) - 1) / max(1, count - 1))]
    body = bodies.warmup_body(first + number, round_index, input_tokens, WARMUP_OUTPUT_TOKENS)
    request = Completion(number, 0.0, input_tokens, WARMUP_OUTPUT_TOKENS, body)
    record = await client.complete(request, time.perf_counter(), plan.deadline_s)
    if not record.ok:
        raise ServerError(f"warm-up request {number + 1} of {count} failed: {record.error}")


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
