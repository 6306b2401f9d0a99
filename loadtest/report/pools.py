"""What each pool of workers did in a run, from the server's counters: intensity, MFU, MBU, stages.

Peaks are per worker, as the server publishes them; a pool's busy seconds are summed over its workers. `fleet_state`
makes of it what `ridgeline.roofline.bottleneck` judges, also of what vLLM and SGLang publish.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run.server_metrics import MetricsDelta
from ridgeline.roofline.bottleneck import EVENTS_PER_S, FleetState, PoolState, bound

STEP_KINDS = ("prefill", "decode", "mixed")
BYTE_KINDS = ("weights", "kv_read", "kv_write")
FIRST_TOKEN_STAGES = ("preprocess", "queue", "prefill")
ELSEWHERE = "elsewhere"
STAGES = ("preprocess", "queue", "prefill", "handoff_wait", "wire", "decode_queue", "decode")
POOL_FORMULAS = {
    "arithmetic_intensity": "FLOPs / (weight + KV bytes), FLOP/byte",
    "ridge": "peak FLOP/s / peak byte/s of one worker, FLOP/byte; the roof is the memory's left of it",
    "mfu": "FLOPs / (busy seconds x peak FLOP/s)",
    "mfu_wall": "FLOPs / (workers x wall seconds x peak FLOP/s)",
    "mbu": "bytes / (busy seconds x peak byte/s)",
    "mbu_wall": "bytes / (workers x wall seconds x peak byte/s)",
    "busy_fraction": "busy seconds / (workers x wall seconds)",
    "disaggregated_fraction": "finished with path=disaggregated / finished with any path but decode_only",
    "bound": "compute or memory, whichever of MFU and MBU is larger and at least 50 %; else neither; of a pool with "
    "several kinds of step: the one with most busy seconds",
    "roof_seconds": "the larger of FLOPs / peak FLOP/s and bytes / peak byte/s, added over kinds of step",
    "latency_parts": "seconds in the stage / finished requests; elsewhere = mean latency - stages, below 0 if stages "
    "overlap",
    "stage_seconds": "mean seconds a request spent in the stage",
}


def describe_pools(delta: MetricsDelta) -> dict[str, dict[str, Any]]:
    """Return the figures of each pool; a figure that cannot be computed is None, never 0.

    Pools that workers were in before the run have counters too, which did not grow; they are left out.
    """
    pools = {pool: _pool(delta, pool) for pool in delta.label_values("ridgeline_busy_seconds_total", "pool")}
    return {pool: figures for pool, figures in pools.items() if figures["workers"] or figures["busy_seconds"]}


def stage_seconds(delta: MetricsDelta) -> dict[str, float]:
    """Return mean seconds by stage, in the order a request passes them; stages without requests are left out."""
    means = {stage: _mean_seconds(delta, "ridgeline_stage_seconds", stage=stage) for stage in STAGES}
    return {stage: mean_s for stage, mean_s in means.items() if mean_s is not None}


def latency_parts(
    delta: MetricsDelta, mean_ttft_s: float | None, mean_latency_s: float | None
) -> dict[str, dict[str, float]]:
    """Return the mean seconds by stage, until the first token and after it, so that they add up to the latency.

    Empty if the server counted no stages, or if a decode worker sampled first tokens: then the stages do not say what
    came before them.
    """
    finished = delta.total("ridgeline_requests_total", outcome="finished")
    stages = {stage: delta.total("ridgeline_stage_seconds_sum", stage=stage) for stage in STAGES}
    resampled = delta.total("ridgeline_first_token_total", mode="resample")
    if mean_ttft_s is None or mean_latency_s is None or not finished or not any(stages.values()) or resampled:
        return {}
    parts: dict[str, dict[str, float]] = {"first token": {}, "after it": {}}
    for stage, seconds in stages.items():
        if seconds:
            parts["first token" if stage in FIRST_TOKEN_STAGES else "after it"][stage] = seconds / finished
    for part, seconds in (("first token", mean_ttft_s), ("after it", mean_latency_s - mean_ttft_s)):
        parts[part][ELSEWHERE] = seconds - sum(parts[part].values())
    return parts


def disaggregated_fraction(delta: MetricsDelta) -> float | None:
    """Return the share of finished requests that went through both pools; None if none finished."""
    finished = {
        path: delta.total("ridgeline_requests_total", path=path, outcome="finished")
        for path in ("disaggregated", "fallback", "colocated")
    }
    return ratio(finished["disaggregated"], sum(finished.values()))


def recomputes(delta: MetricsDelta) -> dict[str, float]:
    """Return the number of recomputed prompts by reason; empty if there were none."""
    name = "ridgeline_recompute_total"
    counts = {reason: delta.total(name, reason=reason) for reason in delta.label_values(name, "reason")}
    return {reason: count for reason, count in counts.items() if count}


def _pool(delta: MetricsDelta, pool: str) -> dict[str, Any]:
    peaks = (
        delta.level("ridgeline_peak_flops", pool=pool),
        delta.level("ridgeline_peak_bytes_per_second", pool=pool),
    )
    workers = delta.level("ridgeline_workers", pool=pool)
    wall_s = workers * delta.wall_s if workers else None
    each = {kind: _steps(delta, peaks, pool=pool, step=kind) for kind in STEP_KINDS}
    kinds = {kind: one for kind, one in each.items() if one["arithmetic_intensity"] and one["busy_seconds"]}
    longest = max(kinds.values(), key=lambda kind: kind["busy_seconds"], default=None)
    steps = _steps(delta, peaks, pool=pool)
    moved = delta.total("ridgeline_bytes_total", pool=pool)
    return steps | {
        "bound": (longest or steps)["bound"],
        "roof_seconds": _sum(kind["roof_seconds"] for kind in kinds.values()),
        "step_kinds": kinds,
        "ridge": ratio(*peaks),
        "mfu_wall": ratio(ratio(steps["flops"], wall_s), peaks[0]),
        "mbu_wall": ratio(ratio(moved, wall_s), peaks[1]),
        "busy_fraction": ratio(steps["busy_seconds"], wall_s),
        "workers": workers,
        "bytes": {kind: delta.total("ridgeline_bytes_total", pool=pool, kind=kind) for kind in BYTE_KINDS},
        "kv_transfer_bytes": delta.total("ridgeline_kv_transfer_bytes_total", pool=pool),
        "peak_flops": peaks[0],
        "peak_bytes_per_second": peaks[1],
        "hardware": delta.gauge_label("ridgeline_hardware_info", "hardware", pool=pool),
        "peaks_source": delta.gauge_label("ridgeline_hardware_info", "source", pool=pool),
    }


def _steps(delta: MetricsDelta, peaks: tuple[float | None, float | None], **labels: str) -> dict[str, Any]:
    """Return the figures of the steps with these labels."""
    flops = delta.total("ridgeline_flops_total", **labels)
    moved = delta.total("ridgeline_bytes_total", **labels)
    busy_s = delta.total("ridgeline_busy_seconds_total", **labels)
    mfu, mbu = ratio(ratio(flops, busy_s), peaks[0]), ratio(ratio(moved, busy_s), peaks[1])
    return {
        "arithmetic_intensity": ratio(flops, moved),
        "bound": bound(mfu, mbu),
        "busy_seconds": busy_s,
        "steps": delta.total("ridgeline_steps_total", **labels),
        "roof_seconds": max(flops / peaks[0], moved / peaks[1]) if peaks[0] and peaks[1] else None,
        "flops": flops,
        "mfu": mfu,
        "mbu": mbu,
    }


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the quotient; None if either figure is None or the divisor is 0."""
    return above / below if above is not None and below else None


