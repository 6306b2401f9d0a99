"""Watches workers, routers and the dispatcher, and brings back what dies.

Run by `cluster.runtime.deployment`, in the driver.

What an actor runs, an engine on its cores or a router with its port, is started anew from here, in the same actor if
that has outlived it; Ray starts a dead actor again. A worker comes back as a new incarnation, which the router pairs
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, Protocol, TypeVar

from cluster.config.models import SupervisionConfig
from cluster.runtime.handles.actor import ActorGone, DeploymentFailed, NoPlace, NotReached
from cluster.runtime.restart_budget import RestartBudget
from contracts.vocabulary import Health, RestartReason

POLL_S = 0.5
MAX_INTRODUCTIONS = 10
"""How often a new worker is introduced to a router that does not reach it, half a minute each, before it counts as
broken."""
Say = Callable[[str], None]
T = TypeVar("T")
_WHAT_HAPPENED: dict[RestartReason, str] = {
    "ordered": "drained, to be started again",
    "actor_died": "its process ended",
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


class SupervisedHead(Supervised, Protocol):
    """A router or the dispatcher, whichever process runs it; all of them know all workers."""

    @property
    def kind(self) -> Literal["router", "dispatcher"]: ...
    async def start_again(self, addresses: list[str]) -> None: ...
    async def replace_worker(self, address: str, reason: RestartReason) -> None: ...
    async def remove_worker(self, worker_id: str) -> None: ...
    async def unreached(self, for_s: float) -> list[str]: ...


class Supervisor:
    """Supervises one deployment."""

    def __init__(
        self,
        workers: Sequence[SupervisedWorker],
        heads: Sequence[SupervisedHead],
        addresses: dict[str, str],
        settings: SupervisionConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`heads` are told of a worker in their order; `addresses` are those of the running workers, by name."""
        self._workers = {worker.name: worker for worker in workers}
        self._heads = {head.name: head for head in heads}
        self._addresses = dict(addresses)
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._serves = {name: asyncio.Event() for name in self._heads}
        """By head, set while it serves."""
        for serves in self._serves.values():
            serves.set()
        self._cut_off = {name: asyncio.Event() for name in (*self._heads, *self._workers)}
        """Set for those that answer here, and to or from whom a head has had no connection for too long."""
        self._unreached: dict[str, set[str]] = {}
        """By head, the names of those that it makes out to be cut off."""
        self._say: Say = lambda _: None
        self._group: asyncio.TaskGroup | None = None
        self._restarts: dict[str, asyncio.Future[None]] = {}
        """Workers that an operator wants started again once they have drained; done when they serve again."""

    @property
    def workers(self) -> list[str]:
        """The names of all workers that have not left for good."""
        return list(self._workers)

    async def add(self, worker: SupervisedWorker, address: str) -> None:
        """Introduce a worker that was started now, and supervise it from then on. Raises DeploymentFailed."""
        assert self._group is not None
        self._workers[worker.name] = worker
        self._cut_off[worker.name] = asyncio.Event()
        try:
            await self._introduce(worker, address, "ordered")
        except DeploymentFailed:
            del self._workers[worker.name], self._cut_off[worker.name]
            raise
        self._group.create_task(self._mind(worker), name=f"mind-{worker.name}")

    def restart_drained(self, name: str) -> asyncio.Future[None]:
        """Have a worker that is about to drain started again instead of dismissed.

        The result is there when it serves again, or an exception: DeploymentFailed.
        """
        self._restarts[name] = asyncio.get_running_loop().create_future()
        return self._restarts[name]

    def forget_restart(self, name: str) -> None:
        """Dismiss the worker when it has drained, as usual."""
        self._restarts.pop(name, None)

    async def run(self, say: Say) -> None:
        """Never return; raise DeploymentFailed once a pool that is needed has no worker left and none is coming."""
        self._say = say
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for head in list(self._heads.values()):
                    group.create_task(self._mind_head(head), name=f"mind-{head.name}")
                for worker in list(self._workers.values()):
                    group.create_task(self._mind(worker), name=f"mind-{worker.name}")
        except* DeploymentFailed as failures:
            raise failures.exceptions[0] from None

    # --- workers

    async def _mind(self, worker: SupervisedWorker) -> None:
        budget = self._budget()
        while True:
            health = await self._until_lost(worker)
            self._addresses.pop(worker.name, None)
            ordered = self._restarts.get(worker.name)
            if health == "drained" and ordered is None:
                await self._dismiss(worker, f"{worker.name} has drained and is gone")
                return
            why: RestartReason = "ordered" if health == "drained" else health
            self._say(f"{worker.name} is gone ({_WHAT_HAPPENED[why]}); restarting")
            began_s = self._clock()
            if not await self._bring_back(worker, why, budget):
                self._tell_who_ordered(worker.name, DeploymentFailed(f"{worker.name} could not be started again"))
                await self._dismiss(
                    worker,
                    f"{worker.name} was lost more than {self._settings.max_restarts} times within "
                    f"{self._settings.window_s:.0f} s of service and stays away",
                )
                return
            budget.serves()
            self._say(f"{worker.name}: back after {self._clock() - began_s:.0f} s")
            self._tell_who_ordered(worker.name, None)

    def _tell_who_ordered(self, name: str, error: DeploymentFailed | None) -> None:
        ordered = self._restarts.pop(name, None)
        if ordered is None or ordered.done():
            return
        if error is None:
            ordered.set_result(None)
        else:
            ordered.set_exception(error)

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
            if one.name in self._heads:
                await self._look_who_is_cut_off(self._heads[one.name])
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

    async def _look_who_is_cut_off(self, head: SupervisedHead) -> None:
        """Ask a head which workers it does not reach.

        If it reaches none of several, the head is the one that is cut off.
        """
        try:
            addresses = await head.unreached(self._settings.unreachable_timeout_s)
        except DeploymentFailed:
            return  # another task watches it, and restarts it
        names = {name for name, address in self._addresses.items() if address in addresses}
        if len(names) > 1 and len(names) == len(self._addresses):
            names = {head.name}
        self._unreached[head.name] = names
        self._set_cut_off(set().union(*self._unreached.values()))

    def _set_cut_off(self, names: set[str]) -> None:
        for name, cut_off in self._cut_off.items():
            if name in names:
                cut_off.set()
            else:
                cut_off.clear()

    async def _bring_back(self, worker: SupervisedWorker, why: RestartReason, budget: RestartBudget) -> bool:
        """Start the worker until it runs and all heads have it; False when it is not to be tried again."""
        free = why == "ordered"  # what an operator wants does not count as a loss
        while True:
            await worker.end()
            delay_s, free = 0.0 if free else budget.next_delay_s(), False
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

    async def _introduce(self, worker: SupervisedWorker, address: str, why: RestartReason) -> None:
        """Enter its address and have every head take it in. Raises DeploymentFailed if one refuses.

        The address comes first: a head that is gone may be waiting for one to start again with, and one that gets an
        address twice is not harmed. A worker that is lost meanwhile must not be what a head starts with again and
        again: its supervision starts it anew. One that is not reached in time is kept, for its engine took long to load
        and the head may just have much to do.
        """
        failed = 0
        pending = list(self._heads)
        while True:
            self._addresses[worker.name] = address
            try:
                await self._introduce_to(pending, address, why)
            except NotReached as error:
                failed += 1
                del self._addresses[worker.name]
                if failed == MAX_INTRODUCTIONS:
                    raise
                if failed == 1:
                    self._say(f"{worker.name} runs, and is introduced until it is reached: {error}")
            except DeploymentFailed:
                del self._addresses[worker.name]
                raise
            if not pending:
                return
            await self._sleep(POLL_S)
            if await worker.failure() not in ("", "draining"):
                return

    async def _introduce_to(self, pending: list[str], address: str, why: RestartReason) -> None:
        """Introduce a worker to those of the pending heads that serve, and drop them. Raises DeploymentFailed."""
        for name in tuple(pending):
            if name not in self._heads:  # dismissed meanwhile
                pending.remove(name)
            elif self._serves[name].is_set():
                with suppress(ActorGone):  # the one that follows may have started before this address was there
                    await self._heads[name].replace_worker(address, why)
                    pending.remove(name)

    async def _dismiss(self, worker: SupervisedWorker, sentence: str) -> None:
        """Take note that a worker is gone for good. Raises DeploymentFailed if nothing can be served without it."""
        del self._workers[worker.name]
        self._say(sentence)
        await worker.retire()
        if not self._workers:  # else any other worker can serve whole requests
            raise DeploymentFailed(f"{sentence}; it was the last worker")
        for head in list(self._heads.values()):
            await self._tell(head, partial(head.remove_worker, worker.name))

    async def _tell(self, head: SupervisedHead, tell: Callable[[], Awaitable[None]]) -> None:
        """Tell a head as soon as it serves; telling it twice does no harm. Raises DeploymentFailed if it refuses."""
        while head.name in self._heads:
            if self._serves[head.name].is_set():
                try:
                    await tell()
                    return
                except ActorGone:
                    pass
            await self._sleep(POLL_S)

    # --- heads

    async def _mind_head(self, head: SupervisedHead) -> None:
        budget = self._budget()
        while True:
            why = await self._until_lost(head)
            self._serves[head.name].clear()
            self._say(f"{head.name} is gone ({_WHAT_HAPPENED[why]}); restarting")
            began_s = self._clock()
            if not await self._head_back(head, budget):
                return
            budget.serves()
            self._unreached.pop(head.name, None)
            self._set_cut_off(set().union(*self._unreached.values()))
            self._serves[head.name].set()
            self._say(f"{head.name}: back after {self._clock() - began_s:.0f} s")

    async def _head_back(self, head: SupervisedHead, budget: RestartBudget) -> bool:
        """Start it until it serves; False when it stays away. Raises DeploymentFailed if nobody can take its place."""
        while True:
            await head.end()
            delay_s = budget.next_delay_s()
            if delay_s is None:
                self._do_without(head)
                return False
            await self._sleep(delay_s)
            try:
                await self._placed(head, partial(self._head_again, head))
                return True
            except DeploymentFailed as error:
                self._say(f"{head.name} could not be brought back: {error}")

    def _do_without(self, head: SupervisedHead) -> None:
        sentence = (
            f"{head.name} was lost more than {self._settings.max_restarts} times within "
            f"{self._settings.window_s:.0f} s of service"
        )
        del self._heads[head.name]
        self._unreached.pop(head.name, None)
        if not any(other.kind == head.kind for other in self._heads.values()):
            raise DeploymentFailed(sentence)
        self._say(f"{sentence} and stays away")

    async def _head_again(self, head: SupervisedHead) -> None:
        await head.start_again(await self._first_addresses())

    async def _first_addresses(self) -> list[str]:
        """Wait until there is a worker, and return the addresses of all there are.

        If none comes back, `_dismiss` ends the deployment.
        """
        while not (there := [self._addresses[name] for name in self._workers if name in self._addresses]):
            await self._sleep(POLL_S)
        return there

    def _budget(self) -> RestartBudget:
        return RestartBudget(self._settings.max_restarts, self._settings.window_s, self._clock)
