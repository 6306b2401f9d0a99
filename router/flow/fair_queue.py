"""Decides which prompt is next: deficit round robin over clients. No clock or I/O.

Clients take turns. Each turn gives a client `quantum_tokens` more prompt tokens; what it does not use, or saves up for
a longer prompt, it keeps while it has prompts waiting. So clients get equal prompt tokens rather than equal numbers of
prompts. A short prompt is work for router and engines too, and counts as `LEAST_TOKENS`.

Whose turn it is depends on no deadline: a client cannot get more by being in a hurry. Which of its prompts goes in its
turn does (`ClientPrompts`); without deadlines they go first come, first served.

A client that may not have more of what its prompts need is skipped, see `pop`.

**Bound.** With Q the quantum and L the longest prompt, a prompt of t tokens that its client sends with nothing else
waiting is popped after at most ceil(t / Q) * (Q + L) tokens of each other client, however many those have waiting.
For a short prompt (t <= Q) that is one quantum and one prompt of each. Deadlines change nothing of this.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from ridgeline.router.scheduler.features import HOPELESS_AFTER

QUANTUM_TOKENS = 512
LEAST_TOKENS = 64
"""The work of router and engine for a prompt of any length takes as long as this many tokens."""
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
    """One client's waiting prompts in the order in which they go, and its turn in the round of clients.

    Those that can still meet their deadline go first, earliest deadline first; then those without a deadline, first
    come, first served; last those that cannot meet theirs any more, in the same way. So a client's hopeless prompts
    cost it none that can be saved. None of them starves: of any five prompts of a client that go, one is its oldest
    hopeless one and one its oldest without a deadline, if it has such a one waiting.

    A prompt is hopeless once the time by which it must start is over, and stays so. That time is fixed when the prompt
    comes.
    """

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


def may_have_more(held: int, others: int, places: int, part: float) -> bool:
    """Return whether a client that holds `held` of `places`, beside others that hold `others`, may have one more.

    It may have at most `part` of what the others leave: nearly all if it is alone, nearly half beside an equally greedy
    one. So some places stay free for newcomers. A client that holds nothing gets one even if none is free, so that
    nobody waits forever for another client.
    """
    return not held or held < int(part * (places - others))


def _everybody(_client: str) -> bool:
    return True


class Waiting(msgspec.Struct):
    """How much waits, and whose it is."""

    prompts: int = 0
    tokens: int = 0
    of_client: dict[str, int] = {}
    """Tokens by client, urgent prompts left out."""
    beyond: dict[str, int] = {}
    """Of clients with more waiting than one quantum or prompt: how many tokens more. With hundreds of clients these are
    few, and only they need to be looked at one by one."""

    def tokens_ahead(self, client: str, tokens: int) -> int:
        """Estimate how many waiting tokens would be popped before a prompt of `tokens` that `client` sends now.

        These are all of its own, and of each other client as many as it gets itself until then, plus one quantum or
        prompt. With deadlines it is what may go before: an early one passes some of its client's own prompts, and a
        late one, or none, is passed by those that come later, which no estimate can know.
        """
        own = self.of_client.get(client, 0)
        # Of the rest of the others, what is beyond one quantum or prompt counts only as far as our own tokens go.
        not_ahead = sum(max(0, beyond - own - tokens) for name, beyond in self.beyond.items() if name != client)
        return self.tokens - not_ahead

    def plus(self, more: Iterable[tuple[str, int]]) -> Waiting:
        """Return the same with more prompts, given by client and tokens."""
        sums = Waiting(self.prompts, self.tokens, dict(self.of_client), dict(self.beyond))
        for client, tokens in more:
            before = sums.of_client.get(client, 0)
            one = max(QUANTUM_TOKENS, before - sums.beyond.get(client, 0) if before else tokens)
            sums.of_client[client] = before + tokens
            sums.beyond[client] = max(0, before + tokens - one)
            sums.prompts += 1
            sums.tokens += tokens
        return sums


class FairQueue(Generic[T]):
    """Waiting prompts in fair order."""

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS, least_tokens: int = LEAST_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._least_tokens = least_tokens
        self._urgent: deque[Entry[T]] = deque()
        self._clients: dict[str, ClientPrompts[T]] = {}
        """The clients with prompts waiting."""
        self._turns: deque[str] = deque()
        self._pushed = 0
        self.waiting = Waiting()
        """What waits; do not change it."""

    def __len__(self) -> int:
        return self.waiting.prompts

    def push(
        self,
        client: str,
        tokens: int,
        item: T,
        *,
        urgent: bool = False,
        deadline_s: float | None = None,
        latest_start_s: float | None = None,
    ) -> Entry[T]:
        """Add a prompt. Urgent ones go before all others, in order; they must be small and few.

        `deadline_s` orders it among the other prompts of its client. After `latest_start_s`, by default the deadline
        itself, it can no longer meet it. Both are times on the clock of `peek` and `pop`. Raises ValueError if there is
        a latest start without a deadline.
        """
        if deadline_s is None and latest_start_s is not None:
            raise ValueError("a prompt with a latest start needs the deadline that it is for")
        latest = latest_start_s if latest_start_s is not None else math.inf if deadline_s is None else deadline_s
        entry = Entry(client, tokens, item, urgent, self._pushed, deadline_s, latest)
        self._pushed += 1
        self._count(1, tokens)
        if urgent:
            self._urgent.append(entry)
            return entry
        if client not in self._clients:
            self._clients[client] = ClientPrompts()
            self._turns.append(client)
        self._clients[client].push(entry)
        self.waiting.of_client[client] = self.waiting.of_client.get(client, 0) + tokens
        self._note_beyond(client)
        return entry

    def peek(self, eligible: Callable[[str], bool] = _everybody, now_s: float = -math.inf) -> Entry[T] | None:
        """Return what `pop` would take out at this time, or None if it would raise; changes no order."""
        if self._urgent:
            return self._urgent[0]
        found = self._next(eligible, now_s)
        return None if found is None else self._clients[self._turns[found[1]]].next(now_s)

    def pop(self, eligible: Callable[[str], bool] = _everybody, now_s: float = -math.inf) -> Entry[T]:
        """Take out the next prompt of an eligible client, or an urgent one. Raises IndexError if there is none.

        A client that is skipped does not save up tokens for that. Prompts whose latest start is before `now_s` are
        hopeless, here and in `peek`, and stay so; the default makes none hopeless that was not before.
        """
        if self._urgent:
            entry = self._urgent[0]
            self.remove(entry)
            return entry
        found = self._next(eligible, now_s)
        if found is None:
            raise IndexError("none waits that may go")
        rounds, chosen_place, passed = found
        for place, client in passed:
            turns = rounds - (place > chosen_place) - client.has_turn
            client.deficit_tokens += turns * self._quantum_tokens
        self._clients[self._turns[0]].has_turn = False
        self._turns.rotate(-chosen_place)
        chosen = self._clients[self._turns[0]]
        chosen.has_turn = True
        entry = chosen.next(now_s)
        chosen.deficit_tokens -= self._weight(entry)
        chosen.goes(entry)
        self._is_out(entry)
        return entry

    def _next(
        self, eligible: Callable[[str], bool], now_s: float
    ) -> tuple[int, int, list[tuple[int, ClientPrompts[T]]]] | None:
        """Find the client whose turns pay for its first prompt soonest.

        Return its round of turns, its place in the queue, and the clients with turns until then.
        """
        best: tuple[int, int] | None = None
        passed: list[tuple[int, ClientPrompts[T]]] = []
        for place, name in enumerate(self._turns):
            if not eligible(name):
                continue
            client = self._clients[name]
            passed.append((place, client))
            missing = self._weight(client.next(now_s)) - client.deficit_tokens
            turns = -(-missing // self._quantum_tokens)
            rounds = 1 + max(0, turns) if client.has_turn else max(1, turns)
            if best is None or rounds < best[0]:
                best = (rounds, place)
                if rounds == 1:  # no client behind it can come before it
                    break
        return None if best is None else (*best, passed)

    def _weight(self, entry: Entry[T]) -> int:
        return max(entry.tokens, self._least_tokens)

    def remove(self, entry: Entry[T]) -> None:
        """Take out this prompt, wherever it stands; does nothing if it is out already."""
        if entry.urgent:
            if entry in self._urgent:
                self._urgent.remove(entry)
                self._count(-1, -entry.tokens)
            return
        if entry.waits:
            self._clients[entry.client].remove(entry)
            self._is_out(entry)

    def _is_out(self, entry: Entry[T]) -> None:
        """Record that this prompt, which was not urgent, no longer waits."""
        self.waiting.of_client[entry.client] -= entry.tokens
        self._count(-1, -entry.tokens)
        if not self._clients[entry.client]:  # its savings are lost: only waiting clients have credit
            del self._clients[entry.client], self.waiting.of_client[entry.client]
            self._turns.remove(entry.client)
        self._note_beyond(entry.client)

    def _count(self, prompts: int, tokens: int) -> None:
        self.waiting.prompts += prompts
        self.waiting.tokens += tokens

    def _note_beyond(self, name: str) -> None:
        """Note by how much a client, whose prompts have changed, has more waiting than one quantum or prompt."""
        client = self._clients.get(name)
        one = 0 if client is None else max(self._quantum_tokens, client.next().tokens)
        beyond = self.waiting.of_client.get(name, 0) - one
        if beyond > 0:
            self.waiting.beyond[name] = beyond
        else:
            self.waiting.beyond.pop(name, None)
