"""Orders of operators that the router cannot carry out itself: another number of workers, or a restart of all of them.

An order comes over HTTP (`router.front.admin`), or from `cluster.runtime.autoscale`. It is kept here until
`cluster.runtime.orders`, beside the supervisor, takes it and tells how it goes on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from contracts.vocabulary import Pool

KEPT = 100
"""Orders that can be looked up; older ones are forgotten."""
OrderKind = Literal["scale", "restart"]
OrderState = Literal["given", "running", "done", "failed"]


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


@dataclass
class Progress:
    """How far an order is."""

    state: OrderState = "given"
    sentences: list[str] = field(default_factory=list)


class OrderBook:
    """The orders that one router has been given or told about."""

    def __init__(self) -> None:
        self._progress: dict[str, Progress] = {}
        self._new: list[Order] = []
        self._given = asyncio.Event()

    def give(
        self,
        kind: OrderKind,
        timeout_s: float,
        workers: Mapping[Pool, int] | None = None,
        decided_at: Mapping[Pool, int] | None = None,
    ) -> Order:
        """Enter an order."""
        order = Order(secrets.token_hex(4), kind, timeout_s, workers or {}, decided_at or {})
        self._enter(order.order_id)
        self._new.append(order)
        self._given.set()
        return order

    @property
    def has_new(self) -> bool:
        """Whether an order waits to be taken."""
        return bool(self._new)

    async def take(self, within_s: float) -> list[Order]:
        """Wait for new orders, up to this many seconds, and take them out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._given.wait()
        taken, self._new = self._new, []
        self._given.clear()
        return taken

    def report(self, order_id: str, state: OrderState, sentence: str) -> None:
        """Note how an order goes on, also of one that another router was given."""
        progress = self._progress.get(order_id) or self._enter(order_id)
        progress.state = state
        progress.sentences.append(sentence)

    def progress(self, order_id: str) -> Progress | None:
        """Return how far an order is; None if it is not known here."""
        return self._progress.get(order_id)

    def _enter(self, order_id: str) -> Progress:
        self._progress[order_id] = Progress()
        while len(self._progress) > KEPT:
            del self._progress[next(iter(self._progress))]
        return self._progress[order_id]
