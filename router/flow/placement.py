"""When a prompt starts and on which workers: what `ridgeline.router.dispatch` asks for each attempt.

`LocalPlacement` decides in this process. If several routers serve one deployment, it runs in their dispatcher, and each
router asks there (`ridgeline.router.shared`), so that windows, slots and the order among clients hold for all of them
together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ridgeline.contracts.errors import WorkerDraining, WorkerLost
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.policy import (
    ADAPTIVE_SPLIT,
    ADAPTIVE_WHOLE,
    DECODE_SCORER,
    SPLIT,
    Demand,
    NoWorker,
    Rerouted,
    Route,
    distance,
    pick,
)
from ridgeline.router.fleet.prefixes import BlockHashes
from ridgeline.router.flow.learned import Learned
from ridgeline.router.flow.prompt_queue import DecodeSeat, PromptQueue, PromptTurn
from ridgeline.router.scheduler.features import Assignment
from ridgeline.router.scheduler.traffic import Seen
from ridgeline.router.settings import RouterSettings


@dataclass(frozen=True)
class Wish:
    """A prompt that wants to start."""

    demand: Demand
    urgent: bool = False
    """Whether it goes before all others."""
    probe: bool = False
    """Whether it goes through prefill however short it is."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What is learned from a complete answer."""

    output_tokens: int
    kv_bytes: int = 0
    """Of its hand-off, if it was whole."""
    wire_s: float = 0.0
    """The seconds that took."""
    prefix: BlockHashes = ()
    """The blocks of prompt and answer together, which the worker that decoded has now."""
    outside_s: float | None = None
    """See `RequestTimeline.outside_s`."""
    ttft_s: float | None = None
    """What its client saw; None without any token."""
    tpot_s: float | None = None
    """None with less than two tokens."""


class Place(Protocol):
    """The workers of one attempt, which count it until the place is left."""

    @property
    def route(self) -> Route:
        """The way it goes."""
        ...

    @property
    def prompt_worker(self) -> Worker:
        """The worker that computes the prompt, and the rest too unless the route splits."""
        ...

    @property
    def decode_worker(self) -> Worker | None:
        """The worker that decodes after a hand-off; None unless the route splits."""
        ...

    @property
    def assignment(self) -> Assignment | None:
        """Why these workers, if a policy chose them."""
        ...

    def prompt_done(self, cached_tokens: int | None = None) -> None:
        """Record that the first token has arrived, so that another prompt may start. May be called twice.

        `cached_tokens` of the prompt were in the prefix cache of the worker that computed it; None if not known.
        """
        ...

    def prompt_left(self) -> None:
        """Record that the sequence has left the worker that computed its prompt. May be called twice."""
        ...

    def decode_began(self) -> None:
        """Record that the worker that decodes has sent a token, and so reports its blocks. May be called twice."""
        ...

    def answered(self, answer: Answer) -> None:
        """Record a complete answer."""
        ...


class Placement(Protocol):
    """Gives attempts their places."""

    def route_of(self, wish: Wish) -> Route:
        """Return which way it would go at this moment."""
        ...

    def forget_prefixes(self) -> None:
        """Forget which worker has which prompts, because the workers' prefix caches were emptied."""
        ...

    def place(self, wish: Wish) -> AbstractAsyncContextManager[Place]:
        """Wait until the prompt may start, and hold its place while the block runs.

        Decode is chosen together with prefill. Raises NoWorker if a pool that it needs stays without a worker, and
        WorkerLost or WorkerDraining if the workers that would decode were lost while it waited.
        """
        ...


