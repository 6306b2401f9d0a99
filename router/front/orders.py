"""Orders of operators that the router cannot carry out itself: another number of workers, or a restart of all of them.

An order comes over HTTP (`router.front.admin`), or from `cluster.runtime.autoscale`. `cluster.runtime.orders`, beside
the supervisor, asks for what it does not know yet and tells how that goes on. An order is handed out until its end is
told, so an answer that got lost loses none.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from contracts.vocabulary import Mode, Pool

KEPT = 100
"""Orders that can be looked up after their end; older ones are forgotten."""
OrderKind = Literal["scale", "restart"]
OrderState = Literal["given", "running", "done", "failed", "cancelled"]
OPEN: tuple[OrderState, ...] = ("given", "running")
"""The states of an order that has not ended."""


@dataclass(frozen=True)
class Order:
    """What an operator wants."""

    order_id: str
    kind: OrderKind
    timeout_s: float
    """Time that requests running on a leaving worker still get."""
    workers: Mapping[Pool, int] = field(default_factory=dict)
    """To scale: how many workers each of these pools shall have."""
    decided_at: Mapping[Pool, int] = field(default_factory=dict)
    """How many workers pools had when this was decided: an order that comes after another change is void."""
    mode: Mode | None = None
    """To scale: the mode that has these pools. In another one the order is void."""
    reason: str = ""
    """Why, if nobody but the loop that follows the load wants it."""
    given_unix_s: float = 0.0

    @property
    def title(self) -> str:
        """It in a few words."""
        wanted = " ".join(f"{pool}={number}" for pool, number in self.workers.items())
        return f"order {self.order_id} ({' '.join(filter(None, (self.kind, wanted)))})"

    @property
    def how_to_cancel(self) -> str:
        """The command that ends it."""
        return f"ridgeline orders cancel {self.order_id}"


@dataclass(frozen=True)
class Cancellation:
    """An order that nobody wants any more."""

    order_id: str


News = Order | Cancellation


@dataclass(frozen=True)
class Progress:
    """How far an order is."""

    order: Order
    state: OrderState = "given"
    sentences: tuple[str, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state in OPEN


@dataclass(frozen=True)
class Taken:
    """What a book has that its reader does not know."""

    book_id: str
    """Another one if the book is another one: its router has been started again, and knows nothing."""
    news: tuple[News, ...]


class OrderBook:
    """The orders that one router has been given or told about."""

    def __init__(self) -> None:
        self._book_id = secrets.token_hex(4)
        self._progress: dict[str, Progress] = {}
        self._news: list[News] = []
        """What was said here of orders that have not ended."""
        self._changed = asyncio.Event()

    def give(
        self,
        kind: OrderKind,
        timeout_s: float,
        workers: Mapping[Pool, int] | None = None,
        decided_at: Mapping[Pool, int] | None = None,
        mode: Mode | None = None,
        reason: str = "",
    ) -> Order:
        """Enter an order."""
        order = Order(
            secrets.token_hex(4),
            kind,
            timeout_s,
            workers or {},
            decided_at or {},
            mode,
            reason,
            given_unix_s=time.time(),
        )
        self._enter(Progress(order, sentences=(reason,) if reason else ()))
        self._tell(order)
        return order

    def cancel(self, order_id: str) -> None:
        """Enter that nobody wants an order any more; whoever carries it out says when it has ended."""
        if (cancellation := Cancellation(order_id)) not in self._news:
            self._tell(cancellation)

    @property
    def open(self) -> list[Progress]:
        """The orders that have not ended, the oldest first."""
        return [progress for progress in self._progress.values() if progress.is_open]

    @property
    def all(self) -> list[Progress]:
        """All that are known, the oldest first."""
        return list(self._progress.values())

    async def take(self, within_s: float, known: Collection[News]) -> Taken:
        """Return what is not `known`; if there is nothing, wait for it, up to this many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while all(news in known for news in self._news):
                    self._changed.clear()
                    await self._changed.wait()
        return Taken(self._book_id, tuple(news for news in self._news if news not in known))

    def report(self, progress: Progress) -> None:
        """Note how an order goes on, also of one that another router was given."""
        order_id = progress.order.order_id
        self._enter(progress)
        if not progress.is_open:
            self._news = [news for news in self._news if news.order_id != order_id]

    def progress(self, order_id: str) -> Progress | None:
        """Return how far an order is; None if it is not known here."""
        return self._progress.get(order_id)

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self._changed.set()

    def _enter(self, progress: Progress) -> None:
        self._progress[progress.order.order_id] = progress
        forget_old(self._progress)


def forget_old(progress: dict[str, Progress]) -> None:
    """Forget the oldest orders that have ended, beyond those that are kept."""
    ended = [order_id for order_id, each in progress.items() if not each.is_open]
    for order_id in ended[:-KEPT]:
        del progress[order_id]