@dataclass(frozen=True, slots=True)
class _Engine:
    """Names of an engine's series: what it runs, what waits for room, the share of its KV in use, lost sequences."""

    running: str
    waiting: tuple[str, dict[str, str]]
    kv_used: str
    preemptions: str
    tells_each_step: bool
    """Whether `running` is set after every step; then it is above 0 as long as the engine is in steps."""


_ENGINES = (
    _Engine(
        "vllm:num_requests_running",
        ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}),  # the others wait for KV transfers
        "vllm:kv_cache_usage_perc",
        "vllm:num_preemptions_total",
        tells_each_step=True,  # `PrometheusStatLogger.record`
    ),
    _Engine(
        "sglang:num_running_reqs",
        ("sglang:num_queue_reqs", {}),
        "sglang:token_usage",
        "sglang:num_retracted_requests_total",
        tells_each_step=False,  # once in `decode_log_interval` steps
    ),
)
_PREFIX_TOKENS = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
)
"""The counters of prompt tokens that prefix caches had, and of all."""
_FINISHED = ("vllm:request_success_total", "sglang:num_requests_total")
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
"""Of vLLM, by where the KV of prompt tokens came from; the sources add up to all prompt tokens."""


def fleet_state(
    deltas: Mapping[str, MetricsDelta],
    ttft_attainment: float | None = None,
    tpot_attainment: float | None = None,
    places: int | None = None,
) -> FleetState:
    """Return what `ridgeline.roofline.bottleneck.bottleneck` judges, from what the servers at these URLs counted.

    It knows the pools of a Ridgeline server, and engines of vLLM and SGLang; levels only if they were read meanwhile.
    `places` is max_num_seqs of such engines, which publish it elsewhere.
    """
    own = next((delta for delta in deltas.values() if delta.label_values("ridgeline_busy_seconds_total", "pool")), None)
    if own is None:
        finished = [delta.total(name) for delta in deltas.values() for name in _FINISHED if delta.has(name)]
        pools = tuple(_foreign_pools(deltas, places))
        return FleetState(pools, sum(finished) if finished else None, ttft_attainment, tpot_attainment)
    stages, receivers = stage_seconds(own), own.level("ridgeline_workers", pool="decode")
    events, tokens = own.total("ridgeline_text_events_total"), own.total("ridgeline_text_tokens_total")
    return FleetState(
        tuple(_pool_state(own, pool, figures) for pool, figures in describe_pools(own).items()),
        own.total("ridgeline_requests_total", outcome="finished"),
        ttft_attainment,
        tpot_attainment,
        ratio(own.total("ridgeline_link_seconds_total"), receivers and receivers * own.wall_s),
        stages.get("handoff_wait"),
        stages.get("wire"),
        _cores(own),
        ratio(tokens, events) if events >= EVENTS_PER_S * own.wall_s else None,
    )


