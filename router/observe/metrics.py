"""The Prometheus series of Ridgeline, except the event loop's lag; the names are a contract with dashboards.

Request series are observed here: a token's latencies when it goes to the client, the rest when its sequence ends.
Worker series are read from the workers' last status at scrape time; their counters are cumulative since the worker's
start. A series without data is absent, never zero.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from contracts.vocabulary import Mode, Phase, Pool
from contracts.workers import WorkerStatus
from router.fleet.policy import WorkerLoad
from router.observe.explanations import Explanations
from router.observe.timeline import Latency, Outcome, RequestTimeline
from router.settings import PoolHardware

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
LINK_BUCKETS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
"""Bytes per second, from a slow network to NVLink."""
STAGE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, which nobody asks for

LimitedLatency = Literal["ttft", "tpot"]
"""A latency for which there may be a limit."""


@dataclass(frozen=True)
class Within:
    """How many sequences have kept a limit since the router's start."""

    bound_s: float
    """What was counted by: the highest bound of a bucket that is not above the limit."""
    within: int
    counted: int


class RequestMetrics:
    """The series about requests."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        """Register the series. Without a registry they are counted but not published."""
        histogram, counter = partial(Histogram, registry=registry), partial(Counter, registry=registry)
        pool = ("pool",)
        self.ttft = histogram(
            "ridgeline_ttft_seconds",
            "Time to first token (TTFT): from the head of the HTTP request being read to the first token being handed "
            "to the HTTP side; once per sequence",
            pool,
            buckets=LATENCY_BUCKETS,
        )
        self.tpot = histogram(
            "ridgeline_tpot_seconds",
            "Time per output token (TPOT) of a finished sequence: (latency - TTFT) / (output tokens - 1)",
            pool,
            buckets=TOKEN_BUCKETS,
        )
        self.itl = histogram(
            "ridgeline_itl_seconds",
            "Inter-token latency (ITL): gap between two successive deltas sent to a client; a delta can hold several "
            "tokens",
            pool,
            buckets=TOKEN_BUCKETS,
        )
        self.second_token = histogram(
            "ridgeline_second_token_seconds",
            "Gap between a sequence's first delta and its second; with first-token mode continue it includes the "
            "hand-off of KV",
            pool,
            buckets=TOKEN_BUCKETS,
        )
        self.stage = histogram(
            "ridgeline_stage_seconds",
            "Time that a finished sequence spent in each stage: preprocess (reading and tokenising the request, "
            "admission), queue (router, then engine), prefill, handoff_wait (from the decode worker asking for the KV "
            "to the first byte), wire (moving the KV), decode_queue, decode",
            ("stage",),
            buckets=STAGE_BUCKETS,
        )
        self.requests = counter(
            "ridgeline_requests",
            "Sequences that ended, by outcome and path: disaggregated (prefilled on one worker, decoded on another), "
            "fallback (whole on one worker, since the KV transfer failed or a pool had no usable worker), "
            "decode_only (whole on a decode worker because the prompt is short), colocated (whole on a replica, as "
            "intended in this mode); a request with n > 1 counts as n",
            ("path", "outcome"),
        )
        self.first_token = counter(
            "ridgeline_first_token",
            "KV hand-offs by who sampled the first token: continue (prefill) or resample (decode, for the given "
            "reason)",
            ("mode", "reason"),
        )
        link = ("transport",)
        self.link_bytes = counter(
            "ridgeline_link_bytes",
            "KV bytes of whole hand-offs between workers; those that were fetched during prefill are not counted, "
            "since only their last segment was timed",
            link,
        )
        self.link_seconds = counter(
            "ridgeline_link_seconds",
            "Transfer time, first to last byte, of KV hand-offs not fetched during prefill",
            link,
        )
        self.link_rate = histogram(
            "ridgeline_link_bytes_per_second",
            "Transfer rate of each KV hand-off not fetched during prefill; the low buckets are the slowest links",
            link,
            buckets=LINK_BUCKETS,
        )
        self.overlapped = counter(
            "ridgeline_followed_handoffs",
            "Prompts that prefill announced before it had computed them: ok if decode admitted them meanwhile and got "
            "their KV, otherwise why it did not",
            ("result",),
        )
        self.retries = counter(
            "ridgeline_retries",
            "Requests moved to another worker, by the state they were in and the cause",
            ("state", "cause"),
        )
        self.pause = histogram(
            "ridgeline_continuation_pause_seconds",
            "Pause that a client saw when its worker was lost: from the last token before the loss, or from arrival, "
            "to the next token; by the state the request was in",
            ("state",),
            buckets=LATENCY_BUCKETS,
        )
        self.rejected = counter(
            "ridgeline_rejected",
            "Requests refused by admission: draining, not_ready, no_worker, too_large (can never fit), overload (too "
            "many requests), prompt_wait (too long a queue), kv_blocks (too little KV cache), client_share (this "
            "client holds its share)",
            ("reason",),
        )
        self.unread = counter(
            "ridgeline_unread_answers_ended",
            "Answers cut off because their client did not read them: deadline (took nothing for too long), "
            "stream_bytes (this one too far behind), total_bytes (all unread answers together too large)",
            ("why",),
        )
        self.canaries = counter("ridgeline_canaries", "Canary requests sent by GET /ready, by result", ("result",))

        self.decisions = counter(
            "ridgeline_decisions",
            "Finished sequences in mode adaptive: whole or split, and why: within_limits, fewest_broken (it "
            "was likely to break one) or least_latency (there were none)",
            ("choice", "reason"),
        )
        self.prediction_error = histogram(
            "ridgeline_prediction_error_ratio",
            "Relative error, without its sign, of the TTFT and TPOT by which a sequence's workers were chosen",
            ("latency",),
            buckets=ERROR_BUCKETS,
        )
        self._latencies: dict[tuple[Latency, Pool], Histogram] = {}
        """The children, cached because `labels` costs more than `observe`, and both run for each token."""
        self.explanations = Explanations()
        """The latest decisions, which no series can tell."""

    def observe(self, latency: Latency, pool: Pool, seconds: float) -> None:
        """Record the latency of a token that a worker of `pool` made and that has gone to its client."""
        child = self._latencies.get((latency, pool))
        if child is None:
            series = {"ttft": self.ttft, "second_token": self.second_token, "itl": self.itl}[latency]
            child = self._latencies[latency, pool] = series.labels(pool)
        child.observe(seconds)

    def within(self, latency: LimitedLatency, limit_s: float) -> Within:
        """Count the sequences of all pools that have kept a limit.

        The limit is rounded down to a bound of a bucket; it must not be below the lowest.
        """
        series, bounds = {"ttft": (self.ttft, LATENCY_BUCKETS), "tpot": (self.tpot, TOKEN_BUCKETS)}[latency]
        bound_s = max(bound for bound in bounds if bound <= limit_s)
        samples = [sample for family in series.collect() for sample in family.samples]
        within = (one.value for one in samples if "le" in one.labels and float(one.labels["le"]) == bound_s)
        counted = (one.value for one in samples if one.name.endswith("_count"))
        return Within(bound_s, int(sum(within)), int(sum(counted)))

    def close(self, timeline: RequestTimeline, outcome: Outcome) -> None:
        """Record a sequence that has ended."""
        self.requests.labels(timeline.path, outcome).inc()
        self.explanations.add(timeline, outcome)
        for state, pause_s in timeline.pauses_s:
            self.pause.labels(state).observe(pause_s)
        if outcome != "finished":
            return
        if timeline.tpot_s is not None:
            self.tpot.labels(timeline.last_pool).observe(timeline.tpot_s)
        for stage, seconds in timeline.stages_s().items():
            self.stage.labels(stage).observe(seconds)
        self._count_link(timeline)
        self._count_decision(timeline)

    def _count_link(self, timeline: RequestTimeline) -> None:
        num_bytes, wire_s = timeline.moved
        if num_bytes and timeline.transport:
            self.link_bytes.labels(timeline.transport).inc(num_bytes)
            self.link_seconds.labels(timeline.transport).inc(wire_s)
            if wire_s:
                self.link_rate.labels(timeline.transport).observe(num_bytes / wire_s)

    def _count_decision(self, timeline: RequestTimeline) -> None:
        """Count the choice of a finished sequence that lost no worker, and the error of its prediction."""
        decision = timeline.decision
        if decision is None or timeline.pauses_s:
            return
        chosen = decision.chosen
        self.decisions.labels("split" if chosen.splits else "whole", decision.reason).inc()
        for latency, predicted_s, seen_s in (
            ("ttft", chosen.ttft_s, timeline.ttft_s),
            ("tpot", chosen.tpot_s, timeline.tpot_s),
        ):
            if seen_s:
                self.prediction_error.labels(latency).observe(abs(predicted_s / seen_s - 1))


class InFlight(Collector):
    """The number of sequences that are being served; registered once, beside `RequestMetrics`."""

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge; called by prometheus-client at each scrape."""
        yield GaugeMetricFamily(
            "ridgeline_requests_in_flight", "Sequences that the router is serving", self._in_flight()
        )


