"""The sentence of the live page, what would help, and how much of each resource is in use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ridgeline.roofline import bottleneck as rule
from ridgeline.roofline.bottleneck import Bottleneck, FleetState, PoolState
from ridgeline.router.live.samples import Window, mean
from ridgeline.router.live.state import (
    Action,
    Level,
    LinkNow,
    PoolNow,
    Promise,
    ResourceId,
    ResourceUse,
    RouterNow,
    Severity,
    Verdict,
    WorkerNow,
)


def fleet_state(promise: Promise, pools: Sequence[PoolNow], window: Window, receivers: int) -> FleetState:
    """Return what the rule of the sentence judges."""
    link_s = sum(window.rates("link_seconds").values())
    return FleetState(
        tuple(_pool_state(pool, window, promise) for pool in pools),
        None,  # whether any came is the verdict's own row
        promise.ttft_attainment_ratio,
        promise.tpot_attainment_ratio,
        link_s / receivers if receivers else None,
        window.mean_of("stage", "handoff_wait"),
        window.mean_of("stage", "wire"),
        (window.last.cpu_s - window.first.cpu_s) / window.seconds,
        window.tokens_per_event,
    )


def _pool_state(pool: PoolNow, window: Window, promise: Promise) -> PoolState:
    limit_s, step_s = promise.slo.tpot_s, pool.decode_step_s
    in_router = mean(float(sample.waiting_prompts.get(pool.pool, 0)) for sample in window.samples) or 0.0
    in_engines = window.level(pool.pool, lambda one: one.waiting)
    return PoolState(
        pool.pool,
        pool.workers_ready,
        pool.busy_ratio,
        pool.mfu_ratio,
        pool.mbu_ratio,
        window.level(pool.pool, lambda one: one.kv_used),
        window.level(pool.pool, lambda one: one.running),
        pool.workers[0].max_running if pool.workers else None,
        in_router + (in_engines or 0.0) * pool.workers_ready,
        slow=None if limit_s is None or step_s is None else step_s > limit_s,
        refused=None if pool.pool == "prefill" else promise.refused_by.get("kv_blocks", 0.0) * window.seconds,
    )


def _bar_of(found: Bottleneck) -> ResourceId | None:
    if found.resource in ("nothing", "unknown"):
        return None
    if found.resource == "router":
        return "router"
    if found.resource == "link":
        return "link"
    if found.pool == "prefill":
        return "prefill"
    return "kv" if found.resource in ("kv_blocks", "places") else "bandwidth"


def verdict_of(found: Bottleneck, pools: list[PoolNow], promise: Promise, modes: Iterable[str]) -> Verdict:
    gone = [(pool, row) for pool in pools for row in pool.workers if row.state in ("lost", "away")]
    if gone:
        pool, row = gone[0]
        others = pool.workers_ready
        said = f"{row.id} ({pool.pool}) is lost since {row.state_since_s:.0f} s"
        said += f": {row.why.rstrip('.')}." if row.why else "."
        carried = f"Its requests go on at the other {others} of its pool" if others else "No worker of its pool is left"
        action = Action("none", "Show its log", f"ridgeline logs --worker {row.id}")
        advice = f"{carried}. It restarts by itself."
        bar: ResourceId = "prefill" if pool.pool == "prefill" else "bandwidth"
        return Verdict("worker_lost", "fault", bar, row.id, 0.0, said, advice, action)
    if empty := next((pool for pool in pools if not pool.workers_ready), None):
        said = f"No worker of the pool {empty.pool} can be given work."
        return Verdict("worker_lost", "fault", None, None, 0.0, said, "GET /ready says why.", None)
    if found.resource in ("nothing", "unknown") and _is_idle(promise, pools):
        ready = sum(pool.workers_ready for pool in pools)
        said = f"No requests: {ready} of {sum(pool.workers_wanted for pool in pools)} workers are ready and idle."
        return Verdict("empty", "idle", None, None, 0.0, said, None, None)
    limit_s, alone_s = promise.slo.tpot_s, pools[-1].alone_step_s or 0.0
    step_s, attained = pools[-1].decode_step_s or 0.0, promise.tpot_attainment_ratio
    missed = step_s > (limit_s or 0.0) or (attained is not None and attained < rule.MIN_ATTAINMENT)
    if (
        found.resource in ("time", "bandwidth", "compute", "unknown")
        and missed
        and limit_s
        and (alone_s or 0) > limit_s
    ):
        said = f"No batch meets the TPOT SLO of {limit_s * 1e3:.0f} ms: a step of one sequence takes "
        said += f"{alone_s * 1e3:.0f} ms. Raise router.slo.tpot_ms, or use faster devices or a smaller model."
        return Verdict("time", "short", "bandwidth", None, 0.0, said, None, None)
    bar_of = _bar_of(found)
    kind = "none" if found.resource == "nothing" else found.resource
    severity: Severity = "ok" if kind == "none" else "idle" if kind == "unknown" else "short"
    return Verdict(kind, severity, bar_of, None, 0.0, found.sentence, None, _action(found, pools, modes))


def _is_idle(promise: Promise, pools: list[PoolNow]) -> bool:
    moves = promise.arrivals_per_s or promise.finished_per_s or promise.refused_per_s
    waits = any(pool.waiting_prompts for pool in pools)
    return not (moves or waits or any(row.running or row.waiting for pool in pools for row in pool.workers))


def _action(found: Bottleneck, pools: list[PoolNow], modes: Iterable[str]) -> Action | None:
    numbers: dict[str, int] = {pool.pool: pool.workers_wanted for pool in pools}
    if found.change in ("move_worker", "add_worker") and found.pool is not None:
        wanted = {found.pool: numbers.get(found.pool, 0) + 1}
        if found.giver is not None:
            wanted[found.giver] = numbers.get(found.giver, 2) - 1
    elif found.change == "fewer_workers" and found.giver is not None:
        wanted = {found.giver: numbers.get(found.giver, 2) - 1}
    elif found.change == "transport" and "colocated" in modes:
        expect = "no KV is moved; prompts and tokens share each worker, so ITL grows"
        label = "Change mode to colocated…"
        return Action("mode", label, "ridgeline mode colocated", {"mode": "colocated"}, expect, live=True)
    else:
        setting = {
            "router_processes": "router.processes=N",
            "kv_memory": f"pools.{found.pool}.kv_cache_memory_bytes=N",
            "max_num_seqs": f"pools.{found.pool}.max_num_seqs=N",
        }.get(found.change)
        expect = "settings change with another start of the deployment"
        return (setting and Action("none", "Show how", f"ridgeline serve --set {setting}", expect=expect)) or None
    text = " ".join(f"{pool}={number}" for pool, number in wanted.items())
    label = f"Scale to {', '.join(f'{number} {pool}' for pool, number in wanted.items())}…"
    expect = "new workers serve once their engines have loaded; leaving ones hand their sequences over"
    return Action("scale", label, f"ridgeline scale {text}", dict(wanted), expect, live=True)


def resources(
    verdict: Verdict, promise: Promise, pools: list[PoolNow], links: list[LinkNow], router: RouterNow
) -> list[ResourceUse]:
    """Return how much of each resource is in use; the one that the verdict names is short."""
    first, last, moved = pools[0], pools[-1], sum(link.bytes_per_s for link in links)
    whole, known = first is last, [row for row in last.workers if row.kv_used_ratio is not None]
    free = last.kv_blocks * sum(1 - (row.kv_used_ratio or 0.0) for row in known)
    per_event = None if router.tokens_per_event is None else f"{router.tokens_per_event:.1f} tokens an event"
    wait = f" {first.wait_s:.1f} s" if first.wait_s and first.waiting_prompts else ""
    timed = [link.use_ratio for link in links if link.use_ratio is not None]
    link_says = f"{moved / 1e6:.3g} MB/s by {', '.join(link.transport for link in links)}" if moved else "no KV moves"
    decode, decode_use, decode_of, decode_says = _decode_use(promise.slo.tpot_s, last, known)
    prompts, kv = ("Prompt steps", "KV blocks") if whole else ("Prefill compute", "Decode KV blocks")
    busy, full, cpu_says = rule.BUSY_FROM, rule.FULL_FROM, per_event or f"{router.in_flight} in flight"
    table: list[tuple[ResourceId, str, float | None, str, float, str]] = [
        ("router", "Router CPU", router.cpu_ratio, "of a core", rule.ROUTER_CORES, cpu_says),
        ("prefill", prompts, first.prompt_busy_ratio, "of time", busy, f"{first.waiting_prompts} prompts wait{wait}"),
        ("link", "KV link", sum(timed) if timed and moved else None, "of time", busy, link_says),
        ("kv", kv, mean(row.kv_used_ratio for row in known), "in use", full, f"{free:,.0f} blocks free"),
        ("bandwidth", decode, decode_use, decode_of, full, decode_says),
    ]
    return [
        ResourceUse(name, title, use, of, from_, _level(name, use, verdict, moved=bool(moved)), detail)
        for name, title, use, of, from_, detail in table
    ]


def _decode_use(limit_s: float | None, pool: PoolNow, known: Sequence[WorkerNow]) -> tuple[str, float | None, str, str]:
    """Return decode's bar: its name, its use, of the batch that the SLO on TPOT allows or of places, and a detail."""
    step_s, batch = pool.decode_step_s, mean(row.running or 0.0 for row in known)
    step = "no decode steps" if step_s is None else f"step {step_s * 1e3:.1f} ms"
    if limit_s is not None and step_s is not None and step_s > limit_s:
        return "Decode pace", step_s / limit_s, "of the TPOT SLO", f"{step}, SLO {limit_s * 1e3:.0f} ms"
    if pool.slo_point is not None and batch is not None:
        most = pool.slo_point.batch
        return "Decode pace", batch / most, "of the batch for TPOT", f"batch {batch:.0f} of {most}, {step}"
    used = mean((row.running or 0) / row.max_running for row in known if row.max_running)
    return "Decode batch", used, "of places", step


def _level(name: ResourceId, use: float | None, verdict: Verdict, *, moved: bool) -> Level:
    if verdict.resource == name and (verdict.severity == "short" or verdict.severity == "fault"):
        return verdict.severity
    if use is None:  # KV that moves during prefill is not timed
        return "ok" if moved else "unused"
    return "full" if use >= rule.BUSY_FROM else "idle" if use < rule.IDLE_TO else "ok"
