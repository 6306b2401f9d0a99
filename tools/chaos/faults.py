"""Injects faults into the processes of a deployment, one after the other in each pool, in a seeded order.

It takes down at most one worker of a pool: the next fault waits until the pool is whole again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from tests.engines.serve_process import alive
from tools.chaos.deployment import Deployment, Member, cut_connections
from tools.chaos.drive import is_set_within

WEIGHTS: Final = {
    "kill actor": 3,
    "kill engine": 3,
    "pause actor": 2,
    "pause engine": 3,
    "wedge actor": 1,
    "wedge engine": 1,
    "cut router": 2,
    "cut KV": 2,
}
"""Kinds of faults and how often each is drawn."""
SHORTEST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 8.0
WHOLE_WITHIN_S: Final = 180.0
"""Time for a pool to be whole again, after which it is a violation; a start takes 10 to 60 s."""
GONE_WITHIN_S: Final = 20.0
"""Time for a wedged process to end after it has been replaced."""

Say = Callable[[str], None]


@dataclass
class Fault:
    """One fault and its consequences."""

    kind: str
    pool: str
    worker_id: str
    at_s: float
    """Time of the fault on the monotonic clock."""
    pause_s: float = 0.0
    whole_after_s: float | None = None
    """Seconds until the pool had all its workers again; None: not within the limit."""
    replaced: bool = False
    """Whether another process took over. A worker that was only paused may continue instead."""

    @property
    def kills(self) -> bool:
        """Whether requests on that worker had to continue elsewhere."""
        return self.kind.startswith(("kill", "wedge"))


class Injector:
    """Injects faults until `stop`, then finishes those in progress, so that nothing stays paused."""

    def __init__(
        self, deployment: Deployment, sizes: dict[str, int], kinds: Sequence[str], seed: int, mean_gap_s: float
    ) -> None:
        self._deployment = deployment
        self._sizes = sizes
        self._kinds = list(kinds)
        self._seed = seed
        self._mean_gap_s = mean_gap_s
        self._stopped = asyncio.Event()
        self.faults: list[Fault] = []
        self.violations: list[str] = []

    def stop(self) -> None:
        """Start no new fault from now on."""
        self._stopped.set()

    async def run(self, say: Say) -> None:
        """Inject faults; return once every pool is whole after its last one."""
        if not self._kinds:
            await self._stopped.wait()
            return
        async with asyncio.TaskGroup() as group:
            for pool in self._sizes:
                group.create_task(self._pool(pool, say))

    async def _pool(self, pool: str, say: Say) -> None:
        rng = random.Random(f"{self._seed}/{pool}")
        while not await is_set_within(self._stopped, rng.uniform(0.3, 1.7) * self._mean_gap_s):
            kind = rng.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]
            number, pause_s = rng.random(), rng.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
            victims = [member for member in await self._deployment.members(pool) if member.whole]
            if not victims:
                self.violations.append(f"no whole worker was left in pool {pool}: no more faults there")
                return
            fault = await self._one(kind, victims[int(number * len(victims))], pause_s)
            whole = "NOT WHOLE AGAIN" if fault.whole_after_s is None else f"whole after {fault.whole_after_s:.1f} s"
            say(f"{fault.kind} {fault.worker_id}{f' for {pause_s:.1f} s' if fault.pause_s else ''}: {whole}")
            if fault.whole_after_s is None:
                self.violations.append(f"pool {pool} was not whole {WHOLE_WITHIN_S:.0f} s after {fault.kind}")
                return

    async def _one(self, kind: str, victim: Member, pause_s: float) -> Fault:
        fault = Fault(kind, victim.pool, victim.worker_id, time.monotonic())
        self.faults.append(fault)
        what, _, whom = kind.partition(" ")
        if what == "cut":
            ports = [victim.address] if whom == "router" else victim.description.transfer_addresses
            for address in ports:
                await asyncio.to_thread(cut_connections, int(address.rpartition(":")[2]))
            await self._wait_whole(fault, frozenset())
            return fault
        target = victim.actor if whom == "actor" else victim.engine()
        if target is None or not alive(target):
            await self._wait_whole(fault, frozenset())
            return fault
        try:
            await self._hit(fault, what, target, pause_s)
        finally:
            _let_go(target)
        fault.replaced = not alive(target)
        return fault

    async def _hit(self, fault: Fault, what: str, target: psutil.Process, pause_s: float) -> None:
        gone = frozenset({target.pid})
        if what == "kill":
            target.kill()
            await self._wait_whole(fault, gone)
        elif what == "pause":
            fault.pause_s = pause_s
            target.suspend()
            await asyncio.sleep(pause_s)
            _let_go(target)
            await self._wait_whole(fault, frozenset())
        else:
            target.suspend()
            await self._wait_whole(fault, gone)
            if fault.whole_after_s is not None and not await _ends(target, GONE_WITHIN_S):
                self.violations.append(f"process {target.pid} of {fault.worker_id} was replaced and is still there")

    async def _wait_whole(self, fault: Fault, without: frozenset[int]) -> None:
        size = self._sizes[fault.pool]
        if await self._deployment.wait_full(fault.pool, size, WHOLE_WITHIN_S, without):
            fault.whole_after_s = time.monotonic() - fault.at_s


def _let_go(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.resume()


async def _ends(process: psutil.Process, within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while alive(process) and time.monotonic() < deadline_s:  # noqa: ASYNC110 - no event for another's child
        await asyncio.sleep(0.2)
    return not alive(process)
