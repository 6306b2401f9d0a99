"""Takes operations from all routers, has one at a time carried out, and tells all routers how each of them goes on.

Calls to a router may be lost in both directions: a router hands an operation out until it was told the end, and what
could not be told is told again. A router that has been started again is told everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ridgeline.cluster.runtime.handles.actor import DeploymentFailed
from ridgeline.cluster.runtime.plan import PlacementError
from ridgeline.cluster.runtime.supervisor import Say
from ridgeline.router.front.operations import News, Operation, OperationState, Progress, Taken, forget_old

ASK_S = 5.0
"""How long a router is asked for operations at a time."""
RETRY_S = 0.5
Note = Callable[[str], None]
"""Says how an operation goes on."""
CarryOut = Callable[[Operation, Note], Awaitable[str]]
"""Carries an operation out and says what is so now. Raises OperationFailed, DeploymentFailed or PlacementError."""


class OperationFailed(Exception):
    """The operation, or the rest of it, cannot be carried out; the message says why."""


class AskedRouter(Protocol):
    """A router, as far as operations go."""

    async def take_operations(self, within_s: float, known: Collection[News]) -> Taken: ...
    async def report(self, progress: Progress) -> None: ...


@dataclass
class _Line:
    """What one router has said and been told."""

    router: AskedRouter
    book_id: str = ""
    known: list[News] = field(default_factory=list)
    """What its book still hands out, and has been taken."""
    told: dict[str, Progress] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be something to tell."""


class OperationQueue:
    """Where all operations come together."""

    def __init__(
        self,
        routers: Sequence[AskedRouter],
        carry_out: CarryOut,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = [_Line(router) for router in routers]
        self._carry_out = carry_out
        self._clock = clock
        self._progress: dict[str, Progress] = {}
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._running: tuple[str, asyncio.Task[None]] | None = None
        self._say: Say = lambda _: None

    @property
    def under_way(self) -> bool:
        """Whether an operation is being carried out, or waits for another one to end."""
        return any(progress.is_open for progress in self._progress.values())

    def begin(self, operation: Operation) -> bool:
        """Enter an operation that no router was asked for; False if another one is under way."""
        if self.under_way:
            return False
        self._enter(operation)
        return True

    async def run(self, say: Say) -> None:
        """Take and carry out operations until cancelled."""
        self._say = say
        async with asyncio.TaskGroup() as group:
            for line in self._lines:
                group.create_task(self._take(line), name="take-operations")
                group.create_task(self._tell(line), name="tell-operations")
            group.create_task(self._one_at_a_time(), name="operations")

    # --- with routers

    async def _take(self, line: _Line) -> None:
        within_s = 0.0  # the first answer says which book it is, for which nobody should wait
        while True:
            try:
                taken = await line.router.take_operations(within_s, list(line.known))
            except DeploymentFailed:  # it is being started again, or the answer was lost
                within_s = 0.0
                await asyncio.sleep(RETRY_S)
                continue
            within_s = ASK_S
            if taken.book_id != line.book_id:
                line.book_id, line.known = taken.book_id, []
                line.told.clear()
                line.changed.set()
            line.known += taken.news
            for news in taken.news:
                if isinstance(news, Operation):
                    self._enter(news)
                else:
                    self._cancel(news.operation_id)

    async def _tell(self, line: _Line) -> None:
        """Tell a router how all operations stand, each time that has changed, until cancelled."""
        while True:
            await line.changed.wait()
            line.changed.clear()
            for operation_id, progress in list(self._progress.items()):
                if line.told.get(operation_id) != progress:
                    await self._tell_one(line, progress)
            line.told = {
                operation_id: told for operation_id, told in line.told.items() if operation_id in self._progress
            }

    async def _tell_one(self, line: _Line, progress: Progress) -> None:
        book_id, operation_id = line.book_id, progress.operation.operation_id
        try:
            await line.router.report(progress)
        except DeploymentFailed:
            line.changed.set()
            await asyncio.sleep(RETRY_S)
            return
        if line.book_id != book_id:  # it may be the former one that was told
            return
        line.told[operation_id] = progress
        if not progress.is_open:
            line.known = [news for news in line.known if news.operation_id != operation_id]

    # --- one after the other

    def _enter(self, operation: Operation) -> None:
        if operation.operation_id in self._progress:
            return
        before = [progress.operation for progress in self._progress.values() if progress.is_open]
        reason = (operation.reason,) if operation.reason else ()
        self._progress[operation.operation_id] = Progress(operation, sentences=reason)
        self._waiting.put_nowait(operation.operation_id)
        if before:
            self._note(operation, "given", f"waits until {before[-1].title} has ended ({before[-1].how_to_cancel})")
        else:
            self._changed()

    def _cancel(self, operation_id: str) -> None:
        progress = self._progress.get(operation_id)
        if progress is None or not progress.is_open:
            return
        if self._running is not None and self._running[0] == operation_id:
            if not self._running[1].cancelling():  # what it began is cleaned up once, without haste
                self._running[1].cancel()
        else:
            self._note(progress.operation, "cancelled", "cancelled before it had begun")

    async def _one_at_a_time(self) -> None:
        while True:
            operation_id = await self._waiting.get()
            progress = self._progress.get(operation_id)
            if progress is None or not progress.is_open:
                continue
            began_s = self._clock()
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._carried_out(progress.operation), name=f"operation-{operation_id}")
                self._running = operation_id, task
            self._running = None
            if task.cancelled():
                sentence = f"cancelled after {self._clock() - began_s:.0f} s: the rest of it is not done"
                self._note(progress.operation, "cancelled", sentence)

    async def _carried_out(self, operation: Operation) -> None:
        began_s = self._clock()
        try:
            self._note(operation, "running", "begins")
            is_so = await self._carry_out(operation, lambda sentence: self._note(operation, "running", sentence))
        except (DeploymentFailed, OperationFailed, PlacementError) as error:
            self._note(operation, "failed", str(error))
        else:
            self._note(operation, "done", f"done after {self._clock() - began_s:.0f} s: {is_so}")

    def _note(self, operation: Operation, state: OperationState, sentence: str) -> None:
        self._say(f"operation {operation.operation_id}: {sentence}")
        progress = self._progress[operation.operation_id]
        self._progress[operation.operation_id] = replace(
            progress, state=state, sentences=(*progress.sentences, sentence)
        )
        forget_old(self._progress)
        self._changed()

    def _changed(self) -> None:
        for line in self._lines:
            line.changed.set()
