"""How much of the workers is in use: what `cluster.runtime.autoscale` asks a router that decides, or the dispatcher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from contracts.vocabulary import Pool
from router.fleet.worker import Worker
from router.observe.metrics import QueueView

PROMPT_STEPS = ("prefill", "mixed")
"""Kinds of engine steps that compute prompts."""


@dataclass(frozen=True)
class WorkerUse:
    """One worker at a moment."""

    worker_id: str
    incarnation: str
    pool: Pool
    usable: bool
    """Whether it can be given work."""
    prompt_steps_s: float = 0.0
    """Time that its engine has spent in steps with prompts, since its start."""
    running: int = 0
    """Sequences sent there that have not ended."""
    places: int = 0
    """Sequences that its engine runs at a time."""
    kv_blocks_used: int = 0
    """Blocks in use, or promised to sequences that have produced nothing yet."""
    kv_blocks: int = 0


@dataclass(frozen=True)
class FleetUse:
    """All workers at a moment, and the prompts that wait for a worker of each pool."""

    workers: tuple[WorkerUse, ...] = ()
    waiting_prompts: Mapping[Pool, int] = field(default_factory=dict)


def fleet_use(workers: Iterable[Worker], queues: Iterable[QueueView]) -> FleetUse:
    """Return what is in use by the workers' last status."""
    return FleetUse(tuple(map(_worker_use, workers)), {queue.pool: queue.waiting for queue in queues})


def _worker_use(worker: Worker) -> WorkerUse:
    load, counters = worker.load(), worker.status.counters if worker.status else {}
    used = load.kv_blocks_total - load.kv_blocks_free + load.kv_blocks_promised
    return WorkerUse(
        worker_id=worker.worker_id,
        incarnation=worker.description.incarnation,
        pool=worker.pool,
        usable=load.usable and worker.status is not None,
        prompt_steps_s=sum(counters.get(f"busy_seconds_total.{kind}", 0.0) for kind in PROMPT_STEPS),
        running=load.running,
        places=load.max_running,
        kv_blocks_used=min(used, load.kv_blocks_total),
        kv_blocks=load.kv_blocks_total,
    )
