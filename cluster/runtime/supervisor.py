"""Watches workers, routers and the dispatcher, and brings back what dies.

It runs in the driver.

What an actor runs, an engine on its cores or a router with its port, is started anew from here, in the same actor if
that has outlived it; Ray starts a dead actor again. A worker comes back as a new incarnation, which the router pairs
again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ridgeline.cluster.config.models import SupervisionConfig
from ridgeline.cluster.runtime.handles.actor import ActorHandle, DeploymentFailed, NoPlace
from ridgeline.cluster.runtime.handles.routing import Routing
from ridgeline.cluster.runtime.handles.worker import WorkerHandle
from ridgeline.cluster.runtime.registration import Registration
from ridgeline.contracts.vocabulary import Health, Pool, RestartReason

POLL_S = 0.5
LOOK_S = 1.0
"""How often everybody is asked how it is. The routers themselves see at once that a worker has ended."""
LONGEST_ROUTER_REST_S = 30.0
"""Nothing is served while all routers or the dispatcher are away, and to start one takes seconds."""
FORGOTTEN_WITHIN_S = 2.0
"""How long a worker that has drained still lives for others to let go of its KV cache: a few steps of theirs."""
FIRST_REST_S = 30.0
WINDOW_S = 300.0
"""Of service, in which `supervision.max_restarts` are counted."""
LONGEST_REST_S = 300.0
"""Something that cannot run is tried again every five minutes at the least, as Kubernetes restarts a container that
crashes in a loop (CrashLoopBackOff): seldom enough to harm nobody, and soon enough after its cause is gone."""

ENOUGH_RESTS = 8
"""After fewer, the longest one is reached."""
SEVERAL = 2
"""One worker that only one router does not reach may be either's fault; so many are that router's."""
Say = Callable[[str], None]
T = TypeVar("T")
_WHAT_HAPPENED: dict[RestartReason, str] = {
    "ordered": "drained, to be started again",
    "actor_died": "its process ended",
    "engine_died": "its engine process ended",
    "stalled": "its engine has work and makes no step",
    "unreachable": "it does not answer",
    "cut_off": "it answers, but there is no connection between it and the router",
}


@dataclass(frozen=True)
class Partitions:
    """Who is partitioned, and who is only suspected."""

    workers: frozenset[str] = frozenset()
    """Those that most of the routers do not reach."""
    deaf: frozenset[str] = frozenset()
    """Routers that reach none of several workers."""
    suspects: frozenset[str] = frozenset()
    """Routers that do not reach several workers which most of the others do. They serve with those that they reach: to
    start such a router again would end its streams and mend no route."""


def judge(unreached: Mapping[str, set[str]], workers: Collection[str]) -> Partitions:
    """Judge by the workers that each router does not reach; `unreached` has the routers that have answered."""
    several = len(workers) >= SEVERAL
    deaf = frozenset(router for router, names in unreached.items() if several and names.issuperset(workers))
    votes = {router: names for router, names in unreached.items() if router not in deaf}
    misses = {worker: sum(worker in names for names in votes.values()) for worker in workers}
    partitioned = frozenset(worker for worker, number in misses.items() if 2 * number > len(votes))
    suspects = frozenset(router for router, names in votes.items() if len(names - partitioned) >= SEVERAL)
    return Partitions(partitioned, deaf, suspects)


class RestartBudget:
    """When one worker or router may be started again; it serves when this is made.

    Time counts only while it serves: one that takes minutes to start and dies at its first request dies as often within
    the window as one that starts at once.
    """

    def __init__(
        self,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        longest_rest_s: float = LONGEST_REST_S,
    ) -> None:
        self._longest_rest_s = longest_rest_s
        self._max_restarts = max_restarts
        self._clock = clock
        self._starts_s: deque[float] = deque(maxlen=max_restarts + ENOUGH_RESTS)
        """By the time it had served before each."""
        self._served_s = 0.0
        self._serves_since_s: float | None = clock()

    def serves(self) -> None:
        """Note that the worker serves again."""
        self._serves_since_s = self._clock()

    @property
    def used_up(self) -> bool:
        """Whether it was lost, or could not start, more often of late than `max_restarts`."""
        return len(self._starts_s) > self._max_restarts

    def next_delay_s(self) -> float:
        """Note that the worker is lost, or could not start, and return how long to wait before the next start.

        0, 1, 2, 4, ... seconds; once it is used up, 30 s, 1 min, ... up to `longest_rest_s`.
        """
        if self._serves_since_s is not None:
            self._served_s += self._clock() - self._serves_since_s
            self._serves_since_s = None
        now_s = self._served_s
        while self._starts_s and now_s - self._starts_s[0] >= WINDOW_S:
            self._starts_s.popleft()
        already = len(self._starts_s)
        self._starts_s.append(now_s)
        if already >= self._max_restarts:
            return min(FIRST_REST_S * 2.0 ** (already - self._max_restarts), self._longest_rest_s)
        return 0.0 if already == 0 else min(2.0 ** (already - 1), FIRST_REST_S)


class Supervisor:
    """Supervises one deployment."""

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        routers: Sequence[Routing],
        addresses: dict[str, str],
        settings: SupervisionConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`routers` are told of a worker in their order; `addresses` are those of the running workers, by name."""
        self._workers = {worker.name: worker for worker in workers}
        self._routers = {router.name: router for router in routers}
        self._addresses = dict(addresses)
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._serves = {name: asyncio.Event() for name in self._routers}
        """By router, set while it serves."""
        for serves in self._serves.values():
            serves.set()
        self._cut_off = ""
        """Who answers here, and has had no connection to a router for too long: of several, whose turn it is."""
        self._unreached: dict[str, set[str]] = {}
        """By router that answers, the names of those that it does not reach."""
        self._suspects: frozenset[str] = frozenset()
        self._mending = ""
        """Who is being started again because it was partitioned: one at a time, since that mends no route."""
        self._mended_s: dict[str, float] = {}
        """When each was chosen for that the last time."""
        self._registered: dict[str, list[asyncio.Task[None]]] = {}
        """By worker, what makes it known to routers that do not have it yet."""
        self._away: dict[str, str] = {}
        """Those that are lost again and again, and how they are tried again."""
        self._told_away: dict[str, dict[str, str]] = {}
        """By router, what it was told of them."""
        self._on_away: Callable[[Mapping[str, str]], None] = lambda _: None
        self._say: Say = lambda _: None
        self._group: asyncio.TaskGroup
        self._restarts: dict[str, asyncio.Future[None]] = {}
        """Workers that an operator wants started again once they have drained; done when they serve again."""
        self._returning: set[str] = set()
        """Workers that were lost, or have drained, and do not serve again yet."""
        self._minding: dict[str, asyncio.Task[None]] = {}
        """By worker, what watches it."""

    @property
    def workers(self) -> list[str]:
        """The names of all workers that have not left for good."""
        return list(self._workers)

    @property
    def started_for(self) -> dict[str, Pool]:
        """The pool for which each of them was started."""
        return {name: worker.pool for name, worker in self._workers.items()}

    @property
    def lost(self) -> set[str]:
        """Those that do not run at the moment: they are started again, or wait for a node."""
        return set(self._workers) - set(self._addresses)

    @property
    def come_back(self) -> set[str]:
        """Those that are started again once they have drained."""
        return set(self._restarts)

    async def add(self, worker: WorkerHandle, address: str) -> None:
        """Register a worker that was started now, and supervise it from then on. Raises DeploymentFailed."""
        self._workers[worker.name] = worker
        try:
            await self._register(worker, address, "ordered")
        except BaseException:  # also when the operation is given up meanwhile
            self._forget(worker.name)
            raise
        self._watch(worker)

    def _watch(self, worker: WorkerHandle) -> None:
        worker.tell = self._say
        self._minding[worker.name] = self._group.create_task(self._mind(worker), name=f"mind-{worker.name}")

    async def dismiss(self, name: str) -> None:
        """Give up a worker that is lost or that nobody reaches, for good and without a drain.

        Raises DeploymentFailed if it was the last one. Once begun, it is done also if the caller is cancelled.
        """
        if (minding := self._minding.pop(name, None)) is None:  # it has left meanwhile
            return
        minding.cancel()
        leaves = self._dismiss(self._workers[name], f"{name} was given up, as ordered, and is not started again")
        await asyncio.shield(self._group.create_task(leaves, name=f"dismiss-{name}"))

    def restart_drained(self, name: str) -> asyncio.Future[None]:
        """Have a worker that is about to drain started again instead of dismissed.

        The result is there when it serves again, or an exception: DeploymentFailed.
        """
        self._restarts[name] = asyncio.get_running_loop().create_future()
        return self._restarts[name]

    async def take_back_restart(self, name: str) -> bool:
        """Have a worker leave if it drains later; False if it drains already or is being started again."""
        worker = self._workers.get(name)
        if worker is not None and (name in self._returning or await worker.failure() != "" or name in self._returning):
            return False
        self._restarts.pop(name, None)
        return True

    def let_leave(self, name: str) -> None:
        """Have a worker leave once it has drained, also if it should have been started again then."""
        self._restarts.pop(name, None)

    async def run(self, say: Say, on_away: Callable[[Mapping[str, str]], None] = lambda _: None) -> None:
        """Never return; raise DeploymentFailed once the last worker has left on purpose.

        `on_away` is told of those that are lost again and again, and of how they are tried again, by name.
        """
        self._say, self._on_away = say, on_away
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for router in list(self._routers.values()):
                    group.create_task(self._mind_router(router), name=f"mind-{router.name}")
                for worker in list(self._workers.values()):
                    self._watch(worker)
        except* DeploymentFailed as failures:
            raise failures.exceptions[0] from None

    # --- workers

    async def _mind(self, worker: WorkerHandle) -> None:
        budget = RestartBudget(self._settings.max_restarts, self._clock)
        while True:
            health = await self._until_lost(worker)
            self._returning.add(worker.name)
            self._not_there(worker.name)
            ordered = self._restarts.get(worker.name)
            if health == "drained" and ordered is None:
                await self._dismiss(worker, f"{worker.name} has drained and is gone")
                return
            why: RestartReason = "ordered" if health == "drained" else health
            self._say(f"{worker.name} is gone ({await self._what_happened(worker, why)}); restarting")
            began_s = self._clock()
            await self._bring_back(worker, why, budget)
            budget.serves()
            self._is_back(worker.name)
            self._say(f"{worker.name}: back after {self._clock() - began_s:.0f} s")
            self._tell_who_ordered(worker.name, None)

    async def _what_happened(self, worker: WorkerHandle, why: RestartReason) -> str:
        ending = await worker.ending() if why == "engine_died" else ""
        return ending or _WHAT_HAPPENED[why]

    def _tell_who_ordered(self, name: str, error: DeploymentFailed | None) -> None:
        ordered = self._restarts.pop(name, None)
        if ordered is None or ordered.done():
            return
        if error is None:
            ordered.set_result(None)
        else:
            ordered.set_exception(error)

    async def _until_lost(self, one: ActorHandle) -> Health:
        """Ask until it must be replaced or has left; one that dies while it drains has left."""
        drains = False
        while True:
            health = await one.failure()
            if health == "draining" and not drains:
                self._say(f"{one.name} drains")
            drains = drains or health == "draining"
            if health not in ("", "draining"):
                return "drained" if drains else health
            if one.name in self._routers:
                await self._look_who_is_partitioned(self._routers[one.name])
            if one.name == self._cut_off:
                self._cut_off = ""
                self._mended_s[one.name] = self._clock()
                if not drains:
                    self._mending = one.name
                    return "cut_off"
            await self._sleep(LOOK_S)

    async def _look_who_is_partitioned(self, router: Routing) -> None:
        """Ask a router which workers it does not reach, and judge by what all routers have said."""
        try:
            addresses = await router.unreached(self._settings.unreachable_timeout_s)
            if self._told_away.get(router.name, {}) != self._away:
                away = dict(self._away)
                await router.note_away(away)
                self._told_away[router.name] = away
        except DeploymentFailed:
            self._has_no_vote(router.name)
            return  # another task watches it, and restarts it
        self._unreached[router.name] = {name for name, address in self._addresses.items() if address in addresses}
        self._judge()

    def _has_no_vote(self, router: str) -> None:
        self._unreached.pop(router, None)
        self._judge()

    def _judge(self) -> None:
        """Note who is partitioned: of several, one at a time is to be started again, and each has its turn."""
        verdict = judge(self._unreached, self._addresses)
        self._tell_suspects(verdict)
        names = () if self._mends() else verdict.workers | verdict.deaf
        self._cut_off = min(names, key=lambda name: (self._mended_s.get(name, 0.0), name), default="")

    def _mends(self) -> bool:
        """Whether one that was partitioned is being started again.

        One that takes longer than a start may is not waited for by the others.
        """
        since_s = self._mended_s.get(self._mending, 0.0)
        return bool(self._mending) and self._clock() - since_s < self._settings.start_timeout_s

    def _mended(self, name: str) -> None:
        if self._mending == name:
            self._mending = ""

    def _tell_suspects(self, verdict: Partitions) -> None:
        for name in sorted(verdict.suspects - self._suspects):
            missed = ", ".join(sorted(self._unreached[name] - verdict.workers))
            self._say(f"{name} does not reach {missed}, which others do: look at its network. It serves with the rest")
        for name in sorted(self._suspects & self._unreached.keys() - verdict.suspects):
            self._say(f"{name} reaches what the others reach again")
        self._suspects = verdict.suspects

    async def _bring_back(self, worker: WorkerHandle, why: RestartReason, budget: RestartBudget) -> None:
        """Start the worker until it runs and can be given work."""
        free = why == "ordered"  # what an operator wants does not count as a loss
        while True:
            await worker.end()
            await self._rest(worker.name, budget, free=free)
            free = False
            try:
                address = await self._placed(worker, worker.start_again)
                lost = await self._register(worker, address, why)
            except DeploymentFailed as error:
                self._say(f"{worker.name} could not be brought back: {error}")
                continue
            if lost in ("", "drained"):  # the latter on its own: its supervision finds that
                return
            why = lost
            what = await self._what_happened(worker, why)
            self._say(f"{worker.name} is gone again before it could be given work ({what}); restarting")

    async def _rest(self, name: str, budget: RestartBudget, *, free: bool) -> None:
        """Wait before it is started again; for longer and longer, and known to all, if it is lost again and again."""
        delay_s = 0.0 if free else budget.next_delay_s()
        if not free and budget.used_up:
            often = f"lost more than {self._settings.max_restarts} times within {WINDOW_S:.0f} s of service"
            self._say(f"{name} was {often} and is tried again in {delay_s:.0f} s")
            if name in self._workers:
                self._tell_who_ordered(name, DeploymentFailed(f"{name} could not be started again"))
                again = f"next try after {delay_s:.0f} s, at most {LONGEST_REST_S / 60:.0f} min apart"
                self._tell_away(name, f"in restart back-off: {often}; {again}. serve's log says why.")
            self._mended(name)
        await self._sleep(delay_s)

    def _tell_away(self, name: str, sentence: str) -> None:
        """Tell how a worker is tried again; "" if it is back, or has left. Routers are told when asked next."""
        former = self._away.pop(name, "")
        if sentence:
            self._away[name] = sentence
        if sentence != former:
            self._on_away(dict(self._away))

    async def _placed(self, one: ActorHandle, start: Callable[[], Awaitable[T]]) -> T:
        """Start the worker as soon as there is a place for it: having none, after its node was lost, is no crash."""
        reported = False
        while True:
            try:
                return await start()
            except NoPlace as error:
                if not reported:
                    self._say(f"{one.name} waits for a node: {error}")
                reported = True
                self._mended(one.name)
                await self._sleep(POLL_S)

    async def _register(self, worker: WorkerHandle, address: str, why: RestartReason) -> Health:
        """Enter its address, and return "" when it can be given work. Raises DeploymentFailed if a router refuses it.

        The address comes first: a router that is gone may be waiting for one to start again with. Routers that do not
        reach it yet are asked on. If the worker is lost meanwhile, it returns how.
        """
        self._addresses[worker.name] = address
        registration = self._registration(worker.name, address, why)
        self._begin_to_register(worker.name, registration, list(self._routers.values()))
        try:
            while not registration.enough:
                await registration.changed(POLL_S)
                registration.check()
                if not registration.enough and (lost := await worker.failure()) not in ("", "draining"):
                    self._not_there(worker.name)
                    return lost
        except DeploymentFailed:
            self._not_there(worker.name)
            raise
        return ""

    def _registration(self, name: str, address: str, why: RestartReason | None) -> Registration:
        return Registration(
            name, address, why, routers=self._routers, serves=self._serves, say=self._say, sleep=self._sleep
        )

    def _begin_to_register(self, name: str, registration: Registration, routers: Sequence[Routing]) -> None:
        tasks = [self._group.create_task(registration.to(router), name=f"register-{name}") for router in routers]
        unfinished = [task for task in self._registered.get(name, ()) if not task.done()]
        self._registered[name] = unfinished + tasks

    def _not_there(self, name: str) -> None:
        """Have nobody connect to this incarnation of a worker any more."""
        self._addresses.pop(name, None)
        for task in self._registered.pop(name, ()):
            task.cancel()

    def _is_back(self, name: str) -> None:
        """Forget what was held against it."""
        for names in self._unreached.values():
            names.discard(name)
        self._returning.discard(name)
        self._mended(name)
        self._tell_away(name, "")

    def _forget(self, name: str) -> list[asyncio.Task[None]]:
        """Forget a worker that has left, or was never taken in, here and in all routers; returns what tells these."""
        self._not_there(name)
        self._is_back(name)
        del self._workers[name]
        self._mended_s.pop(name, None)
        self._minding.pop(name, None)
        self._restarts.pop(name, None)
        return [
            self._group.create_task(self._tell(router, partial(router.remove_worker, name)), name=f"forget-{name}")
            for router in self._routers.values()
        ]

    async def _dismiss(self, worker: WorkerHandle, sentence: str) -> None:
        """Take note that a worker has left for good. Raises DeploymentFailed if it was the last one."""
        self._say(sentence)
        if telling := self._forget(worker.name):  # others let go of its KV cache, before it is freed
            await asyncio.wait(telling, timeout=FORGOTTEN_WITHIN_S)
        await worker.retire()
        if not self._workers:  # else any other worker can serve whole requests
            raise DeploymentFailed(f"{sentence}; it was the last worker")

    async def _tell(self, router: Routing, tell: Callable[[], Awaitable[None]]) -> None:
        """Tell a router as soon as it serves and answers; telling it twice does no harm."""
        while router.name in self._routers:
            if self._serves[router.name].is_set():
                try:
                    await tell()
                    return
                except DeploymentFailed:
                    pass
            await self._sleep(POLL_S)

    # --- routers

    async def _mind_router(self, router: Routing) -> None:
        budget = RestartBudget(self._settings.max_restarts, self._clock, longest_rest_s=LONGEST_ROUTER_REST_S)
        while True:
            why = await self._until_lost(router)
            self._serves[router.name].clear()
            self._told_away.pop(router.name, None)
            self._has_no_vote(router.name)
            self._say(f"{router.name} is gone ({_WHAT_HAPPENED[why]}); restarting")
            began_s = self._clock()
            await self._router_back(router, budget)
            budget.serves()
            self._is_back(router.name)
            self._serves[router.name].set()
            await self._register_missed(router)
            self._say(f"{router.name}: back after {self._clock() - began_s:.0f} s")

    async def _register_missed(self, router: Routing) -> None:
        """Register the workers that it did not reach when it started, until it does."""
        try:
            missed = await router.unreached(0.0)
        except DeploymentFailed:
            return  # it is lost again
        for name, address in self._addresses.items():
            if address in missed:
                self._begin_to_register(name, self._registration(name, address, None), [router])

    async def _router_back(self, router: Routing, budget: RestartBudget) -> None:
        """Start it until it serves."""
        while True:
            await router.end()
            await self._rest(router.name, budget, free=False)
            try:
                await self._placed(router, partial(self._router_again, router))
                return
            except DeploymentFailed as error:
                self._say(f"{router.name} could not be brought back: {error}")

    async def _router_again(self, router: Routing) -> None:
        """Start it once there is a worker, with the addresses of all there are."""
        while not (there := [self._addresses[name] for name in self._workers if name in self._addresses]):
            await self._sleep(POLL_S)
        await router.start_again(there)
