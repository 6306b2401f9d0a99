"""Decides before any work whether a request is accepted; one that cannot fit, or would wait too long, is refused.

The rules are in `admission_rules.py`. `Admission` makes the snapshot that they judge, and counts what is accepted and
refused. vLLM's server asks twice: before it has tokenised the prompt (`check`), and then with the tokens (`admit`).

An accepted prompt is promised the wait at that moment. A client that comes later takes no more than its fair share
(`router/flow/fair_queue.py`), and is refused itself if that share would make it wait too long. So n clients together
have at most (1 + 1/2 + ... + 1/n) * `max_queue_time_s` of prompts waiting, and one client alone at most
`max_queue_time_s`.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.flow.admission_rules import (
    LEFT_WINDOW_S,
    AdmissionState,
    Ask,
    ListSoFar,
    Refused,
    Snapshot,
    WorkerTotals,
    decide,
    refuse_beyond_the_clients_share,
    share_of,
)
from ridgeline.router.flow.rates import FadingAmount
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.settings import RouterSettings

DRAIN_WINDOW_S = 10.0
LOOK_EVERY_S = 0.02
"""For how long one look at the workers serves a router's admission: they report every 0.5 s."""


LEFT_STEPS = 1024
"""In so many steps to one, what clients left is told: a power of two, so that sums and differences are exact."""


class Held(msgspec.Struct, array_like=True):
    """What a client has admitted and not ended."""

    sequences: int = 0
    blocks: int = 0
    left: float = 0.0
    """Sequences that it left recently before they had ended."""

    def plus(self, other: Held) -> Held:
        """Return the sum."""
        return Held(self.sequences + other.sequences, self.blocks + other.blocks, self.left + other.left)

    def without(self, other: Held) -> Held:
        """Return the difference."""
        return Held(self.sequences - other.sequences, self.blocks - other.blocks, self.left - other.left)


class Holdings(msgspec.Struct):
    """What is admitted and not ended, for all clients and for each, and how fast it ends."""

    all: Held = msgspec.field(default_factory=Held)
    of_client: dict[str, Held] = {}
    sequences_per_s: float = 0.0
    blocks_per_s: float = 0.0

    def of(self, client: str) -> Held:
        """Return what a client holds."""
        return self.of_client.get(client) or Held()

    def put(self, client: str, held: Held) -> None:
        """Change what a client holds."""
        self.all = self.all.plus(held.without(self.of(client)))
        if held == Held():
            self.of_client.pop(client, None)
        else:
            self.of_client[client] = held


class Wait(Protocol):
    """What admission asks of a pool's queue: `ridgeline.router.placement.pool_queue.PoolQueue`, or `QueueNow`."""

    def wait_s(self, client: str, prompt_tokens: int, before_tokens: int = 0) -> float | None:
        """Estimate the seconds that a prompt would wait behind others of its request; None until measured."""
        ...