class LocalPlacement:
    """Gives places on the workers of a fleet, by its queues."""

    def __init__(
        self,
        fleet: Fleet,
        queues: Mapping[Pool, PromptQueue],
        settings: RouterSettings,
        learned: Learned | None = None,
    ) -> None:
        """`learned` is told of complete answers."""
        self._fleet = fleet
        self._queues = queues
        self._learned = learned or Learned(settings.block_size_tokens)
        self._min_remote_prefill_tokens = settings.router.min_remote_prefill_tokens
        self._recovery_timeout_s = settings.router.recovery_timeout_s

    def forget_prefixes(self) -> None:
        """Forget which worker has which prompts."""
        self._learned.prefixes.forget_all()

    def _forget_removed_workers(self) -> None:
        there = [worker.worker_id for worker in self._fleet.workers]
        self._learned.forget_all_but(there)
        for queue in self._queues.values():
            queue.forget_all_but(there)

    def route_of(self, wish: Wish) -> Route:
        """Return which way it would go at this moment."""
        return self._fleet.route(wish.demand, 0 if wish.probe else self._min_remote_prefill_tokens)

    @asynccontextmanager
    async def place(self, wish: Wish) -> AsyncIterator[Place]:
        """Wait for a place on the route that is right at the moment; on another one if that changes meanwhile."""
        self._forget_removed_workers()
        seen = None if wish.probe or wish.urgent else self._arrived(wish.demand)
        while True:
            route = self.route_of(wish)
            began = False
            try:
                async with self._on(route, wish, seen) as place:
                    began = True
                    yield place
                    return
            except Rerouted:
                if began:
                    raise
            except NoWorker:  # the pool was lost while the prompt waited
                if began or self.route_of(wish) == route:
                    raise

    @asynccontextmanager
    async def _on(self, route: Route, wish: Wish, seen: Seen | None) -> AsyncIterator[Place]:
        splits = route == SPLIT
        if splits:  # do not prefill while it is not known whether there is a worker to decode
            await self._fleet.wait_until_usable("decode", self._recovery_timeout_s)
        turn = self._queues[route.prompt_pool].turn(wish.demand, urgent=wish.urgent, decodes_here=not splits)
        async with turn as granted:
            with ExitStack() as decoding:
                decode = self._decode_of(wish.demand, granted) if splits or granted.splits else None
                if decode is not None:
                    decoding.callback(decode.close)
                if decode is not None and route == ADAPTIVE_WHOLE:
                    route = ADAPTIVE_SPLIT
                yield _LocalPlace(route, granted, decode, None if wish.probe else self._learned, seen)

    def _arrived(self, demand: Demand) -> Seen:
        return self._learned.traffic.arrived(
            demand.prompt_tokens, demand.ttft_limit_s, demand.tpot_limit_s, demand.waited_s
        )

    @contextmanager
    def keep(self, wish: Wish, route: Route, prompt_worker: Worker, decode_worker: Worker | None) -> Iterator[Place]:
        """Count a place that is in use already, because another dispatcher had given it, while the block runs."""
        with ExitStack() as held:
            queue = self._queues[route.prompt_pool]
            turn = queue.seat(wish.demand, prompt_worker, decode_worker or prompt_worker)
            held.callback(turn.close)
            decode = turn.take_decode() if turn.splits else None
            if decode is not None:
                held.callback(decode.close)
            yield _LocalPlace(route, turn, decode, None if wish.probe else self._learned)

    def _decode_of(self, demand: Demand, turn: PromptTurn) -> DecodeSeat:
        """Return the place where the sequence is decoded, and close it.

        If none came with the turn, pick a worker by the KV blocks that the sequence will need, half of its answer
        included, by its load and how near it is. Raises WorkerLost or WorkerDraining if no worker is left, and
        Rerouted if there is no such pool any more.
        """
        if turn.splits:
            return turn.take_decode()
        pool = self._fleet.usable("decode")
        if not pool and self._fleet.mode != "disaggregated":
            raise Rerouted("the mode was changed while the prompt waited for its turn")
        if not pool:
            leaves = any(worker.load().draining for worker in self._fleet.pool("decode"))
            gone = WorkerDraining if leaves else WorkerLost
            raise gone("the decode workers were lost while the prompt waited for its turn")
        here = turn.worker.description
        loads = [one.load(distance(here, one.description)) for one in pool]
        return turn.decode_on(self._fleet.get(pick(demand, loads, DECODE_SCORER)))


class _LocalPlace:
    """A turn on the worker that computes the prompt, and what is reserved on the one that decodes."""

    def __init__(
        self,
        route: Route,
        turn: PromptTurn,
        decode: DecodeSeat | None,
        learned: Learned | None,
        seen: Seen | None = None,
    ) -> None:
        """`learned` is told what becomes of it; None for a probe, since its size says nothing of clients' requests.

        `seen` is the request among the traffic, if this is its first attempt.
        """
        self._seen = seen
        self._learned = learned
        self.route = route
        self.assignment = turn.assignment
        self.prompt_worker = turn.worker
        self.decode_worker = decode.worker if decode else None
        self._turn = turn
        self._decode = decode

    def prompt_done(self, cached_tokens: int | None = None) -> None:
        """Record that the first token has arrived."""
        self._turn.prompt_done()
        if self._decode is not None:
            self._decode.first_token_made()
        if self._learned is None:
            return
        worker, demand = self.prompt_worker.description, self._turn.demand
        if cached_tokens is not None:
            if self.assignment is not None:
                self._learned.had(worker, demand.prefix, cached_tokens, self.assignment.cached_tokens)
            if self._seen is not None:
                self._learned.traffic.computed(self._seen, demand.prompt_tokens, cached_tokens)
        self._learned.computed(worker, demand.prefix)

    def prompt_left(self) -> None:
        """Record that the sequence has left the worker that computed its prompt."""
        self._turn.close()

    def decode_began(self) -> None:
        """Record that the worker that decodes has sent a token."""
        if self._decode is not None:
            self._decode.began()

    def answered(self, answer: Answer) -> None:
        """Record a complete answer."""
        if self._learned is None:
            return
        self._learned.answered(self._turn.demand, answer.output_tokens)
        if self._seen is not None:
            self._learned.traffic.answered(self._seen, answer.output_tokens, answer.ttft_s, answer.tpot_s)
        if self.assignment is not None and answer.outside_s is not None:
            self._learned.was_outside(answer.outside_s)
        decoded = self.decode_worker or self.prompt_worker
        self._learned.computed(decoded.description, answer.prefix)
        if self.decode_worker is not None:
            self._learned.moved(self.prompt_worker.worker_id, decoded.worker_id, answer.kv_bytes, answer.wire_s)
