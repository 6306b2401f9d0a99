"""Watches workers and router and brings back what dies. Run by `cluster.runtime.deployment`, in the driver.

Ray starts a dead actor's process again; what belongs into it, an engine on its cores or the router with its port, is
started from here. A worker comes back as a new incarnation, which the router pairs again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from cluster.config.models import SupervisionConfig
from cluster.runtime.actor_handle import ActorGone, DeploymentFailed, NoPlace, NotReached
from cluster.runtime.restart_budget import RestartBudget
from contracts.vocabulary import Health

POLL_S = 0.5
MAX_INTRODUCTIONS = 10
"""How often a new worker is introduced to a router that does not reach it, half a minute each, before it counts as
broken."""
Say = Callable[[str], None]
T = TypeVar("T")
_WHAT_HAPPENED: dict[Health, str] = {
    "actor_died": "actor process killed",
    "engine_died": "engine process killed",
    "stalled": "its engine has work and makes no step",
    "unreachable": "it does not answer",
    "cut_off": "it answers, but there is no connection between it and the router",
}


class Supervised(Protocol):
    """Something that can be lost and started again."""

    @property
    def name(self) -> str: ...
    async def failure(self, known: Health | None = None) -> Health: ...
    async def end(self) -> None: ...


class SupervisedWorker(Supervised, Protocol):
    """A worker, whichever process runs it."""

    async def start_again(self) -> str: ...
    async def retire(self) -> None: ...


class SupervisedRouter(Supervised, Protocol):
    """The router, whichever process runs it."""

    async def start_again(self, addresses: list[str]) -> None: ...
    async def replace_worker(self, address: str, reason: Health) -> None: ...
    async def remove_worker(self, worker_id: str) -> None: ...
    async def unreached(self, for_s: float) -> list[str]: ...


class Supervisor:
    """Supervises one deployment. `addresses` are those of the running workers, by name."""

    def __init__(
        self,
        workers: Sequence[SupervisedWorker],
        router: SupervisedRouter,
        addresses: dict[str, str],
        settings: SupervisionConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._workers = {worker.name: worker for worker in workers}
        self._router = router
        self._addresses = dict(addresses)
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._router_serves = asyncio.Event()
        self._router_serves.set()
        self._cut_off = {name: asyncio.Event() for name in (router.name, *self._workers)}
        """Set for those that answer here, and to or from whom the router has had no connection for too long."""
        self._say: Say = lambda _: None

    async def run(self, say: Say) -> None:
        """Never return; raise DeploymentFailed once a pool that is needed has no worker left and none is coming."""
        self._say = say
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._mind_router(), name="mind-router")
                for worker in list(self._workers.values()):
                    group.create_task(self._mind(worker), name=f"mind-{worker.name}")
        except* DeploymentFailed as failures:
            raise failures.exceptions[0] from None

    # --- workers

    async def _mind(self, worker: SupervisedWorker) -> None:
        budget = self._budget()
        while True:
            why = await self._until_lost(worker)
            self._addresses.pop(worker.name, None)
            if why == "drained":
                await self._dismiss(worker, f"{worker.name} has drained and is gone")
                return
            self._say(f"{worker.name} is gone ({_WHAT_HAPPENED[why]}); restarting")
            began_s = self._clock()
            if not await self._bring_back(worker, why, budget):
                await self._dismiss(
                    worker,
                    f"{worker.name} was lost more than {self._settings.max_restarts} times within "
                    f"{self._settings.window_s:.0f} s of service and stays away",
                )
                return
            budget.serves()
            self._say(f"{worker.name}: back after {self._clock() - began_s:.0f} s")

    async def _until_lost(self, one: Supervised) -> Health:
        """Ask until it must be replaced or has left; one that dies while it drains has left.

        After the first answer it is asked for news: it answers when there is some, and every few seconds to show that
        it still can. A call that its process does not survive fails at once.
        """
        drains = False
        health: Health | None = None
        while True:
            health = await self._health(one, health)
            if health == "draining" and not drains:
                self._say(f"{one.name} drains")
            drains = drains or health == "draining"
            if health not in ("", "draining"):
                return "drained" if drains else health
            if one is self._router:
                await self._look_who_is_cut_off()
            if self._cut_off[one.name].is_set() and not drains:
                self._cut_off[one.name].clear()
                return "cut_off"
            await self._sleep(POLL_S)

    async def _health(self, one: Supervised, known: Health | None) -> Health:
        """Ask for its health, without waiting for news from one that turns out to be cut off."""
        if self._cut_off[one.name].is_set():
            return await one.failure()
        asking = asyncio.ensure_future(one.failure(known))
        cut_off = asyncio.ensure_future(self._cut_off[one.name].wait())
        try:
            await asyncio.wait((asking, cut_off), return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else known or ""
        finally:
            asking.cancel()
            cut_off.cancel()

    async def _look_who_is_cut_off(self) -> None:
        """Ask the router which workers it does not reach.

        If it reaches none of several, the router is the one that is cut off.
        """
        try:
            addresses = await self._router.unreached(self._settings.unreachable_timeout_s)
        except DeploymentFailed:
            return  # another task watches the router, and restarts it
        names = {name for name, address in self._addresses.items() if address in addresses}
        if len(names) > 1 and len(names) == len(self._addresses):
            names = {self._router.name}
        self._set_cut_off(names)

    def _set_cut_off(self, names: set[str]) -> None:
        for name, cut_off in self._cut_off.items():
            if name in names:
                cut_off.set()
            else:
                cut_off.clear()

    async def _bring_back(self, worker: SupervisedWorker, why: Health, budget: RestartBudget) -> bool:
        """Start the worker until it runs and the router has it; False when it is not to be tried again."""
        while True:
            await worker.end()
            delay_s = budget.next_delay_s()
            if delay_s is None:
                return False
            await self._sleep(delay_s)
            try:
                address = await self._placed(worker, worker.start_again)
                await self._introduce(worker, address, why)
            except DeploymentFailed as error:
                self._say(f"{worker.name} could not be brought back: {error}")
                continue
            return True

    async def _placed(self, one: Supervised, start: Callable[[], Awaitable[T]]) -> T:
        """Start the worker as soon as there is a place for it: having none, after its node was lost, is no crash."""
        reported = False
        while True:
            try:
                return await start()
            except NoPlace as error:
                if not reported:
                    self._say(f"{one.name} waits for a node: {error}")
                reported = True
                await self._sleep(POLL_S)

    async def _introduce(self, worker: SupervisedWorker, address: str, why: Health) -> None:
        """Enter its address and have the router take it in. Raises DeploymentFailed if the router refuses.

        The address comes first: a router that is gone may be waiting for one to start again with, and one that gets an
        address twice is not harmed. A worker that is lost meanwhile must not be what the router starts with again and
        again: its supervision starts it anew. One that the router does not reach in time is kept, for its engine
        took long to load and the router may just have much to do.
        """
        failed = 0
        while True:
            self._addresses[worker.name] = address
            if self._router_serves.is_set():
                try:
                    await self._router.replace_worker(address, why)
                    return
                except ActorGone:
                    pass  # the one that follows may have started before this address was there
                except DeploymentFailed as error:
                    del self._addresses[worker.name]
                    failed += 1
                    if not isinstance(error, NotReached) or failed == MAX_INTRODUCTIONS:
                        raise
                    if failed == 1:
                        self._say(f"{worker.name} runs, and is introduced to the router until it reaches it: {error}")
            await self._sleep(POLL_S)
            if await worker.failure() not in ("", "draining"):
                return

    async def _dismiss(self, worker: SupervisedWorker, sentence: str) -> None:
        """Take note that a worker is gone for good. Raises DeploymentFailed if nothing can be served without it."""
        del self._workers[worker.name]
        self._say(sentence)
        await worker.retire()
        if not self._workers:  # else any other worker can serve whole requests
            raise DeploymentFailed(f"{sentence}; it was the last worker")
        await self._tell_router(partial(self._router.remove_worker, worker.name))

    async def _tell_router(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Tell the router as soon as there is one; telling it twice does no harm.

        Raises DeploymentFailed if it refuses.
        """
        while True:
            await self._router_serves.wait()
            try:
                await tell()
                return
            except ActorGone:
                await self._sleep(POLL_S)

    # --- router

    async def _mind_router(self) -> None:
        budget = self._budget()
        while True:
            why = await self._until_lost(self._router)
            self._router_serves.clear()
            self._say(f"{self._router.name} is gone ({_WHAT_HAPPENED[why]}); restarting")
            began_s = self._clock()
            await self._router_back(budget)
            budget.serves()
            self._set_cut_off(set())
            self._router_serves.set()
            self._say(f"{self._router.name}: back after {self._clock() - began_s:.0f} s")

    async def _router_back(self, budget: RestartBudget) -> None:
        while True:
            await self._router.end()
            delay_s = budget.next_delay_s()
            if delay_s is None:
                raise DeploymentFailed(
                    f"the router was lost more than {self._settings.max_restarts} times within "
                    f"{self._settings.window_s:.0f} s of service"
                )
            await self._sleep(delay_s)
            try:
                await self._placed(self._router, self._router_again)
                return
            except DeploymentFailed as error:
                self._say(f"{self._router.name} could not be brought back: {error}")

    async def _router_again(self) -> None:
        await self._router.start_again(await self._first_addresses())

    async def _first_addresses(self) -> list[str]:
        """Wait until there is a worker, and return the addresses of all there are.

        If none comes back, `_dismiss` ends the deployment.
        """
        while not (there := [self._addresses[name] for name in self._workers if name in self._addresses]):
            await self._sleep(POLL_S)
        return there

    def _budget(self) -> RestartBudget:
        return RestartBudget(self._settings.max_restarts, self._settings.window_s, self._clock)