class WorkerView(Protocol):
    """What the collector reads of a connected worker."""

    @property
    def pool(self) -> Pool: ...
    @property
    def worker_id(self) -> str: ...
    @property
    def status(self) -> WorkerStatus | None: ...
    @property
    def counted(self) -> Mapping[Pool, Mapping[str, float]]: ...
    @property
    def favours(self) -> Phase | None: ...
    def load(self) -> WorkerLoad: ...


class KvPairView(Protocol):
    """What the collector reads of a pairing."""

    @property
    def transport(self) -> str: ...

    @property
    def why(self) -> str: ...


# counter name's first part -> (series, help, names of the labels its other parts give)
_WORKER_COUNTERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "flops_total": (
        "ridgeline_flops",
        "Floating-point operations that the model's arithmetic needs, by kind of step",
        ("step",),
    ),
    "bytes_total": (
        "ridgeline_bytes",
        "Bytes that the model must read and write, by kind of step and kind of data",
        ("step", "kind"),
    ),
    "busy_seconds_total": (
        "ridgeline_busy_seconds",
        "Wall-clock time spent in engine steps, by kind of step",
        ("step",),
    ),
    "steps_total": ("ridgeline_steps", "Engine steps, by kind: prefill, decode, mixed", ("step",)),
    "tokens_total": (
        "ridgeline_tokens",
        "Tokens computed, by the phase their request was in: prefill or decode",
        ("phase",),
    ),
    "recompute_total": (
        "ridgeline_recompute",
        "Prompts computed on the worker that decodes, instead of transferred to it, by reason",
        ("reason",),
    ),
    "kv_bytes_total": (
        "ridgeline_kv_transfer_bytes",
        "KV bytes sent to other workers (as encoded for the wire) or received (as written to the cache)",
        ("direction",),
    ),
    "fetches_total": ("ridgeline_fetches", "KV fetches of a decode worker, by result", ("result",)),
    "shortened_chunks_total": (
        "ridgeline_shortened_chunks",
        "Steps in which a prompt computed less than it could have, so that sequences beside it decode in time",
        (),
    ),
    "expired_leases_total": ("ridgeline_expired_leases", "Hand-offs whose lease ran out before they were fetched", ()),
}
_WORKER_GAUGES = {
    "step_target_seconds": (
        "ridgeline_step_target_seconds",
        "How long a step of a worker's engine may take while sequences decode; 0: no target",
    ),
    "open_leases": ("ridgeline_leases", "Hand-offs that a worker offers and that have not been released"),
    "pinned_blocks": ("ridgeline_pinned_blocks", "KV blocks that hand-offs keep from being freed"),
    "active_fetches": ("ridgeline_active_fetches", "KV fetches that a decode worker has in progress"),
    "watched_handoffs": (
        "ridgeline_watched_handoffs",
        "Hand-offs that a decode worker keeps alive with heartbeats until it has fetched them",
    ),
}


