"""How much of each pool is in use, and whether the limits for latencies are kept, between two readings.

Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.observe.fleet_use import FleetUse, WorkerUse
from ridgeline.router.observe.metrics import LimitedLatency, Within

LEAST_COUNTED = 10
"""Sequences between two readings below which it is not judged whether a limit is kept."""
SENTENCES: Mapping[LimitedLatency, str] = {
    "ttft": "{:.0%} of {} first tokens came within {:g} ms",
    "tpot": "{:.0%} of {} sequences took at most {:g} ms per token",
}


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
