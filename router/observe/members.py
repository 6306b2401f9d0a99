"""Which workers there are, for whoever changes how many.

`ridgeline.cluster.runtime.autoscale` and `ridgeline.cluster.runtime.fleet_operations` ask a router that decides for it,
or the dispatcher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.worker import Worker


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
