"""What operators want of running workers: another number of them, or a restart of all, one operation at a time.

It is asked for over HTTP (`ridgeline.router.front.admin`) and carried out by the driver, whose
`ridgeline.cluster.runtime.fleet_operations` takes it from here and tells all routers how it goes on.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from ridgeline.contracts.vocabulary import Mode, Pool

TAKEN_WITHIN_S: Final = 10.0
"""How long the driver may take to begin an operation or to refuse it: it waits for one all the time."""
OperationKind = Literal["scale", "restart"]
OperationState = Literal["running", "done", "failed", "cancelled", "refused"]


class OperationRuns(Exception):
    """Another operation is under way; the message names it."""


class NotTaken(Exception):
    """The driver did not say whether it begins the operation."""


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

    @property
    def under_way(self) -> str:
        """Say that it is, and how to end it."""
        wanted = " ".join(f"{pool}={number}" for pool, number in self.workers.items())
        title = f"operation {self.operation_id} ({' '.join(filter(None, (self.kind, wanted)))})"
        return f"{title} is under way: wait until it has ended, or cancel it (ridgeline scale --cancel)"


def new_operation(
    kind: OperationKind,
    timeout_s: float,
    workers: Mapping[Pool, int],
    decided_at: Mapping[Pool, int] | None = None,
    mode: Mode | None = None,
    reason: str = "",
) -> Operation:
    """Return an operation with a name of its own."""
    return Operation(secrets.token_hex(4), kind, timeout_s, workers, decided_at or {}, mode, reason)


@dataclass(frozen=True)
class Progress:
    """How far an operation is."""

    operation: Operation
    state: OperationState = "running"
    sentences: tuple[str, ...] = ()
    number: int = 0
    """Grows with everything that the driver tells: calls may overtake each other."""

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state == "running"


@dataclass(frozen=True)
class Asked:
    """What the driver is asked for."""

    operation: Operation | None = None
    cancels: str = ""
    """The id of an operation that nobody wants any more."""
    mode: Mode | None = None
    """The mode in which the router serves now."""


class Operations:
    """The operation that is under way, or the last one that was, as one router knows it."""

    def __init__(self) -> None:
        self.last: Progress | None = None
        self._given: tuple[Operation, asyncio.Future[Progress]] | None = None
        self._cancels = ""
        self._woken = False
        self._changed = asyncio.Event()

    @property
    def running(self) -> Operation | None:
        """The operation that has not ended."""
        return self.last.operation if self.last is not None and self.last.is_open else None

    @property
    def _unanswered(self) -> Operation | None:
        return self._given[0] if self._given is not None and not self._given[1].done() else None

    async def begin(self, operation: Operation, within_s: float = TAKEN_WITHIN_S) -> Progress:
        """Return once the driver has begun it. Raises OperationRuns, NotTaken."""
        if (other := self._given[0] if self._given else self.running) is not None:
            raise OperationRuns(other.under_way)
        self._given = operation, asyncio.get_running_loop().create_future()
        self._changed.set()
        try:
            async with asyncio.timeout(within_s):
                progress = await self._given[1]
        except TimeoutError:
            raise NotTaken(f"the driver has not begun operation {operation.operation_id} in {within_s:g} s") from None
        finally:
            self._given = None
        if progress.state == "refused":
            raise OperationRuns(progress.sentences[-1])
        return progress

    def cancel(self, operation: Operation) -> None:
        """Enter that nobody wants an operation any more; whoever carries it out says when it has ended."""
        self._cancels = operation.operation_id
        self._changed.set()

    def wake(self) -> None:
        """Have the driver hear at once that the mode has changed: what waits in `take` returns."""
        self._woken = True
        self._changed.set()

    async def take(self, within_s: float, cancelling: str = "") -> Asked:
        """Return what the driver is asked for; if there is nothing, wait for it, up to this many seconds.

        An operation is handed out until something is told about it, a cancellation until the driver is `cancelling`
        that operation: an answer may get lost.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not (self._unanswered or self._cancels not in ("", cancelling) or self._woken):
                    self._changed.clear()
                    await self._changed.wait()
        self._woken = False
        return Asked(self._unanswered, self._cancels)

    def report(self, progress: Progress) -> None:
        """Note how an operation goes on, also of one that another router was given."""
        if self._given and self._unanswered and self._unanswered.operation_id == progress.operation.operation_id:
            self._given[1].set_result(progress)
        if progress.state != "refused" and (self.last is None or self.last.number <= progress.number):
            self.last = progress
