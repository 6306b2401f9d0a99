"""Takes orders from all routers, has one at a time carried out, and tells all routers how each of them goes on.

Calls to a router may be lost on the way, in both directions: a router hands an order out until its end was told, and
what could not be told is told again. A router that has been started again is told everything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cluster.runtime.handles.actor import DeploymentFailed
from cluster.runtime.plan import PlacementError
from cluster.runtime.supervisor import Say
from router.front.orders import News, Order, OrderState, Progress, Taken, forget_old

ASK_S = 5.0
"""How long a router is asked for orders at a time."""
RETRY_S = 0.5
Note = Callable[[str], None]
"""Says how an order goes on."""
CarryOut = Callable[[Order, Note], Awaitable[str]]
"""Carries an order out and says what is so now. Raises OrderFailed, DeploymentFailed or PlacementError."""


class OrderFailed(Exception):
    """The order, or the rest of it, cannot be carried out; the message says why."""


class OrderingRouter(Protocol):
    """A router, as far as orders go."""

    async def take_orders(self, within_s: float, known: Collection[News]) -> Taken: ...
    async def report(self, progress: Progress) -> None: ...


@dataclass
class _Line:
    """What one router has said and been told."""

    router: OrderingRouter
    book_id: str = ""
    known: list[News] = field(default_factory=list)
    """What its book still hands out, and has been taken."""
    told: dict[str, Progress] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there may be something to tell."""


class OrderDesk:
    """Where all orders come together."""

    def __init__(
        self,
        routers: Sequence[OrderingRouter],
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
        """Whether an order is being carried out, or waits for another one to end."""
        return any(progress.is_open for progress in self._progress.values())

    async def run(self, say: Say) -> None:
        """Take and carry out orders until cancelled."""
        self._say = say
        async with asyncio.TaskGroup() as group:
            for line in self._lines:
                group.create_task(self._take(line), name="take-orders")
                group.create_task(self._tell(line), name="tell-orders")
            group.create_task(self._one_at_a_time(), name="orders")

    # --- with routers

    async def _take(self, line: _Line) -> None:
        within_s = 0.0  # the first answer says which book it is, for which nobody should wait
        while True:
            try:
                taken = await line.router.take_orders(within_s, list(line.known))
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
                if isinstance(news, Order):
                    self._enter(news)
                else:
                    self._cancel(news.order_id)

    async def _tell(self, line: _Line) -> None:
        """Tell a router how all orders stand, each time that has changed, until cancelled."""
        while True:
            await line.changed.wait()
            line.changed.clear()
            for order_id, progress in list(self._progress.items()):
                if line.told.get(order_id) != progress:
                    await self._tell_one(line, progress)
            line.told = {order_id: told for order_id, told in line.told.items() if order_id in self._progress}

    async def _tell_one(self, line: _Line, progress: Progress) -> None:
        book_id, order_id = line.book_id, progress.order.order_id
        try:
            await line.router.report(progress)
        except DeploymentFailed:
            line.changed.set()
            await asyncio.sleep(RETRY_S)
            return
        if line.book_id != book_id:  # it may be the former one that was told
            return
        line.told[order_id] = progress
        if not progress.is_open:
            line.known = [news for news in line.known if news.order_id != order_id]

    # --- one after the other

    def _enter(self, order: Order) -> None:
        if order.order_id in self._progress:
            return
        before = [progress.order for progress in self._progress.values() if progress.is_open]
        reason = (order.reason,) if order.reason else ()
        self._progress[order.order_id] = Progress(order, sentences=reason)
        self._waiting.put_nowait(order.order_id)
        if before:
            self._note(order, "given", f"waits until {before[-1].title} has ended ({before[-1].how_to_cancel})")
        else:
            self._changed()

    def _cancel(self, order_id: str) -> None:
        progress = self._progress.get(order_id)
        if progress is None or not progress.is_open:
            return
        if self._running is not None and self._running[0] == order_id:
            if not self._running[1].cancelling():  # what it began is cleaned up once, without haste
                self._running[1].cancel()
        else:
            self._note(progress.order, "cancelled", "cancelled before it had begun")

    async def _one_at_a_time(self) -> None:
        while True:
            order_id = await self._waiting.get()
            progress = self._progress.get(order_id)
            if progress is None or not progress.is_open:
                continue
            began_s = self._clock()
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._carried_out(progress.order), name=f"order-{order_id}")
                self._running = order_id, task
            self._running = None
            if task.cancelled():
                sentence = f"cancelled after {self._clock() - began_s:.0f} s: the rest of it is not done"
                self._note(progress.order, "cancelled", sentence)

    async def _carried_out(self, order: Order) -> None:
        began_s = self._clock()
        try:
            self._note(order, "running", "begins")
            is_so = await self._carry_out(order, lambda sentence: self._note(order, "running", sentence))
        except (DeploymentFailed, OrderFailed, PlacementError) as error:
            self._note(order, "failed", str(error))
        else:
            self._note(order, "done", f"done after {self._clock() - began_s:.0f} s: {is_so}")

    def _note(self, order: Order, state: OrderState, sentence: str) -> None:
        self._say(f"order {order.order_id}: {sentence}")
        progress = self._progress[order.order_id]
        self._progress[order.order_id] = replace(progress, state=state, sentences=(*progress.sentences, sentence))
        forget_old(self._progress)
        self._changed()

    def _changed(self) -> None:
        for line in self._lines:
            line.changed.set()
