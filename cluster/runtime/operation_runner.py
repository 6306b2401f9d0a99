"""Takes operations from all routers, carries out one at a time, and tells all routers how it goes on.

Calls to a router may be lost in both directions: a router hands an operation out until it hears of it, and what could
not be told is told again, also to a router that has been started again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ridgeline.cluster.runtime.handles.actor import DeploymentFailed
from ridgeline.cluster.runtime.handles.routing import RouterHandle
from ridgeline.cluster.runtime.plan import PlacementError
from ridgeline.cluster.runtime.supervisor import Say
from ridgeline.router.front.operations import Operation, OperationState, Progress

ASK_S = 5.0
"""How long a router is asked for operations at a time."""
RETRY_S = 0.5
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

    @property
    def under_way(self) -> bool:
        """Whether an operation is being carried out."""
        return self._progress is not None and self._progress.is_open

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
