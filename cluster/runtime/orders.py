"""Carries out what operators order at a router: more workers, fewer, or all of them started again one by one.

Run by `cluster.runtime.deployment`, beside the supervisor, which watches what is started here. Orders are carried out
one at a time, as they come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from cluster.runtime.handles.actor import DeploymentFailed, NoPlace
from cluster.runtime.handles.heads import HeadHandle
from cluster.runtime.plan import PlacementError
from cluster.runtime.supervisor import Say, Supervisor
from contracts.vocabulary import Pool
from router.front.orders import Order, OrderState

ASK_S = 5.0
"""How long a router is asked for orders at a time."""
RETRY_S = 0.5
LOOK_S = 0.2
"""How often it is looked whether a worker has left."""
BEYOND_TIMEOUT_S = 120.0
"""How long a drain may take, after the running requests' time is up, until nobody needs the worker's KV any more."""


class OrderFailed(Exception):
    """The order, or the rest of it, cannot be carried out; the message says why."""


class OrderingRouter(Protocol):
    """A router, as far as orders go."""

    async def take_orders(self, within_s: float) -> list[Order]: ...
    async def report(self, order_id: str, state: OrderState, sentence: str) -> None: ...


class NewWorker(Protocol):
    """A worker that can be started now."""

    @property
    def name(self) -> str: ...
    async def start(self) -> str:
        """Start it and return its address. Raises NoPlace, PlacementError, DeploymentFailed."""
        ...

    async def retire(self) -> None: ...


class Orders:
    """Takes orders from the routers. `lead` knows the workers' pools: the dispatcher, or the only router."""

    def __init__(
        self,
        routers: Sequence[OrderingRouter],
        lead: HeadHandle,
        supervisor: Supervisor,
        make_worker: Callable[[str, Pool], NewWorker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routers = routers
        self._lead = lead
        self._supervisor = supervisor
        self._make_worker = make_worker
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._say: Say = lambda _: None
        self._next = 0
        """The number of the next worker, at the least."""
        self._taken = 0
        """Orders that have been taken and have not ended."""

    @property
    def under_way(self) -> bool:
        """Whether an order is being carried out, or waits for another one to end."""
        return self._taken > 0

    async def run(self, say: Say) -> None:
        """Take and carry out orders until cancelled."""
        self._say = say
        async with asyncio.TaskGroup() as group:
            for router in self._routers:
                group.create_task(self._attend(router), name="orders")

    async def _attend(self, router: OrderingRouter) -> None:
        while True:
            try:
                orders = await router.take_orders(ASK_S)
            except DeploymentFailed:  # it is being started again
                await asyncio.sleep(RETRY_S)
                continue
            self._taken += len(orders)
            for order in orders:
                async with self._one_at_a_time:
                    await self._carry_out(order)
                self._taken -= 1

    async def _carry_out(self, order: Order) -> None:
        began_s = self._clock()
        try:
            await (self._scale(order) if order.kind == "scale" else self._restart(order))
        except (DeploymentFailed, OrderFailed, PlacementError) as error:
            await self._report(order, "failed", str(error))
        else:
            await self._report(order, "done", f"done after {self._clock() - began_s:.0f} s")

    async def _report(self, order: Order, state: OrderState, sentence: str) -> None:
        self._say(f"order {order.order_id}: {sentence}")
        for router in self._routers:
            with suppress(DeploymentFailed):
                await router.report(order.order_id, state, sentence)

    # --- more and fewer

    async def _scale(self, order: Order) -> None:
        """Start what is missing, then drain what is too much; the other way round if there is no room before."""
        await self._refuse_outdated(order)
        try:
            await self._grow(order)
        except (NoPlace, PlacementError) as error:
            if not await self._shrink(order):
                raise
            await self._report(order, "running", f"there is room now; before, {error}")
            await self._grow(order)
        await self._shrink(order)

    async def _refuse_outdated(self, order: Order) -> None:
        """Raise OrderFailed if a pool has been changed since this was decided."""
        for pool, then in order.decided_at.items():
            if (now := len(await self._members(pool))) != then:
                raise OrderFailed(f"{pool} has {now} workers, and {then} when this was decided: nothing is changed")

    async def _members(self, pool: Pool) -> list[str]:
        """Return the workers of a pool, the newest last."""
        pools = await self._lead.pools()
        members = [name for name in self._supervisor.workers if pools.get(name) == pool]
        return sorted(members, key=_number)

    async def _grow(self, order: Order) -> None:
        missing = {pool: wanted - len(await self._members(pool)) for pool, wanted in order.workers.items()}
        new = [self._make_worker(self._name(), pool) for pool, number in missing.items() for _ in range(number)]
        results = await asyncio.gather(*(self._start(order, worker) for worker in new), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    def _name(self) -> str:
        self._next = max(self._next, 1 + max((_number(name) for name in self._supervisor.workers), default=-1))
        self._next += 1
        return f"worker-{self._next - 1}"

    async def _start(self, order: Order, worker: NewWorker) -> None:
        began_s = self._clock()
        await self._report(order, "running", f"{worker.name}: starting")
        try:
            address = await worker.start()
            await self._supervisor.add(worker, address)  # type: ignore[arg-type]
        except BaseException:
            await worker.retire()
            raise
        await self._report(order, "running", f"{worker.name}: serves after {self._clock() - began_s:.0f} s")

    async def _shrink(self, order: Order) -> bool:
        """Have the newest workers leave that are too many; returns whether there were any."""
        leaving = [name for pool, wanted in order.workers.items() for name in (await self._members(pool))[wanted:]]
        for name in leaving:
            await self._report(order, "running", f"{name}: drains, running requests get {order.timeout_s:.0f} s")
            await self._lead.drain_worker(name, order.timeout_s)
            try:
                async with asyncio.timeout(order.timeout_s + BEYOND_TIMEOUT_S):
                    while name in self._supervisor.workers or name in await self._lead.pools():  # noqa: ASYNC110
                        await asyncio.sleep(LOOK_S)
            except TimeoutError as error:
                raise OrderFailed(f"{name} still has not left; GET /ridgeline/workers says what it holds") from error
            await self._report(order, "running", f"{name}: is gone")
        return bool(leaving)

    # --- all again

    async def _restart(self, order: Order) -> None:
        """Drain each worker and start it again, one after the other."""
        for name in sorted(self._supervisor.workers, key=_number):
            began_s = self._clock()
            await self._report(order, "running", f"{name}: drains, running requests get {order.timeout_s:.0f} s")
            back = self._supervisor.restart_drained(name)
            try:
                await self._lead.drain_worker(name, order.timeout_s)
                await back
            finally:
                self._supervisor.forget_restart(name)
            await self._report(order, "running", f"{name}: serves again after {self._clock() - began_s:.0f} s")


def _number(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
