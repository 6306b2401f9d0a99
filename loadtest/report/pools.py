"""What each pool of workers did in a run, from the server's counters: intensity, MFU, MBU, stages.

Peaks are per worker, as the server publishes them; a pool's busy seconds are summed over its workers.
"""

from collections.abc import Iterable
from typing import Any

from ridgeline.loadtest.run.server_metrics import MetricsDelta

STEP_KINDS = ("prefill", "decode", "mixed")
BOUND_FROM = 0.5
"""The share of a peak from which a step counts as bound by it."""
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
    means = {}
    for stage in STAGES:
        count = delta.total("ridgeline_stage_seconds_count", stage=stage)
        if count:
            means[stage] = delta.total("ridgeline_stage_seconds_sum", stage=stage) / count
    return means


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
    flops = delta.total("ridgeline_flops_total", pool=pool)
    bytes_moved = delta.total("ridgeline_bytes_total", pool=pool)
    busy_s = delta.total("ridgeline_busy_seconds_total", pool=pool)
    peak_flops = delta.level("ridgeline_peak_flops", pool=pool)
    peak_bytes = delta.level("ridgeline_peak_bytes_per_second", pool=pool)
    workers = delta.level("ridgeline_workers", pool=pool)
    wall_s = workers * delta.wall_s if workers else None
    kinds = _step_kinds(delta, pool, peak_flops, peak_bytes)
    longest = max(kinds.values(), key=lambda kind: kind["busy_seconds"], default=None)
    mfu, mbu = ratio(ratio(flops, busy_s), peak_flops), ratio(ratio(bytes_moved, busy_s), peak_bytes)
    return {
        "bound": longest["bound"] if longest else bound(mfu, mbu),
        "roof_seconds": _sum(kind["roof_seconds"] for kind in kinds.values()),
        "step_kinds": kinds,
        "arithmetic_intensity": ratio(flops, bytes_moved),
        "ridge": ratio(peak_flops, peak_bytes),
        "mfu": mfu,
        "mfu_wall": ratio(ratio(flops, wall_s), peak_flops),
        "mbu": mbu,
        "mbu_wall": ratio(ratio(bytes_moved, wall_s), peak_bytes),
        "busy_fraction": ratio(busy_s, wall_s),
        "workers": workers,
        "flops": flops,
        "bytes": {
            kind: delta.total("ridgeline_bytes_total", pool=pool, kind=kind)
            for kind in ("weights", "kv_read", "kv_write")
        },
        "busy_seconds": busy_s,
        "steps": delta.total("ridgeline_steps_total", pool=pool),
        "kv_transfer_bytes": delta.total("ridgeline_kv_transfer_bytes_total", pool=pool),
        "peak_flops": peak_flops,
        "peak_bytes_per_second": peak_bytes,
        "hardware": delta.gauge_label("ridgeline_hardware_info", "hardware", pool=pool),
        "peaks_source": delta.gauge_label("ridgeline_hardware_info", "source", pool=pool),
    }


def bound(mfu: float | None, mbu: float | None) -> str | None:
    """Return what limits steps: being left of the ridge does not make them memory-bound, nearness to the roof does."""
    if mfu is None or mbu is None:
        return None
    if max(mfu, mbu) < BOUND_FROM:
        return "neither"
    return "compute" if mfu >= mbu else "memory"


def _step_kinds(
    delta: MetricsDelta, pool: str, peak_flops: float | None, peak_bytes: float | None
) -> dict[str, dict[str, Any]]:
    found = {}
    for kind in STEP_KINDS:
        flops = delta.total("ridgeline_flops_total", pool=pool, step=kind)
        bytes_moved = delta.total("ridgeline_bytes_total", pool=pool, step=kind)
        busy_s = delta.total("ridgeline_busy_seconds_total", pool=pool, step=kind)
        if not (flops and bytes_moved and busy_s):
            continue
        mfu, mbu = ratio(flops / busy_s, peak_flops), ratio(bytes_moved / busy_s, peak_bytes)
        found[kind] = {
            "arithmetic_intensity": flops / bytes_moved,
            "bound": bound(mfu, mbu),
            "busy_seconds": busy_s,
            "steps": delta.total("ridgeline_steps_total", pool=pool, step=kind),
            "roof_seconds": max(flops / peak_flops, bytes_moved / peak_bytes) if peak_flops and peak_bytes else None,
            "flops": flops,
            "mfu": mfu,
            "mbu": mbu,
        }
    return found


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the quotient; None if either figure is None or the divisor is 0."""
    return above / below if above is not None and below else None
