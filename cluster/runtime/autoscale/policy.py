"""Decides which pool should have one worker more or one fewer. A pure function of readings: no clock, no I/O.

What keeps it from changing its mind:

- what makes a pool grow or shrink must be so at every reading for a time, and longer to shrink;
- between the thresholds nothing happens, and a pool shrinks only if what is left would still be below the upper one;
- one pool changes by one worker at a time, and after any change, by whomever, nothing is decided for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.observe.fleet_use import FleetUse, WorkerUse
from ridgeline.router.observe.metrics import LimitedLatency, Within

LEAST_COUNTED = 10
"""Sequences between two readings below which it is not judged whether a limit is kept."""
SENTENCES: Mapping[LimitedLatency, str] = {
    "ttft": "{:.0%} of {} first tokens came within {:g} ms",
    "tpot": "{:.0%} of {} sequences took at most {:g} ms per token",
}
Direction = Literal["up", "down"]
LIMITS_OF: Mapping[Pool, tuple[LimitedLatency, ...]] = {
    "prefill": ("ttft",),
    "decode": ("tpot",),
    "colocated": ("ttft", "tpot"),
    "adaptive": ("ttft", "tpot"),
}
"""Which latencies another worker of a pool would help."""


@dataclass(frozen=True)
class Reading:
    """What was known at one moment."""

    at_s: float
    fleet: FleetUse = field(default_factory=FleetUse)
    """Without workers if nothing is known: a router is being started again, or does not know all workers yet."""
    within: Mapping[str, Mapping[LimitedLatency, Within]] = field(default_factory=dict)
    """By router, how many sequences have kept each limit since that router's start."""
    operation_under_way: bool = False


@dataclass(frozen=True)
class PoolUse:
    """One pool between two readings."""

    workers: int
    use: float | None
    """The fraction in use; None if it is not known, since a worker is lost or drains, or nothing was read before."""
    what: str
    """What is in use, for sentences."""
    waiting_prompts: int = 0


@dataclass(frozen=True)
class Attainment:
    """How many sequences kept a limit between two readings."""

    fraction: float
    sentence: str


def pool_uses(reading: Reading, last: Reading | None) -> dict[Pool, PoolUse]:
    """Return the use of each pool that has workers.

    - prefill: the fraction of time in which its engines computed prompts;
    - decode: the fraction of its places or of its KV blocks that is taken, whichever is larger;
    - colocated: the same as decode, and all of it while prompts wait: steps that compute prompts and tokens together
      take all the time long before they are full.
    """
    by_pool: dict[Pool, list[WorkerUse]] = {}
    for worker in reading.fleet.workers:
        by_pool.setdefault(worker.pool, []).append(worker)
    return {pool: _pool_use(pool, workers, reading, last) for pool, workers in by_pool.items()}


def attainments(reading: Reading, last: Reading | None) -> dict[LimitedLatency, Attainment]:
    """Return how many sequences kept each limit since the last reading; nothing of a limit with too few of them."""
    if last is None:
        return {}
    found: dict[LimitedLatency, Attainment] = {}
    for latency, sentence in SENTENCES.items():
        grown = [
            _since(now[latency], last.within.get(router, {}).get(latency))
            for router, now in reading.within.items()
            if latency in now
        ]
        within, counted = sum(one.within for one in grown), sum(one.counted for one in grown)
        if counted >= LEAST_COUNTED:
            fraction = within / counted
            found[latency] = Attainment(fraction, sentence.format(fraction, counted, grown[0].bound_s * 1000))
    return found


def _pool_use(pool: Pool, workers: Sequence[WorkerUse], reading: Reading, last: Reading | None) -> PoolUse:
    waiting = reading.fleet.waiting_prompts.get(pool, 0)
    if not all(worker.usable for worker in workers):
        return PoolUse(len(workers), None, "not all of its workers serve", waiting)
    if pool == "prefill":
        use = _prompt_time(workers, reading, last)
        return PoolUse(len(workers), use, "of its time goes into prompts", waiting)
    if pool in ("colocated", "adaptive") and waiting:
        return PoolUse(len(workers), 1.0, "in use", waiting)
    places = _ratio((worker.running, worker.places) for worker in workers)
    blocks = _ratio((worker.kv_blocks_used, worker.kv_blocks) for worker in workers)
    use, what = max((places, "of its places are taken"), (blocks, "of its KV blocks are taken"))
    return PoolUse(len(workers), use, what, waiting)


def _ratio(parts: Iterable[tuple[int, int]]) -> float:
    used, there = (sum(numbers) for numbers in zip(*parts, strict=True))
    return used / there if there else 0.0


def _prompt_time(workers: Sequence[WorkerUse], reading: Reading, last: Reading | None) -> float | None:
    """Return the fraction of time in steps with prompts, of the workers that were there before."""
    if last is None or reading.at_s <= last.at_s:
        return None
    elapsed_s = reading.at_s - last.at_s
    before = {(one.worker_id, one.incarnation): one.prompt_steps_s for one in last.fleet.workers}
    shares = [
        min(1.0, max(0.0, one.prompt_steps_s - before[one.worker_id, one.incarnation]) / elapsed_s)
        for one in workers
        if (one.worker_id, one.incarnation) in before
    ]
    return sum(shares) / len(shares) if shares else None


