"""Operations on running workers, as one router knows them: another number of workers, or a restart of all of them.

They are asked for over HTTP (`ridgeline.router.front.admin`), or by the driver's autoscaler, and carried out by the
driver, whose `ridgeline.cluster.runtime.operation_queue` takes what it does not know yet and tells how that goes on. An
operation is handed out until its end is told, so an answer that got lost loses none.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from ridgeline.contracts.vocabulary import Mode, Pool

KEPT = 100
"""Operations that can be looked up after their end; older ones are forgotten."""
OperationKind = Literal["scale", "restart"]
OperationState = Literal["given", "running", "done", "failed", "cancelled"]
OPEN: tuple[OperationState, ...] = ("given", "running")
"""The states of an operation that has not ended."""


@dataclass(frozen=True)
class Operation:
    """What an operator wants."""

    operation_id: str
    kind: OperationKind
    timeout_s: float
    """Time that requests running on a leaving worker still get."""
    workers: Mapping[Pool, int] = field(default_factory=dict)
    """To scale: how many workers each of these pools shall have."""
    decided_at: Mapping[Pool, int] = field(default_factory=dict)
    """How many workers pools had when this was decided: an operation that comes after another change is void."""
    mode: Mode | None = None
    """To scale: the mode that has these pools. In another one the operation is void."""
    reason: str = ""
    """Why, if nobody but the loop that follows the load wants it."""
    given_unix_s: float = 0.0

    @property
    def title(self) -> str:
        """It in a few words."""
        wanted = " ".join(f"{pool}={number}" for pool, number in self.workers.items())
        return f"operation {self.operation_id} ({' '.join(filter(None, (self.kind, wanted)))})"

    @property
    def how_to_cancel(self) -> str:
        """The command that ends it."""
        return f"ridgeline operations cancel {self.operation_id}"


def new_operation(
    kind: OperationKind,
    timeout_s: float,
    workers: Mapping[Pool, int],
    decided_at: Mapping[Pool, int] | None = None,
    mode: Mode | None = None,
    reason: str = "",
) -> Operation:
    """Return an operation that is asked for now."""
    return Operation(
        secrets.token_hex(4), kind, timeout_s, workers, decided_at or {}, mode, reason, given_unix_s=time.time()
    )


@dataclass(frozen=True)
class Cancellation:
    """An operation that nobody wants any more."""

    operation_id: str


News = Operation | Cancellation


@dataclass(frozen=True)
class Progress:
    """How far an operation is."""

    operation: Operation
    state: OperationState = "given"
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


class OperationLog:
    """The operations that one router has been given or told about."""

    def __init__(self) -> None:
        self._book_id = secrets.token_hex(4)
        self._progress: dict[str, Progress] = {}
        self._news: list[News] = []
        """What was said here of operations that have not ended."""
        self._changed = asyncio.Event()

    def give(
        self, kind: OperationKind, timeout_s: float, workers: Mapping[Pool, int] | None = None, mode: Mode | None = None
    ) -> Operation:
        """Enter an operation."""
        operation = new_operation(kind, timeout_s, workers or {}, mode=mode)
        self._enter(Progress(operation))
        self._tell(operation)
        return operation

    def cancel(self, operation_id: str) -> None:
        """Enter that nobody wants an operation any more; whoever carries it out says when it has ended."""
        if (cancellation := Cancellation(operation_id)) not in self._news:
            self._tell(cancellation)

    @property
    def open(self) -> list[Progress]:
        """The operations that have not ended, the oldest first."""
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
        """Note how an operation goes on, also of one that another router was given."""
        operation_id = progress.operation.operation_id
        self._enter(progress)
        if not progress.is_open:
            self._news = [news for news in self._news if news.operation_id != operation_id]

    def progress(self, operation_id: str) -> Progress | None:
        """Return how far an operation is; None if it is not known here."""
        return self._progress.get(operation_id)

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self._changed.set()

    def _enter(self, progress: Progress) -> None:
        self._progress[progress.operation.operation_id] = progress
        forget_old(self._progress)


def forget_old(progress: dict[str, Progress]) -> None:
    """Forget the oldest operations that have ended, beyond those that are kept."""
    ended = [operation_id for operation_id, each in progress.items() if not each.is_open]
    for operation_id in ended[:-KEPT]:
        del progress[operation_id]