@lru_cache(maxsize=1024)
def _parts_of(name: str) -> tuple[str, list[str]]:
    """Return the first part of a counter's name and the others; workers have a few dozen names."""
    first, *rest = name.split(".")
    return first, rest


def _favours(workers: list[WorkerView]) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "ridgeline_worker_favours",
        "1 for each worker of mode adaptive that is kept for one phase, labelled with it; none while all do both",
        labels=["worker", "phase"],
    )
    for worker in workers:
        if worker.favours is not None:
            family.add_metric([worker.worker_id, worker.favours], 1)
    if family.samples:
        yield family


def _step_models(workers: list[WorkerView]) -> Iterator[Metric]:
    """Yield what the workers' engines have learned about how long their steps take."""
    error = GaugeMetricFamily(
        "ridgeline_step_model_error_ratio",
        "Median of the relative errors, without their signs, over the latest steps of a worker's engine, predicted "
        "before they were known",
        labels=["pool", "worker"],
    )
    coefficients = GaugeMetricFamily(
        "ridgeline_step_model_seconds",
        "Fitted time of a step of a worker's engine: base, and what is added by one of each: prefill_token (of a "
        "prompt), sequence (that decodes), context_token (of those), attended_token (before a token of a prompt)",
        labels=["pool", "worker", "part"],
    )
    for worker in workers:
        model = None if worker.status is None else worker.status.step_model
        if model is None:
            continue
        error.add_metric([worker.pool, worker.worker_id], model.error)
        for part, seconds in (
            ("base", model.base_s),
            ("prefill_token", model.per_prefill_token_s),
            ("sequence", model.per_sequence_s),
            ("context_token", model.per_context_token_s),
            ("attended_token", model.per_attended_token_s),
        ):
            coefficients.add_metric([worker.pool, worker.worker_id, part], seconds)
    yield from (family for family in (error, coefficients) if family.samples)


