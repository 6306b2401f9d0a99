"""The Prometheus series about workers, pools and queues, read at each scrape from what the router knows of them.

Counters are those of the workers' last status, cumulative since the worker's start. A series without data is absent,
never zero.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.fleet.worker import Worker, state_of
from ridgeline.router.settings import PoolHardware

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
        "Tokens computed, by the phase their request was in: prefill or decode; without rejected drafts",
        ("phase",),
    ),
    "drafted_tokens_total": ("ridgeline_drafted_tokens", "Tokens that speculation has proposed", ()),
    "accepted_tokens_total": ("ridgeline_accepted_tokens", "Proposed tokens that the model has accepted", ()),
    "sequence_steps_total": (
        "ridgeline_sequence_steps",
        "With speculation: decode steps of sequences, each of which makes one token and those accepted",
        (),
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
    "fetches_total": ("ridgeline_fetches", "KV fetches of a worker, by result", ("result",)),
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
    "active_fetches": ("ridgeline_active_fetches", "KV fetches that a worker has in progress"),
    "watched_handoffs": (
        "ridgeline_watched_handoffs",
        "Hand-offs that a decode worker keeps alive with heartbeats until it has fetched them",
    ),
}


_STATUS_GAUGES = (
    ("running", "ridgeline_running", "Sequences in the batch of a worker's engine"),
    ("waiting", "ridgeline_waiting", "Sequences waiting in the queue of a worker's engine"),
    ("tasks", "ridgeline_tasks", "Tasks that a worker has accepted and not finished"),
    ("kv_blocks_free", "ridgeline_kv_blocks_free", "Free blocks in a worker's KV cache"),
    ("kv_blocks_total", "ridgeline_kv_blocks", "Blocks in a worker's KV cache"),
)


@lru_cache(maxsize=1024)
def _parts_of(name: str) -> tuple[str, list[str]]:
    """Return the first part of a counter's name and the others; workers have a few dozen names."""
    first, *rest = name.split(".")
    return first, rest


def _gauge(
    name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> GaugeMetricFamily:
    """Return a gauge; each sample is the values of its labels, and its value."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


_WANTED = (
    "Workers that a pool should have by autoscaling's last simulation of the latest requests; absent before there is "
    "one, and for pools without bounds"
)
_AFFINITY = "1 for each worker of mode adaptive that is kept for one phase, labelled with it; none while all do both"


class BuildInfo(Collector):
    """Tells versions and model, for queries to join with."""

    def __init__(self, vllm: str, model: str) -> None:
        self._labels = {"version": version("ridgeline"), "vllm": vllm, "model": model}

    def collect(self) -> Iterator[Metric]:
        """Yield the one series; called by prometheus-client at each scrape."""
        yield _gauge(
            "ridgeline_build_info",
            "Always 1: the versions of Ridgeline and of the router's vLLM, and the model's served name",
            list(self._labels),
            [(list(self._labels.values()), 1)],
        )


class WorkerCollector(Collector):
    """Publishes the workers' last status as series; registered once."""

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        hardware: Callable[[], dict[Pool, PoolHardware]],
        mode: Callable[[], Mode],
        kv_pairs: Callable[[], Iterable[KvPair]],
        restarts: Callable[[], Mapping[tuple[Pool, str, str], int]],
        away: Callable[[], Mapping[str, str]] = dict,
        wanted: Callable[[], Mapping[Pool, int]] = dict,
    ) -> None:
        self._workers = workers
        self._hardware = hardware
        self._mode = mode
        self._kv_pairs = kv_pairs
        self._restarts = restarts
        self._away = away
        self._wanted = wanted

    def collect(self) -> Iterator[Metric]:
        """Yield every series; called by prometheus-client at each scrape."""
        workers = list(self._workers())
        yield _gauge(
            "ridgeline_mode", "1 for the mode in which new requests are served", ["mode"], [([self._mode()], 1)]
        )
        yield _gauge(
            "ridgeline_kv_pair",
            "Pairs of workers that can exchange KV, by the transport that carries it, and why no better one was picked",
            ["transport", "why"],
            sorted(Counts((pair.transport, pair.why) for pair in self._kv_pairs()).items()),
        )
        yield self._restarted({worker.worker_id for worker in workers})
        yield GaugeMetricFamily(
            "ridgeline_away_workers",
            "Workers in restart back-off: lost more than supervision.max_restarts times in five minutes of "
            "service; GET /ready names them",
            value=len(self._away()),
        )
        yield from _counters(workers)
        optional = [*_reported(workers), *_step_models(workers)]
        affinities = [([worker.worker_id, worker.favours], 1) for worker in workers if worker.favours is not None]
        optional += [
            _gauge("ridgeline_worker_role_affinity", _AFFINITY, ["worker", "phase"], affinities),
            _gauge("ridgeline_wanted_workers", _WANTED, ["pool"], [([pool], n) for pool, n in self._wanted().items()]),
        ]
        yield from (family for family in optional if family.samples)
        yield from _statuses(workers)
        yield from self._pools(workers)

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

    def _pools(self, workers: list[Worker]) -> Iterator[Metric]:
        hardware = self._hardware()
        pools = sorted({worker.pool for worker in workers} | hardware.keys())
        states = {pool: Counts(state_of(one) for one in workers if one.pool == pool) for pool in pools}
        known = {pool: hardware[pool] for pool in pools if pool in hardware}
        yield _gauge(
            "ridgeline_workers",
            "Workers of the pool that are connected and can be given work",
            ["pool"],
            [([pool], states[pool].pop("usable", 0)) for pool in pools],
        )
        yield _gauge(
            "ridgeline_unusable_workers",
            "Workers of the pool that cannot be given work: detached (no connection), draining, failed (its engine "
            "died, stalls, or its status is too old)",
            ["pool", "state"],
            [([pool, state], number) for pool in pools for state, number in sorted(states[pool].items())],
        )
        yield _gauge(
            "ridgeline_peak_flops",
            "Peak FLOP/s of one worker of the pool, measured or from a data sheet",
            ["pool"],
            [([pool], one.peak_flops) for pool, one in known.items()],
        )
        yield _gauge(
            "ridgeline_peak_bytes_per_second",
            "Peak memory bandwidth of one worker of the pool, measured or from a data sheet",
            ["pool"],
            [([pool], one.peak_bytes_per_s) for pool, one in known.items()],
        )
        yield _gauge(
            "ridgeline_hardware_info",
            "Always 1: the hardware of one worker of the pool, and where its peaks come from",
            ["pool", "hardware", "source"],
            [([pool, one.name, one.source], 1) for pool, one in known.items()],
        )
        moved = {pool: (_total(workers, pool, "flops_total."), _total(workers, pool, "bytes_total.")) for pool in pools}
        yield _gauge(
            "ridgeline_arithmetic_intensity",
            "Arithmetic intensity of all that the present workers have done in the pool: FLOPs per byte moved",
            ["pool"],
            [([pool], flops / num_bytes) for pool, (flops, num_bytes) in moved.items() if num_bytes],
        )


