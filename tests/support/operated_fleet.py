"""A fleet for operators' operations whose workers are none."""

import asyncio
from collections import Counter

from ridgeline.cluster.runtime.handles.actor import ActorGone, DeploymentFailed, NoPlace, NotReached
from ridgeline.router.router_control import Member, Members


class OperatedFleet:
    """The supervisor and the leading router in one: which workers there are."""

    def __init__(self, **pools):
        self.pool_of = {f"worker-{number}": pool for number, pool in enumerate(pools.get("start", ()))}
        self.mode = "disaggregated"
        self.log = []
        self.room = 9
        self.refuses = None
        self.restarts = {}
        self.lost, self.unusable, self.draining, self.partitioned = set(), set(), set(), set()
        self.may_start, self.may_leave = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_leave.set()
        self.away = 0
        """So many questions to the leading router fail."""
        self.incarnations = Counter()
        self.lost_answers = 0
        """So many answers to `drain_worker` do not arrive, and nobody asks again before the worker has drained."""

    @property
    def workers(self):
        return list(self.pool_of)

    @property
    def started_for(self):
        return dict(self.pool_of)

    @property
    def come_back(self):
        return set(self.restarts)

    async def members(self, started_for):
        self._refuse()
        bad = self.lost | self.unusable | self.draining | self.partitioned
        there = self.pool_of.items()
        now = self.incarnations
        return Members(
            self.mode,
            {name: Member(pool, name not in bad, name in self.draining, str(now[name])) for name, pool in there},
        )

    async def drain_worker(self, name, timeout_s, incarnation):
        self._refuse()
        if (
            name in self.partitioned
            or name not in self.pool_of
            or incarnation not in ("", str(self.incarnations[name]))
        ):
            raise NotReached(f"router could not drain_worker: WorkerLost: {name}")
        self.log.append(f"drain {name} {timeout_s:g}")
        if name in self.draining:  # a drain that has begun is not begun again
            return
        self.draining.add(name)
        leaving = asyncio.get_running_loop().create_task(self._leave(name))
        if self.lost_answers:
            self.lost_answers -= 1
            await leaving
            raise DeploymentFailed("router did not finish drain_worker within 20 s")

    async def _leave(self, name):
        await self.may_leave.wait()
        self.draining.discard(name)
        if name in self.restarts:
            self.incarnations[name] += 1
            back = self.restarts.pop(name)
            if not back.done():
                back.set_result(None)
        else:
            del self.pool_of[name]
            self.room += 1

    def _refuse(self):
        if self.away:
            self.away -= 1
            raise ActorGone("router ended")

    async def dismiss(self, name):
        self.log.append(f"dismiss {name}")
        del self.pool_of[name]

    async def add(self, worker, address):
        if self.refuses:
            raise DeploymentFailed(self.refuses)
        self.pool_of[worker.name] = worker.pool
        self.log.append(f"add {address}")

    def restart_drained(self, name):
        self.restarts[name] = asyncio.get_running_loop().create_future()
        return self.restarts[name]

    async def take_back_restart(self, name):
        if name in self.draining or name in self.lost:
            return False
        self.restarts.pop(name, None)
        return True

    def let_leave(self, name):
        self.restarts.pop(name, None)


class OperatedWorker:
    def __init__(self, fleet, name, pool):
        self.fleet, self.name, self.pool = fleet, name, pool

    async def start(self):
        await self.fleet.may_start.wait()
        if not self.fleet.room:
            raise NoPlace(f"Ray found no place for {self.name}")
        self.fleet.room -= 1
        return f"{self.name}:1"

    async def retire(self):
        self.fleet.log.append(f"retire {self.name}")
