"""The waiting prompts of one client in the order in which they go. No clock or I/O.

Those that can still meet their deadline go first, earliest deadline first; then those without a deadline, first come,
first served; last those that cannot meet theirs any more, in the same way. So a client's hopeless prompts cost it none
that can be saved. None of them starves: of any five prompts of a client that go, one is its oldest hopeless one and one
its oldest without a deadline, if it has such a one waiting.

A prompt is hopeless once the time by which it must start is over, and stays so. That time is fixed when the prompt
comes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from ridgeline.router.scheduler.features import HOPELESS_AFTER

T = TypeVar("T")

UNDATED_AFTER = 3
"""The same for those without a deadline: one less, since a hopeless one goes before them if both are due."""


@dataclass(eq=False)
class Entry(Generic[T]):
    """One waiting prompt."""

    client: str
    tokens: int
    item: T
    urgent: bool
    number: int = 0
    """How many came before it."""
    deadline_s: float | None = None
    latest_start_s: float = math.inf
    """The last moment at which it may start and meet its deadline."""
    hopeless: bool = False
    """Whether that moment was over at some look."""
    waits: bool = True
    """Whether it has not been taken out yet."""


class ClientPrompts(Generic[T]):
    """One client's waiting prompts, and its turn in the round of clients, which `router.flow.fair_queue` keeps."""

    def __init__(self) -> None:
        self.deficit_tokens = 0
        self.has_turn = False
        self._undated: OrderedDict[int, Entry[T]] = OrderedDict()
        """Those without a deadline, by their number; the oldest first."""
        self._dated: dict[int, Entry[T]] = {}
        self._passed_undated = 0
        self._passed_hopeless = 0

    def __len__(self) -> int:
        return len(self._undated) + len(self._dated)

    def push(self, entry: Entry[T]) -> None:
        """Add a prompt."""
        (self._undated if entry.deadline_s is None else self._dated)[entry.number] = entry

    def remove(self, entry: Entry[T]) -> None:
        """Take out a prompt that waits here, wherever it stands."""
        entry.waits = False
        del (self._undated if entry.deadline_s is None else self._dated)[entry.number]

    def next(self, now_s: float = -math.inf) -> Entry[T]:
        """Return the prompt that goes next; there must be one. By default as of the last look."""
        undated = next(iter(self._undated.values()), None)
        if not self._dated:
            assert undated is not None
            return undated
        for entry in self._dated.values():
            entry.hopeless = entry.hopeless or entry.latest_start_s < now_s
        hopeless = self._oldest_hopeless()
        if hopeless is not None and self._passed_hopeless >= HOPELESS_AFTER:
            return hopeless
        if undated is not None and self._passed_undated >= UNDATED_AFTER:
            return undated
        timely = [(entry.deadline_s, entry.number) for entry in self._dated.values() if not entry.hopeless]
        chosen = self._dated[min(timely)[1]] if timely else undated or hopeless
        assert chosen is not None
        return chosen

    def goes(self, entry: Entry[T]) -> None:
        """Take out the prompt that `next` has returned, in its turn."""
        passes_hopeless = self._oldest_hopeless() not in (None, entry)
        passes_undated = bool(self._undated) and entry.deadline_s is not None
        self._passed_hopeless = self._passed_hopeless + 1 if passes_hopeless else 0
        self._passed_undated = self._passed_undated + 1 if passes_undated else 0
        self.remove(entry)

    def _oldest_hopeless(self) -> Entry[T] | None:
        return next((entry for entry in self._dated.values() if entry.hopeless), None)