def _since(now: Within, before: Within | None) -> Within:
    """Return what was counted since; nothing for a router that was not read before, or has been started again."""
    if before is None or now.counted < before.counted or now.within < before.within:
        return Within(now.bound_s, 0, 0)
    return Within(now.bound_s, now.within - before.within, now.counted - before.counted)


@dataclass(frozen=True)
class Decision:
    """One pool should have another number of workers."""

    pool: Pool
    now_workers: int
    wanted_workers: int
    reason: str

    @property
    def sentence(self) -> str:
        """What should be, and the numbers that led to it."""
        return f"{self.pool} from {self.now_workers} to {self.wanted_workers} workers: {self.reason}"


@dataclass(frozen=True)
class Memory:
    """What is kept between readings."""

    last: Reading | None = None
    """The last reading, if it said something."""
    workers: Mapping[Pool, int] = field(default_factory=dict)
    """How many workers each pool had when that was last known."""
    changed_s: float | None = None
    """When the last change was seen or decided."""
    since_s: Mapping[tuple[Pool, Direction], float] = field(default_factory=dict)
    """Since when a pool has needed more or fewer at every reading."""


def decide(settings: AutoscaleConfig, reading: Reading, memory: Memory) -> tuple[Decision | None, Memory]:
    """Return what to change now, if anything, and what to remember.

    The decision counts as a change; if nobody acts on it, keep the memory of before.
    """
    if reading.operation_under_way:
        memory = replace(memory, changed_s=reading.at_s)
    if not reading.fleet.workers:
        return None, replace(memory, last=None, since_s={})
    uses = pool_uses(reading, memory.last)
    workers = {pool: use.workers for pool, use in uses.items()}
    changed = bool(memory.workers) and workers != memory.workers
    changed_s = reading.at_s if changed else memory.changed_s
    needs = {} if reading.operation_under_way else _needs(settings, uses, attainments(reading, memory.last))
    since_s = {need: memory.since_s.get(need, reading.at_s) for need in needs}
    memory = Memory(reading, workers, changed_s, since_s)
    if changed_s is not None and reading.at_s - changed_s < settings.cooldown_s:
        return None, memory
    for (pool, direction), reason in needs.items():
        held_s = reading.at_s - since_s[pool, direction]
        if held_s >= (settings.up_after_s if direction == "up" else settings.down_after_s):
            wanted = workers[pool] + (1 if direction == "up" else -1)
            needed = f"it has needed {'more' if direction == 'up' else 'fewer'} for {held_s:.0f} s"
            decision = Decision(pool, workers[pool], wanted, f"{needed}; now {reason}")
            return decision, replace(memory, changed_s=reading.at_s, since_s={})
    return None, memory


def _needs(
    settings: AutoscaleConfig, uses: Mapping[Pool, PoolUse], kept: Mapping[LimitedLatency, Attainment]
) -> dict[tuple[Pool, Direction], str]:
    """Return which pools need more workers or fewer, and why: growth first, the fullest pool before the others."""
    bounds = settings.bounds()
    known = [(use.use, pool, use) for pool, use in uses.items() if pool in bounds and use.use is not None]
    fullest_first = sorted(known, key=lambda each: -each[0])
    missed = {latency: each for latency, each in kept.items() if each.fraction < settings.min_attainment}
    grows: dict[tuple[Pool, Direction], str] = {}
    shrinks: dict[tuple[Pool, Direction], str] = {}
    for fraction, pool, use in fullest_first:
        misses = [missed[latency] for latency in LIMITS_OF[pool] if latency in missed]
        if use.workers < bounds[pool].max_workers and (why := _why_more(settings, fraction, use, misses)):
            grows[pool, "up"] = why
        elif use.workers > bounds[pool].min_workers and not misses and _too_many(settings, fraction, use):
            limit = f"autoscale.down_use is {settings.down_use:.0%}"
            left = f"with one fewer it would be {_with_one_fewer(fraction, use):.0%}"
            shrinks[pool, "down"] = f"{_figures(fraction, use)} ({limit}, {left})"
    return grows | dict(reversed(shrinks.items()))


def _why_more(settings: AutoscaleConfig, fraction: float, use: PoolUse, misses: list[Attainment]) -> str | None:
    """Say why a pool needs another worker.

    A limit that is missed by a pool with little to do is missed by requests that take long by themselves, for which
    another worker changes nothing.
    """
    if fraction >= settings.up_use:
        return f"{_figures(fraction, use)} (autoscale.up_use is {settings.up_use:.0%})"
    if misses and fraction > settings.down_use:
        missed = " and ".join(one.sentence for one in misses)
        return f"{missed} (autoscale.min_attainment is {settings.min_attainment:.0%}), {_figures(fraction, use)}"
    return None


def _too_many(settings: AutoscaleConfig, fraction: float, use: PoolUse) -> bool:
    if use.waiting_prompts or use.workers < 2 or fraction > settings.down_use:
        return False
    return _with_one_fewer(fraction, use) < settings.up_use


def _with_one_fewer(fraction: float, use: PoolUse) -> float:
    return fraction * use.workers / (use.workers - 1)


def _figures(fraction: float, use: PoolUse) -> str:
    waits = f", {use.waiting_prompts} waiting prompts" if use.waiting_prompts else ""
    return f"{fraction:.0%} {use.what}{waits}"