def _counters(workers: list[Worker]) -> Iterator[Metric]:
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


def _reported(workers: list[Worker]) -> Iterator[GaugeMetricFamily]:
    """Yield the gauges that workers report by name, each if any does."""
    told = [([one.pool, one.worker_id], one.status.counters) for one in workers if one.status is not None]
    for name, (series, text) in _WORKER_GAUGES.items():
        samples = ((labels, counters[name]) for labels, counters in told if name in counters)
        yield _gauge(series, text, ["pool", "worker"], samples)


def _statuses(workers: list[Worker]) -> Iterator[Metric]:
    for attribute, series, text in _STATUS_GAUGES:
        told = (([one.pool, one.worker_id], getattr(one.status, attribute)) for one in workers if one.status)
        yield _gauge(series, text, ["pool", "worker"], told)
    yield _gauge(
        "ridgeline_max_num_seqs",
        "Sequences that a worker's engine runs at a time",
        ["pool", "worker"],
        [([one.pool, one.worker_id], one.max_num_seqs) for one in workers if one.status],
    )


def _step_models(workers: list[Worker]) -> Iterator[GaugeMetricFamily]:
    """Yield what the workers' engines have learned about how long their steps take."""
    models = [
        ([one.pool, one.worker_id], one.status.step_model)
        for one in workers
        if one.status is not None and one.status.step_model is not None
    ]
    yield _gauge(
        "ridgeline_step_model_error_ratio",
        "Median of the relative errors, without their signs, over the latest steps of a worker's engine, predicted "
        "before they were known",
        ["pool", "worker"],
        [(labels, model.error) for labels, model in models],
    )
    parts = [
        ([*labels, part], seconds)
        for labels, model in models
        for part, seconds in (
            ("base", model.base_s),
            ("prefill_token", model.per_prefill_token_s),
            ("sequence", model.per_sequence_s),
            ("context_token", model.per_context_token_s),
            ("attended_token", model.per_attended_token_s),
        )
    ]
    yield _gauge(
        "ridgeline_step_model_seconds",
        "Fitted time of a step of a worker's engine: base, and what is added by one of each: prefill_token (of a "
        "prompt), sequence (that decodes), context_token (of those), attended_token (before a token of a prompt)",
        ["pool", "worker", "part"],
        parts,
    )


def _total(workers: Iterable[Worker], pool: Pool, prefix: str) -> float:
    """Return the sum of all counters with this prefix that the workers counted in this pool."""
    return sum(
        value for worker in workers for name, value in worker.counted.get(pool, {}).items() if name.startswith(prefix)
    )