def _cores(delta: MetricsDelta) -> float | None:
    name = "process_cpu_seconds_total"
    return ratio(delta.total(name), delta.wall_s) if delta.has(name) else None


def _pool_state(delta: MetricsDelta, pool: str, figures: Mapping[str, Any]) -> PoolState:
    steps = max(figures["step_kinds"].values(), key=lambda kind: kind["busy_seconds"], default=figures)
    free = _mean(delta, "ridgeline_kv_blocks_free", pool=pool)
    free_share = ratio(free, delta.level_sum("ridgeline_kv_blocks", pool=pool))
    in_engines, in_router = (
        _mean(delta, "ridgeline_waiting", pool=pool),
        _mean(delta, "ridgeline_waiting_prompts", pool=pool),
    )
    fetching = _mean(delta, "ridgeline_active_fetches", pool=pool)  # they wait for KV, not for room
    waiting = _sum((in_router, None if in_engines is None else max(0.0, in_engines - (fetching or 0.0))))
    return PoolState(
        pool,
        figures["workers"],
        figures["busy_fraction"],
        steps["mfu"],
        steps["mbu"],
        None if free_share is None else 1 - free_share,
        ratio(_mean(delta, "ridgeline_running", pool=pool), figures["workers"]),
        delta.level("ridgeline_max_num_seqs", pool=pool),
        waiting,
    )


def _mean(delta: MetricsDelta, name: str, **labels: str) -> float | None:
    return _sum(level.mean for level in delta.levels_of(name, **labels))


def _foreign_pools(deltas: Mapping[str, MetricsDelta], places: int | None = None) -> Iterable[PoolState]:
    """Yield a pool for each role of the engines.

    A vLLM engine is busy in the share of readings in which something runs. That of one that prefills is not known: its
    requests end in the step that began them, after which none runs.
    """
    roles: dict[str, list[MetricsDelta]] = {}
    for url, role in roles_of(deltas).items():
        roles.setdefault(role, []).append(deltas[url])
    for role, found in roles.items():
        for engine in _ENGINES:
            running = [level for delta in found for level in delta.levels_of(engine.running)]
            if not running:
                continue
            name, labels = engine.waiting
            tells = engine.tells_each_step and role != "prefill"
            used = [level.mean for delta in found for level in delta.levels_of(engine.kv_used)]
            yield PoolState(
                role,
                len(running),
                busy=ratio(sum(level.above_zero for level in running), len(running)) if tells else None,
                kv_used=sum(used) / len(used) if used else None,
                running=sum(level.mean for level in running) / len(running),
                places=places,
                waiting=_sum(level.mean for delta in found for level in delta.levels_of(name, **labels)),
                preemptions=sum(delta.total(engine.preemptions) for delta in found),
            )


def engines_sentence(deltas: Mapping[str, MetricsDelta]) -> str:
    """Say what foreign engines counted of their caches, queues and preemptions; empty if they count nothing of it."""
    told = []
    for hits, asked in _PREFIX_TOKENS:
        share = ratio(*(sum(delta.total(name) for delta in deltas.values()) for name in (hits, asked)))
        told += [] if share is None else [f"{share:.0%} of prompt tokens from the prefix cache"]
    for pool in _foreign_pools(deltas):
        used = "" if pool.kv_used is None else f"KV blocks {pool.kv_used:.0%} used, "
        waiting = "" if pool.waiting is None else f"{pool.waiting:.1f} waiting, "
        told.append(f"{pool.pool}: {used}{waiting}{counted(round(pool.preemptions or 0), 'preemption')}")
    return f"{'; '.join(told)}." if told else ""