class WorkerCollector(Collector):
    """Publishes the workers' last status as series; registered once."""

    def __init__(
        self,
        workers: Callable[[], Iterable[WorkerView]],
        hardware: Callable[[], dict[Pool, PoolHardware]],
        mode: Callable[[], Mode],
        kv_pairs: Callable[[], Iterable[KvPairView]],
        restarts: Callable[[], Mapping[tuple[Pool, str, str], int]],
        away: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._workers = workers
        self._hardware = hardware
        self._mode = mode
        self._kv_pairs = kv_pairs
        self._restarts = restarts
        self._away = away

    def collect(self) -> Iterator[Metric]:
        """Yield every series; called by prometheus-client at each scrape."""
        workers = list(self._workers())
        mode = GaugeMetricFamily("ridgeline_mode", "1 for the mode in which new requests are served", labels=["mode"])
        mode.add_metric([self._mode()], 1)
        yield mode
        yield self._pairs()
        yield self._restarted({worker.worker_id for worker in workers})
        yield GaugeMetricFamily(
            "ridgeline_away_workers",
            "Workers in restart back-off: lost more than supervision.max_restarts times in supervision.window_s of "
            "service; GET /ready names them",
            value=len(self._away()),
        )
        yield from self._counters(workers)
        yield from self._gauges(workers)
        yield from _step_models(workers)
        yield from _favours(workers)
        yield from self._pools(workers)

    def _pairs(self) -> Metric:
        family = GaugeMetricFamily(
            "ridgeline_kv_pair",
            "Pairs of workers that can exchange KV, by the transport that carries it, and why no better one was picked",
            labels=["transport", "why"],
        )
        for labels, number in sorted(Counts((pair.transport, pair.why) for pair in self._kv_pairs()).items()):
            family.add_metric(labels, number)
        return family

    def _restarted(self, present: set[str]) -> Metric:
        family = CounterMetricFamily(
            "ridgeline_worker_restarts",
            "Restarts of a worker, by reason: ordered (by an operator; also one that was added), actor_died, "
            "engine_died, stalled (work but no step), unreachable (no answer to the supervisor), cut_off (no answer to "
            "most routers)",
            labels=["pool", "worker", "reason"],
        )
        for labels, count in self._restarts().items():
            if labels[1] in present:  # ids are never used again, so those that have left would add up for ever
                family.add_metric(labels, count)
        return family

    def _counters(self, workers: list[WorkerView]) -> Iterator[Metric]:
        for prefix, (series, text, labels) in _WORKER_COUNTERS.items():
            family = CounterMetricFamily(series, text, labels=["pool", "worker", *labels])
            for worker in workers:
                for pool, counters in worker.counted.items():
                    for name, value in counters.items():
                        first, rest = _parts_of(name)
                        if first == prefix and len(rest) == len(labels):
                            family.add_metric([pool, worker.worker_id, *rest], value)
            if family.samples:
                yield family

    def _gauges(self, workers: list[WorkerView]) -> Iterator[Metric]:
        statuses = [(worker, worker.status) for worker in workers if worker.status is not None]
        for name, (series, text) in _WORKER_GAUGES.items():
            family = GaugeMetricFamily(series, text, labels=["pool", "worker"])
            for worker, status in statuses:
                if name in status.counters:
                    family.add_metric([worker.pool, worker.worker_id], status.counters[name])
            if family.samples:
                yield family
        for attribute, text in (
            ("running", "Sequences in the batch of a worker's engine"),
            ("waiting", "Sequences waiting in the queue of a worker's engine"),
            ("tasks", "Tasks that a worker has accepted and not finished"),
            ("kv_blocks_free", "Free blocks in a worker's KV cache"),
            ("kv_blocks_total", "Blocks in a worker's KV cache"),
        ):
            family = GaugeMetricFamily(f"ridgeline_{attribute.removesuffix('_total')}", text, labels=["pool", "worker"])
            for worker, status in statuses:
                family.add_metric([worker.pool, worker.worker_id], getattr(status, attribute))
            yield family

    def _pools(self, workers: list[WorkerView]) -> Iterator[Metric]:
        usable = GaugeMetricFamily(
            "ridgeline_workers", "Workers of the pool that are connected and can be given work", labels=["pool"]
        )
        unusable = GaugeMetricFamily(
            "ridgeline_unusable_workers",
            "Workers of the pool that cannot be given work: detached (no connection), draining, failed (its engine "
            "died, stalls, or its status is too old)",
            labels=["pool", "state"],
        )
        peak_flops = GaugeMetricFamily(
            "ridgeline_peak_flops",
            "Peak FLOP/s of one worker of the pool, measured or from a data sheet",
            labels=["pool"],
        )
        peak_bytes = GaugeMetricFamily(
            "ridgeline_peak_bytes_per_second",
            "Peak memory bandwidth of one worker of the pool, measured or from a data sheet",
            labels=["pool"],
        )
        source = GaugeMetricFamily(
            "ridgeline_hardware_info",
            "Always 1: the hardware of one worker of the pool, and where its peaks come from",
            labels=["pool", "hardware", "source"],
        )
        intensity = GaugeMetricFamily(
            "ridgeline_arithmetic_intensity",
            "Arithmetic intensity of all that the present workers have done in the pool: FLOPs per byte moved",
            labels=["pool"],
        )
        for pool in sorted({worker.pool for worker in workers} | self._hardware().keys()):
            members = [worker for worker in workers if worker.pool == pool]
            states = Counts(_state(worker.load()) for worker in members)
            usable.add_metric([pool], states.pop("usable", 0))
            for state, number in sorted(states.items()):
                unusable.add_metric([pool, state], number)
            hardware = self._hardware().get(pool)
            if hardware is not None:
                peak_flops.add_metric([pool], hardware.peak_flops)
                peak_bytes.add_metric([pool], hardware.peak_bytes_per_s)
                source.add_metric([pool, hardware.name, hardware.source], 1)
            flops, moved = _total(workers, pool, "flops_total."), _total(workers, pool, "bytes_total.")
            if moved:
                intensity.add_metric([pool], flops / moved)
        yield from (usable, unusable, peak_flops, peak_bytes, source, intensity)


class QueueView(Protocol):
    """What the collector reads of a pool's prompt queue."""

    @property
    def pool(self) -> Pool: ...
    @property
    def waiting(self) -> int: ...
    @property
    def waiting_tokens(self) -> int: ...
    @property
    def tokens_per_s(self) -> float | None: ...


class QueueCollector(Collector):
    """The series about prompts that wait in the router; registered once."""

    def __init__(self, queues: Iterable[QueueView]) -> None:
        self._queues = list(queues)

    def collect(self) -> Iterator[Metric]:
        """Yield every series; called by prometheus-client at each scrape."""
        prompts = GaugeMetricFamily(
            "ridgeline_waiting_prompts", "Prompts that wait in the router for a worker of the pool", labels=["pool"]
        )
        tokens = GaugeMetricFamily(
            "ridgeline_waiting_prompt_tokens",
            "Tokens of the prompts that wait in the router for a worker of the pool",
            labels=["pool"],
        )
        rate = GaugeMetricFamily(
            "ridgeline_prompt_tokens_per_second",
            "Prompt tokens per second that the pool computes when it is fully loaded, as last measured",
            labels=["pool"],
        )
        for queue in self._queues:
            prompts.add_metric([queue.pool], queue.waiting)
            tokens.add_metric([queue.pool], queue.waiting_tokens)
            if queue.tokens_per_s is not None:
                rate.add_metric([queue.pool], queue.tokens_per_s)
        yield from (prompts, tokens, rate)


def _state(load: WorkerLoad) -> str:
    """Return "usable", or the first reason why the worker is not."""
    if not load.connected:
        return "detached"
    if not load.healthy:
        return "failed"
    return "draining" if load.draining else "usable"


def _total(workers: Iterable[WorkerView], pool: Pool, prefix: str) -> float:
    """Return the sum of all counters with this prefix that the workers counted in this pool."""
    return sum(
        value for worker in workers for name, value in worker.counted.get(pool, {}).items() if name.startswith(prefix)
    )
