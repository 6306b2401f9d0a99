"""Which prompt is next: deficit round robin over clients, first come first served within one. No clock, no asyncio.

Clients take turns. At each of its turns a client may send `quantum_tokens` more prompt tokens; what it does not use, or
saves up for a prompt longer than that, is kept while it has prompts waiting. So clients get equal prompt tokens, not
equal numbers of prompts; but a short prompt is work too, for router and engines, and counts as `LEAST_TOKENS`.

A client that may have no more of what the popped ones take is passed over, see `pop`.

**Bound.** With Q the quantum and L the longest prompt, a prompt of t tokens that its client sends with nothing else
waiting is popped after at most ceil(t / Q) * (Q + L) tokens of each other client, however many those have waiting. For
a short prompt (t <= Q) this is one quantum and one prompt of each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUANTUM_TOKENS = 512
LEAST_TOKENS = 64
"""What the router and an engine's step do for a prompt however short it is takes as long as this many tokens do."""
T = TypeVar("T")


def may_have_more(held: int, others: int, places: int, part: float) -> bool:
    """May a client that holds so many of these places have one more, beside others that hold so many?

    At most a part of what the others leave: alone nearly all, with one that is as greedy nearly half. So some are free
    for whoever comes, and whoever has nothing is let in even if none is: nobody waits for another one for ever.
    """
    return not held or held < int(part * (places - others))


def _everybody(_client: str) -> bool:
    return True


@dataclass(eq=False)
class Entry(Generic[T]):
    """One prompt that waits."""

    client: str
    tokens: int
    item: T
    urgent: bool


@dataclass
class _Client(Generic[T]):
    entries: deque[Entry[T]] = field(default_factory=deque)
    tokens: int = 0
    deficit_tokens: int = 0
    has_turn: bool = False


@dataclass
class _Next(Generic[T]):
    """Who is next: the client at this place, in this round of turns; and who has turns until then, itself included."""

    rounds: int
    place: int
    passed: list[tuple[int, _Client[T]]]


class FairQueue(Generic[T]):
    """Prompts that wait, in fair order."""

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS, least_tokens: int = LEAST_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._least_tokens = least_tokens
        self._urgent: deque[Entry[T]] = deque()
        self._clients: dict[str, _Client[T]] = {}
        """Those with prompts waiting."""
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._urgent) + sum(len(client.entries) for client in self._clients.values())

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(entry.tokens for entry in self._urgent) + sum(client.tokens for client in self._clients.values())

    def push(self, client: str, tokens: int, item: T, *, urgent: bool = False) -> Entry[T]:
        """Line one up. Urgent ones go before all others, in their own order: for what is small and must not wait."""
        entry = Entry(client, tokens, item, urgent)
        if urgent:
            self._urgent.append(entry)
            return entry
        if client not in self._clients:
            self._clients[client] = _Client()
            self._turns.append(client)
        self._clients[client].entries.append(entry)
        self._clients[client].tokens += tokens
        return entry

    def peek(self, eligible: Callable[[str], bool] = _everybody) -> Entry[T] | None:
        """Return what `pop` would take out now, or None where it would raise; nothing changes by it."""
        if self._urgent:
            return self._urgent[0]
        found = self._next(eligible)
        return None if found is None else self._clients[self._turns[found.place]].entries[0]

    def pop(self, eligible: Callable[[str], bool] = _everybody) -> Entry[T]:
        """Take the next one out, of a client that is eligible, or an urgent one; raises IndexError when none waits.

        Who is passed over saves nothing up for it.
        """
        if self._urgent:
            return self._urgent.popleft()
        found = self._next(eligible)
        if found is None:
            raise IndexError("none waits that may go")
        for place, client in found.passed:
            turns = found.rounds - (place > found.place) - client.has_turn
            client.deficit_tokens += turns * self._quantum_tokens
        self._clients[self._turns[0]].has_turn = False
        self._turns.rotate(-found.place)
        chosen = self._clients[self._turns[0]]
        chosen.has_turn = True
        entry = chosen.entries[0]
        chosen.deficit_tokens -= self._weight(entry)
        self.remove(entry)
        return entry

    def _next(self, eligible: Callable[[str], bool]) -> _Next[T] | None:
        """Find the client whose turn will be the first that pays for its first prompt."""
        best: tuple[int, int] | None = None
        passed: list[tuple[int, _Client[T]]] = []
        for place, name in enumerate(self._turns):
            if not eligible(name):
                continue
            client = self._clients[name]
            passed.append((place, client))
            missing = self._weight(client.entries[0]) - client.deficit_tokens
            turns = -(-missing // self._quantum_tokens)
            rounds = 1 + max(0, turns) if client.has_turn else max(1, turns)
            if best is None or rounds < best[0]:
                best = (rounds, place)
                if rounds == 1:  # nobody behind it comes before it
                    break
        return None if best is None else _Next(*best, passed)

    def _weight(self, entry: Entry[T]) -> int:
        return max(entry.tokens, self._least_tokens)

    def remove(self, entry: Entry[T]) -> None:
        """Take this one out, wherever it stands; does nothing if it is out already."""
        if entry.urgent:
            if entry in self._urgent:
                self._urgent.remove(entry)
            return
        client = self._clients.get(entry.client)
        if client is None or entry not in client.entries:
            return
        client.entries.remove(entry)
        client.tokens -= entry.tokens
        if not client.entries:  # what it saved is lost: credit is for those who wait
            del self._clients[entry.client]
            self._turns.remove(entry.client)

    def tokens_ahead(self, client: str, tokens: int) -> int:
        """About how many waiting tokens would be popped before a prompt of `tokens` tokens that `client` sends now.

        All of its own, and of each other client as many as it gets itself until then, plus one quantum or prompt.
        """
        own = self._clients[client].tokens if client in self._clients else 0
        others = (
            min(other.tokens, own + tokens + max(self._quantum_tokens, other.entries[0].tokens))
            for name, other in self._clients.items()
            if name != client
        )
        return sum(entry.tokens for entry in self._urgent) + own + sum(others)