class Admission:
    """The requests that this router has accepted; one object per router process."""

    def __init__(
        self,
        settings: RouterSettings,
        queues: Mapping[Pool, Wait],
        fleet: Fleet,
        metrics: RequestMetrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        look_every_s: float = 0.0,
    ) -> None:
        """`look_every_s`: for how long one look at the workers serves, since there are three with each request."""
        self._look_every_s = look_every_s
        self._looks: dict[tuple[Pool, Pool], tuple[float, WorkerTotals]] = {}
        """The last look at the workers that answer and that compute a prompt, and when it was."""
        self.state: AdmissionState = "not_ready"
        self._limits = settings.router
        self._min_remote_prefill_tokens = settings.router.min_remote_prefill_tokens
        self._queues = queues
        self._fleet = fleet
        self._metrics = metrics
        self._held: dict[str, Held] = {}
        """What each client holds here; clients that hold nothing are left out."""
        self._all = Held()
        self.others = Holdings()
        """What other routers of the deployment hold, as of a moment ago."""
        self._left: dict[str, FadingAmount] = {}
        """For each client, the sequences that it left recently before they had ended."""
        self._clock = clock
        self._ended_sequences = FadingAmount(clock, DRAIN_WINDOW_S)
        self._ended_blocks = FadingAmount(clock, DRAIN_WINDOW_S)

    def check(self, client: str, sequences: int) -> None:
        """Raise Refused if a request of this client would be refused, as far as can be told without its prompt."""
        pools: set[Pool] = {self._prompt_pool(0), self._prompt_pool(self._min_remote_prefill_tokens)}
        waits_s = [self._queues[pool].wait_s(client, 0) for pool in pools]
        shortest_s = None if None in waits_s else min(wait_s for wait_s in waits_s if wait_s is not None)
        with self._refusals_counted():
            decide(Ask(sequences), self._snapshot(client, self._prompt_pool(0), shortest_s), self._limits)

    def check_share(self, client: str, coming: int) -> None:
        """Raise Refused if one more request of this client would exceed its share, counting those still coming."""
        if self._limits.max_client_share >= 1 or self.state != "open":
            return
        if not (client in self._held or client in self._left or client in self.others.of_client or coming):
            return
        now = self._snapshot(client, self._prompt_pool(0), None)
        if now.workers.usable:
            with self._refusals_counted():
                refuse_beyond_the_clients_share(Ask(1 + coming), now, self._limits)

    @property
    def most_of_one_client(self) -> int:
        """How many sequences one client may have served at the same time if it is alone."""
        return share_of(self._limits.max_concurrent_requests, self._limits)

    @property
    def sequences(self) -> int:
        """Sequences accepted and not ended."""
        return self._all.sequences

    def holdings(self) -> Holdings:
        """Return what this router holds, for the other routers."""
        self._forget_who_left_long_ago()
        own = {client: Held(held.sequences, held.blocks) for client, held in self._held.items()}
        for client, left in self._left.items():
            own.setdefault(client, Held()).left = round(left.amount * LEFT_STEPS) / LEFT_STEPS
        return Holdings(
            of_client=own,
            sequences_per_s=round(self._ended_sequences.per_s, 3),
            blocks_per_s=round(self._ended_blocks.per_s, 3),
        )

    def admit(self, client: str, ask: Ask) -> AdmissionTicket:
        """Accept a request until its ticket is released. Raises Refused."""
        pool = self._prompt_pool(ask.prompt_tokens)
        wait_s = self._queues[pool].wait_s(client, ask.prompt_tokens, ask.tokens_before_the_last)
        now = self._snapshot(client, pool, wait_s)
        with self._refusals_counted():
            decide(ask, now, self._limits)
        blocks = now.workers.blocks_of(ask.prompt_tokens)
        self._count(client, ask.sequences, blocks)

        def give_back(ended: int, left: bool) -> None:
            self._count(client, -ended, blocks)
            if left:
                self._left.setdefault(client, FadingAmount(self._clock, LEFT_WINDOW_S)).add(ended)

        return AdmissionTicket(ask.sequences, give_back, ask.before.plus(ask, blocks))

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        try:
            yield
        except Refused as refused:
            self._metrics.rejected.labels(refused.reason).inc()
            raise

    def _count(self, client: str, sequences: int, blocks_each: int) -> None:
        held = self._held.setdefault(client, Held())
        for one in (held, self._all):
            one.sequences += sequences
            one.blocks += sequences * blocks_each
        if not held.sequences:
            del self._held[client]
        self._ended_sequences.add(max(0, -sequences))
        self._ended_blocks.add(max(0, -sequences) * blocks_each)

    def _prompt_pool(self, prompt_tokens: int) -> Pool:
        """Return the pool that would compute a prompt of this length."""
        return self._fleet.route(Demand(prompt_tokens), self._min_remote_prefill_tokens).prompt_pool

    def _snapshot(self, client: str, prompt_pool: Pool, prompt_wait_s: float | None) -> Snapshot:
        own, elsewhere = self._held.get(client, Held()), self.others.of_client.get(client, Held())
        accepted_blocks = self._all.blocks + self.others.all.blocks
        answer_pool = self._fleet.answer_pool
        found = self._look(answer_pool, prompt_pool)
        # What workers report, plus what they cannot report yet: what was sent there recently or waits here. Prompts
        # with a shared prefix use its blocks once, which only the reports show.
        taken = found.reported_blocks + found.promised_blocks + max(0, accepted_blocks - found.held_blocks)
        blocks = min(accepted_blocks, taken)
        return Snapshot(
            state=self.state,
            answer_pool=answer_pool,
            workers=found,
            sequences=self._all.sequences + self.others.all.sequences,
            client_sequences=own.sequences + elsewhere.sequences,
            prompt_blocks=blocks,
            client_blocks=(own.blocks + elsewhere.blocks) * blocks // max(1, accepted_blocks),
            client_left=int(self._left_by(client) + elsewhere.left),
            sequences_per_s=self._ended_sequences.per_s + self.others.sequences_per_s,
            blocks_per_s=self._ended_blocks.per_s + self.others.blocks_per_s,
            prompt_wait_s=prompt_wait_s,
        )

    def _look(self, answer_pool: Pool, prompt_pool: Pool) -> WorkerTotals:
        """Return the sums over the workers.

        They may be a moment old: what was accepted since is not lost, it counts as waiting.
        """
        now_s = self._clock()
        looked_s, found = self._looks.get((answer_pool, prompt_pool), (-math.inf, None))
        if found is None or now_s - looked_s >= self._look_every_s:
            found = _look_at(self._fleet.pool(answer_pool), self._fleet.pool(prompt_pool))
            self._looks[answer_pool, prompt_pool] = now_s, found
        return found

    def _left_by(self, client: str) -> float:
        self._forget_who_left_long_ago()
        return self._left[client].amount if client in self._left else 0.0

    def _forget_who_left_long_ago(self) -> None:
        for name in [name for name, left in self._left.items() if left.amount < 1]:
            del self._left[name]


