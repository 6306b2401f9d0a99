"""Which workers there are, and how much of them is in use.

`ridgeline.cluster.runtime.autoscale` and `ridgeline.cluster.runtime.fleet_operations` ask a router that decides for it,
or the dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.worker import Worker

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
    mode: Mode | None = None


@dataclass(frozen=True)
class Member:
    """A worker, for whoever changes how many there are."""

    pool: Pool
    usable: bool
    """Whether it can be given work."""
    draining: bool
    incarnation: str = ""
    """Empty if the head that was asked does not know it."""


@dataclass(frozen=True)
class Members:
    """All workers by their ids, and the mode in which they have these pools."""

    mode: Mode
    workers: dict[str, Member]


def fleet_use(workers: Iterable[Worker], waiting_prompts: dict[Pool, int], mode: Mode | None = None) -> FleetUse:
    """Return what is in use by the workers' last status."""
    return FleetUse(tuple(map(_worker_use, workers)), waiting_prompts, mode)


def members(fleet: Fleet, started_for: Mapping[str, Pool]) -> Members:
    """Return all workers by their last status.

    Those of `started_for` that are not known here do not run at the moment.
    """
    roles = {name: fleet.roles.role_of(name, pool, fleet.mode, 0) for name, pool in started_for.items()}
    away = {
        name: Member(role.pool if role else started_for[name], usable=False, draining=False)
        for name, role in roles.items()
    }
    return Members(fleet.mode, away | {worker.worker_id: _member(worker) for worker in fleet.workers})


def _member(worker: Worker) -> Member:
    usable = worker.usable and worker.status is not None
    return Member(worker.pool, usable=usable, draining=worker.drains, incarnation=worker.description.incarnation)


def _worker_use(worker: Worker) -> WorkerUse:
    counters, blocks = worker.status.counters if worker.status else {}, worker.description.num_kv_blocks
    used = blocks - worker.kv_blocks_free + worker.outstanding.promised_blocks
    return WorkerUse(
        worker_id=worker.worker_id,
        incarnation=worker.description.incarnation,
        pool=worker.pool,
        usable=worker.usable and worker.status is not None,
        prompt_steps_s=sum(counters.get(f"busy_seconds_total.{kind}", 0.0) for kind in PROMPT_STEPS),
        running=worker.outstanding.running,
        places=worker.max_num_seqs,
        kv_blocks_used=min(used, blocks),
        kv_blocks=blocks,
    )
