"""What the driver calls of a router and of the dispatcher, which both are connected to all workers.

`ridgeline.cluster.runtime.handles` calls these methods by their names, through the actor and its service.
Its `members` say which workers there are, for whoever changes how many:
`ridgeline.cluster.runtime.autoscale` and `ridgeline.cluster.runtime.fleet_operations`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ridgeline.contracts.errors import WorkerLost
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.pairing import KvPair
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.observe.loop_lag import LoopLag
from ridgeline.router.placement.pool_queue import QueueNow
from ridgeline.router.scheduler.sizing import LatestLoad
from ridgeline.router.watching import Comparing


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


class RouterControl(ABC):
    """The part that routers and the dispatcher have in common."""

    TITLE: ClassVar[str]
    comparing: Comparing | None = None
    """What knows the traffic, where it is decided which worker a prompt gets."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        """The workers, and the roles that they have."""
        self._lag = LoopLag()
        self._running: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def queues(self) -> Mapping[Pool, QueueNow]:
        """The prompts that wait."""

    @abstractmethod
    def fleet_changed(self) -> None:
        """Look again what can start, now that there are other workers."""

    @property
    def loop_silent_s(self) -> float:
        """Seconds for which the event loop has been stuck in one callback; may be read from another thread."""
        return self._lag.silent_s

    @property
    def ended(self) -> bool:
        """Whether it served and has stopped, on request or not."""
        return self._running is not None and self._running.done()

    async def kv_pairs(self) -> list[KvPair]:
        """Return what carries KV between which workers."""
        return list(self.fleet.kv_pairs)

    async def replace_worker(self, address: str, reason: str | None) -> None:
        """Take in a worker that has been started again because of `reason`, or that was not reached before.

        Raises WorkerLost or PairingRefused.
        """
        await self.fleet.replace(address, reason)
        self.fleet_changed()

    async def remove_worker(self, worker_id: str) -> None:
        """Forget a worker that has left for good."""
        await self.fleet.remove(worker_id)
        self.fleet_changed()

    async def unreached(self, for_s: float) -> list[str]:
        """Return the addresses of workers that it has not reached for too long."""
        return list(self.fleet.unreached(for_s))

    async def note_away(self, away: Mapping[str, str]) -> None:
        """Note which workers are lost again and again, and how they are tried again."""
        self.fleet.away = dict(away)

    async def members(self, started_for: dict[str, Pool]) -> Members:
        """Return all workers with their present pools, those of `started_for` included."""
        await self.fleet.refresh()
        return members(self.fleet, started_for)

    async def load(self, window_s: float) -> LatestLoad:
        """Return the requests of the last so many seconds, and what is known of the workers; asks these first."""
        await self.fleet.refresh()
        assert self.comparing is not None
        return self.comparing.load(window_s, self.queues)

    async def drain_worker(self, worker_id: str, timeout_s: float, incarnation: str) -> None:
        """Have a worker leave, whichever it is or only this incarnation. Raises WorkerLost."""
        try:
            worker = self.fleet.get(worker_id)
        except KeyError as error:
            raise WorkerLost(f"the {self.TITLE} has no connection to {worker_id}") from error
        if incarnation not in ("", worker.description.incarnation):
            raise WorkerLost(f"{worker_id} was started again meanwhile")
        await worker.client.drain(timeout_s)
        await self.fleet.refresh()  # from now on, nothing new is sent to it