def _look_at(answer: Sequence[Worker], prompt: Sequence[Worker]) -> WorkerTotals:
    found = WorkerTotals()
    for worker in answer:
        blocks = worker.description.num_kv_blocks
        found.block_size, found.groups = worker.description.layout.block_size, worker.description.layout.groups
        found.all_blocks += blocks
        found.largest_blocks = max(found.largest_blocks, blocks)
        if worker.usable:
            found.usable += 1
            found.usable_blocks += blocks
            found.reported_blocks += blocks - worker.kv_blocks_free
            found.promised_blocks += worker.outstanding.promised_blocks
            found.held_blocks += worker.outstanding.held_blocks
    found.largest_prompt_blocks = max((worker.description.num_kv_blocks for worker in prompt), default=0)
    return found


class AdmissionTicket:
    """One accepted request.

    Each of its sequences is given back once, when it has ended on the workers, whether or not its client has read it.
    The remaining ones are given back when the ticket is dropped.

    A client may leave between the acceptance of its request and the start of its answer, or a later prompt of the
    same list may be refused. The generator that would have served it is then never started, only dropped. Such
    sequences never reached a worker, so they do not count as left.
    """

    def __init__(self, sequences: int, give_back: Callable[[int, bool], None], list_so_far: ListSoFar) -> None:
        """`give_back` receives how many sequences have ended, and whether they were left before their end."""
        self.list_so_far = list_so_far
        """What is before the next prompt of the same list."""
        self._rest = [sequences]
        self._give_back = give_back
        self._finalizer = weakref.finalize(self, _give_back_rest, self._rest, give_back)
        self._finalizer.atexit = False

    def sequence_ended(self, *, left: bool = False) -> None:
        """Give back one sequence that has ended, or that was `left` before its end."""
        if self._rest[0]:
            self._rest[0] -= 1
            self._give_back(1, left)

    def release(self) -> None:
        """Give back all remaining sequences. May be called twice."""
        self._finalizer()


def _give_back_rest(rest: list[int], give_back: Callable[[int, bool], None]) -> None:
    number, rest[0] = rest[0], 0
    if number:
        give_back(number, False)
