"""What each pool of workers did in a run, from the server's counters: intensity, MFU, MBU and stages.

Called by `loadtest.report.rounds`, `loadtest.report.replay_output` and `cluster.commands.top`.

Peaks are per worker, as the server publishes them; a pool's busy seconds are summed over its workers.
"""

from typing import Any

from loadtest.run.server_metrics import MetricsDelta

STAGES = ("preprocess", "queue", "prefill", "handoff_wait", "wire", "decode_queue", "decode")
POOL_FORMULAS = {
    "arithmetic_intensity": "FLOPs / (weight + KV bytes), FLOP/byte",
    "ridge": "peak FLOP/s / peak byte/s of one worker, FLOP/byte; below it a pool is bound by memory bandwidth",
    "mfu": "FLOPs / (busy seconds x peak FLOP/s)",
    "mfu_wall": "FLOPs / (workers x wall seconds x peak FLOP/s)",
    "mbu": "bytes / (busy seconds x peak byte/s)",
    "mbu_wall": "bytes / (workers x wall seconds x peak byte/s)",
    "busy_fraction": "busy seconds / (workers x wall seconds)",
    "disaggregated_fraction": "finished with path=disaggregated / finished with any path but decode_only",
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
    return {
        "arithmetic_intensity": ratio(flops, bytes_moved),
        "ridge": ratio(peak_flops, peak_bytes),
        "mfu": ratio(ratio(flops, busy_s), peak_flops),
        "mfu_wall": ratio(ratio(flops, wall_s), peak_flops),
        "mbu": ratio(ratio(bytes_moved, busy_s), peak_bytes),
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
    }


def ratio(above: float | None, below: float | None) -> float | None:
    """Return the quotient; None if either figure is None or the divisor is 0."""
    return above / below if above is not None and below else None