def roles_of(deltas: Mapping[str, MetricsDelta]) -> dict[str, str]:
    """Return what the engine at each URL does: prefill or decode if KV went between them, else engine.

    A vLLM server that prefills for others finishes each request after one token; SGLang's says it in `engine_type`.
    """
    moved = any(delta.total(_BY_SOURCE, source="external_kv_transfer") for delta in deltas.values())
    roles = {}
    for url, delta in deltas.items():
        kind = delta.gauge_label("sglang:num_running_reqs", "engine_type")
        if kind in ("prefill", "decode"):
            roles[url] = kind
        elif moved and delta.has("vllm:generation_tokens_total"):
            finished = delta.total("vllm:request_success_total")
            roles[url] = "decode" if delta.total("vllm:generation_tokens_total") > finished else "prefill"
        else:
            roles[url] = "engine"
    return roles


def split_fraction(deltas: Mapping[str, MetricsDelta]) -> float | None:
    """Return the share of the work that really went through both pools; None if the servers do not say.

    Ridgeline: of finished requests. llm-d: of its router's decisions (`llm_d_epp_disagg_decision_total`). vLLM: of the
    prompt tokens of servers that decode, those whose KV was at another server, by the share of NIXL's transfers that
    did not fail; vLLM counts these tokens before it fetches them (`vllm/v1/core/sched/scheduler.py`).
    """
    for delta in deltas.values():
        if (own := disaggregated_fraction(delta)) is not None:
            return own
        for name in ("llm_d_epp_disagg_decision_total", "llm_d_inference_scheduler_disagg_decision_total"):
            if decisions := delta.total(name):
                split = [kind for kind in delta.label_values(name, "decision_type") if kind.endswith("prefill-decode")]
                return sum(delta.total(name, decision_type=kind) for kind in split) / decisions
    decoding = [deltas[url] for url, role in roles_of(deltas).items() if role != "prefill"]
    came, done, failed = (
        sum(delta.total(name, **labels) for delta in decoding)
        for name, labels in (
            (_BY_SOURCE, {"source": "external_kv_transfer"}),
            ("vllm:nixl_xfer_time_seconds_count", {}),
            ("vllm:nixl_num_failed_transfers_total", {}),
        )
    )
    came *= done / (done + failed) if failed else 1.0
    return ratio(came, sum(delta.total(_BY_SOURCE) for delta in decoding))


@dataclass(frozen=True, slots=True)
class RouterShare:
    """What the router takes of a client's latencies; None is not known."""

    ttft: float | None
    """Reading, tokenising and admission, and what the client sees beyond the router's own TTFT: text and network."""
    ttft_at_most: float | None
    """All that is neither queue nor prefill: also messages to workers, and the rest of a step that ran."""
    itl: float | None
    """How long a token waits in the router to become text, as a share of a gap between tokens."""
    cpu_cores: float | None
    """CPU seconds a second of the router process that answered /metrics, one of several."""

    @property
    def sentence(self) -> str:
        """Say the shares that are known, and whether one is worth attention; empty without any."""
        known = {name: share for name, share in (("TTFT", self.ttft), ("ITL", self.itl)) if share is not None}
        shares = [f"{share:.0%} of {name}" for name, share in known.items()]
        much = ", which is much" if any(share > NOTICED for share in known.values()) else ""
        cores = "" if self.cpu_cores is None else f"; the router uses {self.cpu_cores:.2f} cores"
        return f"Router and network take {' and '.join(shares)}{much}{cores}." if shares else ""


NOTICED = 0.1
"""The share from which the router's part is much: no tuning of engines could win it back."""


def router_share(delta: MetricsDelta, mean_ttft_s: float | None, mean_latency_s: float | None) -> RouterShare:
    """Return the router's part in a client's mean TTFT and ITL; its TTFT is known where `latency_parts` are."""
    first = latency_parts(delta, mean_ttft_s, mean_latency_s).get("first token", {})
    own_ttft_s = _mean_seconds(delta, "ridgeline_ttft_seconds")
    ttft = at_most = None
    if mean_ttft_s and own_ttft_s is not None and first:
        engine_s = first.get("queue", 0.0) + first.get("prefill", 0.0)
        ttft = (first.get("preprocess", 0.0) + max(0.0, mean_ttft_s - own_ttft_s)) / mean_ttft_s
        at_most = max(ttft, 1 - engine_s / mean_ttft_s)
    held_s = ratio(delta.total("ridgeline_text_seconds_total"), delta.total("ridgeline_text_events_total"))
    itl = ratio(held_s, _mean_seconds(delta, "ridgeline_itl_seconds"))
    return RouterShare(ttft, at_most, itl, _cores(delta))


def _mean_seconds(delta: MetricsDelta, name: str, **labels: str) -> float | None:
    return ratio(delta.total(f"{name}_sum", **labels), delta.total(f"{name}_count", **labels))
