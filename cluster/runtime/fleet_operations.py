"""Takes operations from all routers, carries out one at a time, and tells all routers how it goes on.

Calls to a router may be lost in both directions: a router hands an operation out until it hears of it, and what could
not be told is told again, also to a router that has been started again.

Scaling and restarting consist of steps: who is started, who leaves and in which order, and when to give up. Each step
has an end. An operation that is cancelled or fails leaves what serves serving. A worker that was being started for it
ends, and one that drains already leaves, or is started again, as it would have been.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ridgeline.cluster.runtime.handles.actor import DeploymentFailed, NoPlace, NotReached
from ridgeline.cluster.runtime.handles.routing import RouterHandle, RoutingHandle
from ridgeline.cluster.runtime.handles.worker import WorkerHandle
from ridgeline.cluster.runtime.plan import PlacementError
from ridgeline.cluster.runtime.supervisor import Say, Supervisor
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.front.operations import Operation, OperationState, Progress
from ridgeline.router.router_control import Member, Members

ASK_S = 5.0
"""How long a router is asked for operations at a time."""
RETRY_S = 0.5
LOOK_S = 0.2
"""How often it is looked whether a worker has left."""
BEYOND_LEASE_S = 90.0
"""How long a drain may take, after the running requests' time is up and a lease more, in which KV may still be fetched:
what hangs is cut off, and the engine's processes end."""
LEAD_BACK_WITHIN_S = 120.0
"""How long an operation waits for the router that leads, which may be starting again: that takes 14 s on two cores, and
more where the disk is slow, since it imports vLLM."""
T = TypeVar("T")
Note = Callable[[str], None]
"""Says how an operation goes on."""
CarryOut = Callable[[Operation, Note], Awaitable[str]]
"""Carries an operation out and says what is so now. Raises OperationFailed, DeploymentFailed or PlacementError."""


class OperationFailed(Exception):
    """The operation, or the rest of it, cannot be carried out; the message says why."""


