"""The Prometheus series about requests; their names are a contract with dashboards.

A token's latencies are observed when it goes to the client, the rest when its sequence ends. A series without data is
absent, never zero.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.observe.ended_requests import EndedRequests
from ridgeline.router.observe.timeline import Latency, Outcome, RequestTimeline

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
LINK_BUCKETS = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)
"""Bytes per second, from a slow network to NVLink."""
STAGE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

CPU_EVERY_S = 1.0
"""How often a router counts its CPU time: well below any interval of scrapes."""
LINK_PEAK_BYTES = 8 << 20
"""Hand-offs from this size on, four frames, tell how fast a link can be. Transfers are timed from their first frame,
which may have travelled before, so that the rate is a third too high at most."""

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, which nobody asks for


class RequestMetrics:
    """The series about requests."""

    def __init__(
        self, registry: CollectorRegistry | None, namespace: str = "", ended: EndedRequests | None = None
    ) -> None:
        """Register the series; without a registry they are counted but not published.

        `namespace` tells them from others of this process, for `ridgeline.router.front.metrics_page`.
        """
        histogram = partial(Histogram, registry=registry, namespace=namespace)
        counter = partial(Counter, registry=registry, namespace=namespace)
        pool = ("pool",)
        self.in_flight = Gauge(
            "ridgeline_requests_in_flight",
            "Sequences that the router is serving",
            registry=registry,
            namespace=namespace,
            multiprocess_mode="livesum",
        )
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
        self.e2e = histogram(
            "ridgeline_e2e_seconds",
            "Time from the head of the HTTP request being read to the last token of a finished sequence",
            pool,
            buckets=(*LATENCY_BUCKETS, 128.0, 256.0, 512.0),
        )
        self.output_tokens = counter("ridgeline_output_tokens", "Tokens of sequences that ended", pool)
        self.slo = counter(
            "ridgeline_slo_sequences",
            "Sequences that ended and have an SLO, and whether they met it: ttft, tpot (of two tokens or more), or all "
            "that they have; goodput is the rate of slo=all, met=yes. A failed one has missed each; a cancelled one "
            "counts by the latencies that it had",
            ("slo", "met"),
        )
        self.queue = histogram(
            "ridgeline_queue_seconds",
            "Time that each leg of a finished sequence waited, by the pool of its worker and where: router (for a "
            "worker) or engine (for its first step, without the time that the hand-off took)",
            ("pool", "where"),
            buckets=STAGE_BUCKETS,
        )
        self.prefix_queries = counter(
            "ridgeline_prefix_cache_query_tokens",
            "Prompt tokens that workers looked for in their prefix caches, once per attempt",
            pool,
        )
        self.prefix_hits = counter(
            "ridgeline_prefix_cache_hit_tokens", "Prompt tokens that workers had in their prefix caches", pool
        )
        self.stage = histogram(
            "ridgeline_stage_seconds",
            "Time that a finished sequence spent in each stage; they add up to its latency: preprocess (reading and "
            "tokenising the request, admission), queue (router, then engine), dispatch (messages, threads, the rest of "
            "a running step), prefill, handoff_wait (from the decode worker asking for the KV to the first byte), wire "
            "(moving the KV), decode_queue, decode, lost (on a worker that was lost), unreported (by its worker). Of a "
            "hand-off fetched during prefill, only what came after prefill counts",
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
        self.link_fastest = Gauge(
            "ridgeline_link_fastest_bytes_per_second",
            "Transfer rate of the fastest KV hand-off of 8 MiB or more so far that was not fetched during prefill: a "
            "peak that was seen, not the link's capacity",
            link,
            registry=registry,
            namespace=namespace,
            multiprocess_mode="max",
        )
        self._fastest: dict[str, float] = {}
        self.overlapped = counter(
            "ridgeline_overlapped_handoffs",
            "Prompts that prefill announced before it had computed them: ok if decode admitted them meanwhile and got "
            "their KV, otherwise why it did not",
            ("result",),
        )
        self.reuse = counter(
            "ridgeline_reused_kv",
            "Questions to decode workers for the KV of a later turn's beginning: ok if prefill fetched it, else why "
            "it computed it: not_cached (evicted since), already_cached (by the prefill worker itself), no_answer (in "
            "the time that computing takes), or why the fetch failed",
            ("result",),
        )
        self.reused_tokens = counter(
            "ridgeline_reused_kv_tokens",
            "Prompt tokens whose KV was fetched from another worker's prefix cache, by the pool of the worker that "
            "would have computed them",
            pool,
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
            "Requests refused for want of room or workers: draining, not_ready, no_worker, too_large (can never fit), "
            "overload (too many requests), prompt_wait (too long a queue), kv_blocks (too little KV cache), "
            "client_share (this client holds its share)",
            ("reason",),
        )
        self.unread = counter(
            "ridgeline_unread_answers_ended",
            "Answers cut off because their client did not read them: deadline (took nothing for too long), "
            "total_bytes (all unread answers together too large, and this one the furthest behind)",
            ("why",),
        )
        self.probes = counter("ridgeline_canaries", "Health probes sent by GET /ready, by result", ("result",))

        self.decisions = counter(
            "ridgeline_decisions",
            "Finished sequences in mode adaptive: whole or split, and why: fewest_prompt_tokens, in_shape (a worker "
            "for prompts, one for decode), short_prompt or to_meet_slo (an exception)",
            ("choice", "reason"),
        )
        self.prediction_error = histogram(
            "ridgeline_prediction_error_ratio",
            "Relative error, without its sign, of the TTFT and TPOT by which a sequence's workers were chosen",
            ("latency",),
            buckets=ERROR_BUCKETS,
        )
        self.cpu = counter("ridgeline_router_cpu_seconds", "CPU time of a router process, user and system", ("router",))
        self._latencies: dict[tuple[Latency, Pool], Histogram] = {}
        """The children, cached because `labels` costs more than `observe`, and both run for each token."""
        self.ended = EndedRequests() if ended is None else ended
        """The latest sequences one by one, which no series can tell."""

    def observe(self, latency: Latency, pool: Pool, seconds: float) -> None:
        """Record the latency of a token that a worker of `pool` made and that has gone to its client."""
        child = self._latencies.get((latency, pool))
        if child is None:
            series = {"ttft": self.ttft, "second_token": self.second_token, "itl": self.itl}[latency]
            child = self._latencies[latency, pool] = series.labels(pool)
        child.observe(seconds)

    async def count_cpu(self, router: str) -> None:
        """Count the CPU time of this process, which is the router of this name, until cancelled."""
        counted_s, child = 0.0, self.cpu.labels(router)
        while True:
            used_s = time.process_time()
            child.inc(used_s - counted_s)
            counted_s = used_s
            await asyncio.sleep(CPU_EVERY_S)

    def looked_up(self, pool: Pool, prompt_tokens: int, cached_tokens: int) -> None:
        """Record how many tokens of a prompt a worker of `pool` had in its prefix cache."""
        self.prefix_queries.labels(pool).inc(prompt_tokens)
        self.prefix_hits.labels(pool).inc(cached_tokens)

    def close(self, timeline: RequestTimeline, outcome: Outcome) -> None:
        """Record a sequence that has ended."""
        self.requests.labels(timeline.path, outcome).inc()
        ended = self.ended.add(timeline, outcome)
        for slo, met in ended.slos_met().items():
            self.slo.labels(slo, "yes" if met else "no").inc()
        for state, pause_s in timeline.pauses_s:
            self.pause.labels(state).observe(pause_s)
        if timeline.last_pool is not None:
            self.output_tokens.labels(timeline.last_pool).inc(timeline.num_output_tokens)
        if outcome != "finished":
            return
        if timeline.e2e_s is not None:
            self.e2e.labels(timeline.last_pool).observe(timeline.e2e_s)
        if timeline.tpot_s is not None:
            self.tpot.labels(timeline.last_pool).observe(timeline.tpot_s)
        stages_s: dict[str, float] = defaultdict(float)
        for stage in ended.stages:
            stages_s["queue" if stage.name == "engine_queue" else stage.name] += stage.duration_s
        for name, seconds in stages_s.items():
            self.stage.labels(name).observe(seconds)
        for pool, where, seconds in timeline.waits_s():
            self.queue.labels(pool, where).observe(seconds)
        self._count_link(timeline)
        self._count_decision(timeline)

    def _count_link(self, timeline: RequestTimeline) -> None:
        num_bytes, wire_s = timeline.moved
        if num_bytes and timeline.transport:
            self.link_bytes.labels(timeline.transport).inc(num_bytes)
            self.link_seconds.labels(timeline.transport).inc(wire_s)
            if wire_s:
                rate = num_bytes / wire_s
                self.link_rate.labels(timeline.transport).observe(rate)
                if num_bytes >= LINK_PEAK_BYTES and rate > self._fastest.get(timeline.transport, 0.0):
                    self._fastest[timeline.transport] = rate
                    self.link_fastest.labels(timeline.transport).set(rate)

    def _count_decision(self, timeline: RequestTimeline) -> None:
        """Count the choice of a finished sequence that lost no worker, and the error of its prediction."""
        assignment = timeline.assignment
        if assignment is None or timeline.pauses_s:
            return
        self.decisions.labels("split" if assignment.splits else "whole", assignment.reason).inc()
        for latency, predicted_s, seen_s in (
            ("ttft", assignment.ttft_s, timeline.ttft_s),
            ("tpot", assignment.tpot_s, timeline.tpot_s),
        ):
            if seen_s:
                self.prediction_error.labels(latency).observe(abs(predicted_s / seen_s - 1))
