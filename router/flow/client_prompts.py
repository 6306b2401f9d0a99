"""The waiting prompts of one client in the order in which they go. No clock or I/O.

Those that can still meet their deadline go first, earliest deadline first; then those without a deadline, first come,
first served; last those that cannot meet theirs any more, in the same way. So a client's hopeless prompts cost it none
that can be saved. None of them starves: of any five prompts of a client that go, one is its oldest hopeless one and one
its oldest without a deadline, if it has such a one waiting.

A prompt is hopeless once the time by which it must start is over, and stays so. That time is fixed when the prompt
comes, since a judgement that changed would have to be asked for again for every prompt at every look.

All of it takes logarithmic time, spread over the calls, whichever prompt is taken out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

HOPELESS_AFTER = 4
"""How often in a row a client's prompts may pass its hopeless ones."""
UNDATED_AFTER = 3
"""The same for those without a deadline: one less, since a hopeless one goes before them if both are due."""
FEW = 16
"""So many removed prompts may always remain in a queue, so that short ones are not tidied all the time."""


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
    waits: bool = True
    """Whether it has not been taken out yet."""


class _Heap(Generic[T]):
    """Entries by a key, of which any can be removed. What is removed inside is dropped later, when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry[T]]] = []
        self._inside: set[int] = set()

    def __len__(self) -> int:
        return len(self._inside)

    def push(self, key: float, entry: Entry[T]) -> None:
        """Add an entry that never was here."""
        heapq.heappush(self._heap, (key, entry.number, entry))
        self._inside.add(entry.number)

    def discard(self, entry: Entry[T]) -> None:
        """Remove an entry, if it is here."""
        self._inside.discard(entry.number)
        while self._heap and self._heap[0][1] not in self._inside:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._inside) + FEW:
            self._heap = [one for one in self._heap if one[1] in self._inside]
            heapq.heapify(self._heap)

    def first(self) -> Entry[T] | None:
        """Return the entry with the smallest key, of several the oldest."""
        return self._heap[0][2] if self._heap else None


@dataclass
class _Dated(Generic[T]):
    """The prompts with a deadline."""

    timely: _Heap[T] = field(default_factory=_Heap)
    """Those that can meet it, by deadline."""
    latest_starts: _Heap[T] = field(default_factory=_Heap)
    """The same ones, by their latest start."""
    hopeless: _Heap[T] = field(default_factory=_Heap)
    """The others, by age."""

    def __len__(self) -> int:
        return len(self.timely) + len(self.hopeless)

    def push(self, entry: Entry[T], deadline_s: float) -> None:
        self.timely.push(deadline_s, entry)
        self.latest_starts.push(entry.latest_start_s, entry)

    def remove(self, entry: Entry[T]) -> None:
        for heap in (self.timely, self.latest_starts, self.hopeless):
            heap.discard(entry)

    def give_up(self, now_s: float) -> None:
        """Find those that have become hopeless."""
        while (entry := self.latest_starts.first()) is not None and entry.latest_start_s < now_s:
            self.remove(entry)
            self.hopeless.push(entry.number, entry)


class ClientPrompts(Generic[T]):
    """One client's waiting prompts, and its turn in the round of clients, which `router.flow.fair_queue` keeps."""

    def __init__(self) -> None:
        self.entries: deque[Entry[T]] = deque()
        """Those without a deadline; the first one waits, others may have been removed."""
        self.deficit_tokens = 0
        self.has_turn = False
        self._removed = 0
        self._dated: _Dated[T] | None = None
        self._passed_undated = 0
        self._passed_hopeless = 0

    def __len__(self) -> int:
        return len(self.entries) - self._removed + (0 if self._dated is None else len(self._dated))

    def push(self, entry: Entry[T]) -> None:
        """Add a prompt."""
        if entry.deadline_s is None:
            self.entries.append(entry)
            return
        if self._dated is None:
            self._dated = _Dated()
        self._dated.push(entry, entry.deadline_s)

    def remove(self, entry: Entry[T]) -> None:
        """Take out a prompt that waits here, wherever it stands."""
        entry.waits = False
        if entry.deadline_s is None:
            self._tidy()
        elif self._dated is not None:
            self._dated.remove(entry)
            if not self._dated:
                self._dated = None

    def next(self, now_s: float) -> Entry[T]:
        """Return the prompt that goes next; there must be one. `now_s` never goes back."""
        if self._dated is None:
            return self.entries[0]
        self._dated.give_up(now_s)
        return self._chosen(self._dated)

    def next_as_of_the_last_look(self) -> Entry[T]:
        """Return the prompt that would go next if no time had passed since the last call of `next`."""
        return self.next(-math.inf)

    def goes(self, entry: Entry[T]) -> None:
        """Take out the prompt that `next` has returned, in its turn."""
        hopeless = None if self._dated is None else self._dated.hopeless.first()
        passes_hopeless = hopeless is not None and hopeless is not entry
        passes_undated = bool(self.entries) and entry.deadline_s is not None
        self._passed_hopeless = self._passed_hopeless + 1 if passes_hopeless else 0
        self._passed_undated = self._passed_undated + 1 if passes_undated else 0
        self.remove(entry)

    def _chosen(self, dated: _Dated[T]) -> Entry[T]:
        hopeless, undated = dated.hopeless.first(), self.entries[0] if self.entries else None
        if hopeless is not None and self._passed_hopeless >= HOPELESS_AFTER:
            return hopeless
        if undated is not None and self._passed_undated >= UNDATED_AFTER:
            return undated
        chosen = dated.timely.first() or undated or hopeless
        assert chosen is not None
        return chosen

    def _tidy(self) -> None:
        """Drop removed entries from the front, and all of them when they are the most."""
        self._removed += 1
        while self.entries and not self.entries[0].waits:
            self.entries.popleft()
            self._removed -= 1
        if 2 * self._removed > len(self.entries) + FEW:
            self.entries = deque(entry for entry in self.entries if entry.waits)
            self._removed = 0