class OperationRunner:
    """Where all operations come together."""

    def __init__(
        self,
        routers: Sequence[RouterHandle],
        carry_out: CarryOut,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routers = [(router, asyncio.Event()) for router in routers]
        """With each, what is set when there is something to tell it."""
        self._carry_out = carry_out
        self._clock = clock
        self._progress: Progress | None = None
        self._given: asyncio.Queue[Operation] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._say: Say = lambda _: None
        self._mode: Mode | None = None
        """The mode of which the first router told last."""

    @property
    def under_way(self) -> bool:
        """Whether an operation is being carried out."""
        return self._progress is not None and self._progress.is_open

    @property
    def last(self) -> Progress | None:
        """How far the last operation is."""
        return self._progress

    def begin(self, operation: Operation) -> bool:
        """Begin an operation; False if another one is under way."""
        if self.under_way:
            return False
        number = self._progress.number if self._progress else 0
        self._progress = Progress(operation, number=number)
        self._note(operation.reason or "begins")
        self._given.put_nowait(operation)
        return True

    async def run(self, say: Say) -> None:
        """Take and carry out operations until cancelled."""
        self._say = say
        async with asyncio.TaskGroup() as group:
            for router, news in self._routers:
                group.create_task(self._take(router, news), name="take-operations")
                group.create_task(self._tell(router, news), name="tell-operations")
            group.create_task(self._one_at_a_time(), name="operations")

    async def _take(self, router: RouterHandle, news: asyncio.Event) -> None:
        cancelling = ""
        while True:
            try:
                asked = await router.take_operation(ASK_S, cancelling)
                if asked.operation is not None:
                    await router.report(self._answer_to(asked.operation))
            except DeploymentFailed:  # it is being started again, or the answer was lost
                news.set()
                await asyncio.sleep(RETRY_S)
                continue
            if router is self._routers[0][0] and asked.mode != self._mode:  # the others follow, some a moment later
                if self._mode is not None:
                    self._say(f"the mode is {asked.mode} now, and was {self._mode}")
                self._mode = asked.mode
            cancelling = asked.cancels
            if self._task is not None and self._is_running(cancelling) and not self._task.cancelling():
                self._task.cancel()  # what it began is cleaned up once, without haste

    async def _tell(self, router: RouterHandle, news: asyncio.Event) -> None:
        while True:
            await news.wait()
            news.clear()
            try:
                if self._progress is not None:
                    await router.report(self._progress)
            except DeploymentFailed:
                news.set()
                await asyncio.sleep(RETRY_S)

    def _answer_to(self, operation: Operation) -> Progress:
        """Begin what a router was given, or refuse it."""
        current = self._progress
        if current is None or current.operation.operation_id != operation.operation_id:
            if current is not None and current.is_open:
                return Progress(operation, "refused", (current.operation.under_way,))
            self.begin(operation)
        assert self._progress is not None
        return self._progress

    def _is_running(self, operation_id: str) -> bool:
        return self.under_way and self._progress is not None and self._progress.operation.operation_id == operation_id

    async def _one_at_a_time(self) -> None:
        while True:
            operation = await self._given.get()
            began_s = self._clock()
            async with asyncio.TaskGroup() as group:
                name = f"operation-{operation.operation_id}"
                self._task = group.create_task(self._carried_out(operation, began_s), name=name)
            if self._task.cancelled():
                self._note(f"cancelled after {self._clock() - began_s:.0f} s: the rest of it is not done", "cancelled")
            self._task = None

    async def _carried_out(self, operation: Operation, began_s: float) -> None:
        try:
            is_so = await self._carry_out(operation, self._note)
        except (DeploymentFailed, OperationFailed, PlacementError) as error:
            self._note(str(error), "failed")
        else:
            self._note(f"done after {self._clock() - began_s:.0f} s: {is_so}", "done")

    def _note(self, sentence: str, state: OperationState = "running") -> None:
        assert self._progress is not None
        last = self._progress
        self._say(f"operation {last.operation.operation_id}: {sentence}")
        self._progress = replace(last, state=state, sentences=(*last.sentences, sentence), number=last.number + 1)
        for _, news in self._routers:
            news.set()


class OperationSteps:
    """Carries out one operation at a time. `lead` knows the workers' pools: the dispatcher, or the only router."""

    def __init__(
        self,
        lead: RoutingHandle,
        supervisor: Supervisor,
        make_worker: Callable[[str, Pool], WorkerHandle],
        start_within_s: float,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start_within_s`: how long a worker may take to find a place and load its engine.

        `lease_s`: how long its KV may be needed after its last request.
        """
        self._lead = lead
        self._supervisor = supervisor
        self._make_worker = make_worker
        self._start_within_s = start_within_s
        self._beyond_timeout_s = lease_s + BEYOND_LEASE_S
        self._clock = clock
        self._next = 0
        """The number of the next worker, at the least."""

    async def carry_out(self, operation: Operation, note: Note) -> str:
        """Return what is so now. Raises OperationFailed, DeploymentFailed or PlacementError."""
        if operation.kind == "restart":
            return await self._restart(operation, note)
        await self._scale(operation, note)
        members = await self._members(operation)
        return ", ".join(f"{pool} has {_counted(len(self._of(pool, members)))}" for pool in operation.workers)

    # --- more and fewer

    async def _scale(self, operation: Operation, note: Note) -> None:
        """Start what is missing, then have leave what is too much; the other way round if there is no room before."""
        members = await self._members(operation)
        for pool, then in operation.decided_at.items():
            if (now := len(self._of(pool, members))) != then:
                raise OperationFailed(f"{pool} has {now} workers, and {then} when this was decided: nothing is changed")
        try:
            await self._grow(operation, note)
        except (NoPlace, PlacementError) as error:
            if not await self._shrink(operation, note):
                raise
            note(f"there is room now; before, {error}")
            await self._grow(operation, note)
        await self._shrink(operation, note)

    async def _members(self, operation: Operation) -> dict[str, Member]:
        """Return all workers. Raises OperationFailed if the server does not serve in the operation's mode any more."""
        members: Members = await self._asked(lambda: self._lead.members(self._supervisor.started_for))
        if operation.mode not in (None, members.mode):
            raise OperationFailed(
                f"it is for mode {operation.mode}, and the server serves {members.mode} now: nothing more is changed; "
                f"say how many workers the pools of mode {members.mode} shall have"
            )
        return members.workers

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask the leader, again if it is away or its answer was lost: no question does harm twice."""
        give_up_s = self._clock() + LEAD_BACK_WITHIN_S
        while True:
            try:
                return await ask()
            except NotReached:
                raise
            except DeploymentFailed:
                if self._clock() >= give_up_s:
                    raise
            await asyncio.sleep(RETRY_S)

    def _of(self, pool: Pool, members: dict[str, Member]) -> list[str]:
        """Return the pool's workers that stay: first those that can be given work, of these the oldest."""
        back = self._supervisor.come_back
        staying = (name for name, one in members.items() if one.pool == pool and (name in back or not one.draining))
        return sorted(staying, key=lambda name: (name in self._unusable(members), _number(name)))

    def _unusable(self, members: dict[str, Member]) -> set[str]:
        return self._supervisor.lost | {name for name, one in members.items() if not one.usable}

    async def _grow(self, operation: Operation, note: Note) -> None:
        members = await self._members(operation)
        missing = {pool: wanted - len(self._of(pool, members)) for pool, wanted in operation.workers.items()}
        new = [self._make_worker(self._name(), pool) for pool, number in missing.items() for _ in range(number)]
        failures: list[Exception] = []

        async def one(worker: WorkerHandle) -> None:
            try:
                await self._start(operation, worker, note)
            except (DeploymentFailed, OperationFailed, PlacementError) as error:  # the others are started all the same
                failures.append(error)

        async with asyncio.TaskGroup() as group:
            for worker in new:
                group.create_task(one(worker), name=f"start-{worker.name}")
        if failures:
            raise failures[0]

    def _name(self) -> str:
        self._next = max(self._next, 1 + max((_number(name) for name in self._supervisor.workers), default=-1))
        self._next += 1
        return f"worker-{self._next - 1}"

    async def _start(self, operation: Operation, worker: WorkerHandle, note: Note) -> None:
        began_s = self._clock()
        worker.tell = note
        note(f"{worker.name}: starting")
        try:
            async with asyncio.timeout(self._start_within_s):
                address = await worker.start()
                await self._members(operation)  # it has no place in another mode
                await self._supervisor.add(worker, address)
        except TimeoutError as error:
            await worker.retire()
            raise OperationFailed(
                f"{worker.name} did not serve within {self._start_within_s:.0f} s and was ended: see serve's log, or "
                "raise ray.placement_timeout_s or supervision.start_timeout_s"
            ) from error
        except BaseException:
            await worker.retire()
            note(f"{worker.name}: ended, before it served")
            raise
        note(f"{worker.name}: serves after {self._clock() - began_s:.0f} s")

    async def _shrink(self, operation: Operation, note: Note) -> bool:
        """Have those leave that are too many, the newest first, and before them those that do not serve anyway.

        Returns whether there were any. Looks at all of them again before each one, since others may be lost meanwhile.
        """
        left = False
        for pool, wanted in operation.workers.items():
            while len(staying := self._of(pool, members := await self._members(operation))) > wanted:
                await self._leave(staying[-1], operation, members, note)
                left = True
        return left

    async def _leave(self, name: str, operation: Operation, members: dict[str, Member], note: Note) -> None:
        if name in self._supervisor.lost:
            note(f"{name}: does not run, and is given up without a drain")
            await self._supervisor.dismiss(name)
            return
        if name in self._unusable(members):
            note(f"{name}: does not serve at the moment, and leaves before those that do")
        self._supervisor.let_leave(name)  # it may drain already, for a restart that was cancelled
        if await self._drain(name, operation.timeout_s, note) or name not in self._supervisor.workers:
            try:
                await self._gone(name, operation.timeout_s)
            except asyncio.CancelledError:
                note(f"{name}: drains already, and leaves; the others stay as they are")
                raise
            note(f"{name}: is gone")
        else:
            note(f"{name}: is not reached, and is given up without a drain")
            await self._supervisor.dismiss(name)

    async def _drain(self, name: str, timeout_s: float, note: Note, incarnation: str = "") -> bool:
        """Have a worker drain, or only this incarnation of it; False if that is not reached."""
        note(f"{name}: drains, running requests get {timeout_s:.0f} s")
        try:
            await self._asked(lambda: self._lead.drain_worker(name, timeout_s, incarnation))
        except NotReached:
            return False
        return True

    async def _gone(self, name: str, timeout_s: float) -> None:
        """Wait until the worker has left, and the leader knows."""
        try:
            async with asyncio.timeout(timeout_s + self._beyond_timeout_s):
                while name in self._supervisor.workers or name in (await self._asked(self._known)).workers:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            raise OperationFailed(f"{name} still has not left; GET /ridgeline/workers says what it holds") from error

    async def _known(self) -> Members:
        members: Members = await self._lead.members({})
        return members

    # --- all again

    async def _restart(self, operation: Operation, note: Note) -> str:
        """Drain each worker and start it again, one after the other."""
        names, restarted = sorted(self._supervisor.workers, key=_number), 0
        for name in names:
            members = await self._members(operation)
            if name in self._supervisor.lost or name not in members:
                note(f"{name}: does not run, and is being started again anyway")
                continue
            if members[name].draining and name not in self._supervisor.come_back:
                note(f"{name}: drains already, and leaves")
                continue
            if len(members) > 1 and not members.keys() - {name} - self._unusable(members):
                raise OperationFailed(
                    f"{name} is the only worker that serves now, and without it nothing is served: ask again when "
                    f"others serve (GET /ridgeline/workers); {restarted} of {len(names)} workers were started again"
                )
            restarted += await self._one_again(name, members[name].incarnation, operation, note)
        return f"{_counted(restarted)} of {len(names)} started again"

    async def _one_again(self, name: str, incarnation: str, operation: Operation, note: Note) -> bool:
        """Have this incarnation drain, and wait for the next one; False if it could not be told to."""
        began_s = self._clock()
        back = self._supervisor.restart_drained(name)
        within_s = operation.timeout_s + self._beyond_timeout_s + self._start_within_s
        try:
            told = await self._drain(name, operation.timeout_s, note, incarnation)
        except (asyncio.CancelledError, DeploymentFailed):
            await self._stays(name, note)
            raise
        if not told and not back.done() and await self._stays(name, note):
            return False
        try:
            async with asyncio.timeout(within_s):
                await back
        except TimeoutError as error:
            raise OperationFailed(
                f"{name} does not serve again after {within_s:.0f} s (the drain, ray.placement_timeout_s and "
                "supervision.start_timeout_s): see serve's log; it is started as soon as that is possible, the others "
                "stay as they are"
            ) from error
        except asyncio.CancelledError:
            note(f"{name}: is started again once it has drained; the others stay as they are")
            raise
        note(f"{name}: serves again after {self._clock() - began_s:.0f} s")
        return True

    async def _stays(self, name: str, note: Note) -> bool:
        """Whether a worker that may have been told to drain was not: then it leaves if an operator drains it later."""
        stays = await self._supervisor.take_back_restart(name)
        is_so = "was not told to drain, and stays as it is" if stays else "is started again once it has drained"
        note(f"{name}: {is_so}")
        return stays


def _counted(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _number(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
