"""When a prompt starts and on which workers: what `router.dispatch` asks for each attempt.

`LocalPlacement` decides in this process. If several routers serve one deployment, it runs in their dispatcher, and each
router asks there (`router.shared`), so that windows, slots and the order among clients hold for all of them together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from contracts.errors import WorkerDraining, WorkerLost
from contracts.vocabulary import Pool
from router.fleet.fleet import Fleet, Worker
from router.fleet.policy import (
    DECODE_SCORER,
    SPLIT,
    Demand,
    NoWorker,
    Rerouted,
    Route,
    blocks_needed,
    distance,
    pick,
    prompt_blocks,
)
from router.fleet.worker import PromptReservation
from router.flow.prompt_queue import PromptQueue, PromptTurn
from router.settings import RouterSettings


@dataclass(frozen=True)
class Wish:
    """A prompt that wants to start."""

    demand: Demand
    urgent: bool = False
    """Whether it goes before all others."""
    canary: bool = False
    """Whether it goes through prefill however short it is."""


class Place(Protocol):
    """The workers of one attempt, which count it until the place is left."""

    @property
    def route(self) -> Route:
        """The way it goes."""
        ...

    @property
    def prompt_worker(self) -> Worker:
        """The worker that computes the prompt, and the rest too unless the route is `SPLIT`."""
        ...

    @property
    def decode_worker(self) -> Worker | None:
        """The worker that decodes after a hand-off; None if the route is another one than `SPLIT`."""
        ...

    def prompt_done(self) -> None:
        """Record that the first token has arrived, so that another prompt may start. May be called twice."""
        ...

    def prompt_left(self) -> None:
        """Record that the sequence has left the worker that computed its prompt. May be called twice."""
        ...

    def decode_began(self) -> None:
        """Record that the worker that decodes has sent a token, and so reports its blocks. May be called twice."""
        ...


class Placement(Protocol):
    """Gives attempts their places."""

    def route_of(self, wish: Wish) -> Route:
        """Return which way it would go at this moment."""
        ...

    def place(self, wish: Wish) -> AbstractAsyncContextManager[Place]:
        """Wait until the prompt may start, and hold its place while the block runs.

        Decode is chosen together with prefill. Raises NoWorker if a pool that it needs stays without a worker, and
        WorkerLost or WorkerDraining if the workers that would decode were lost while it waited.
        """
        ...


class LocalPlacement:
    """Gives places on the workers of a fleet, by its queues."""

    def __init__(self, fleet: Fleet, queues: Mapping[Pool, PromptQueue], settings: RouterSettings) -> None:
        self._fleet = fleet
        self._queues = queues
        self._min_remote_prefill_tokens = settings.min_remote_prefill_tokens
        self._recovery_timeout_s = settings.recovery_timeout_s

    def route_of(self, wish: Wish) -> Route:
        """Return which way it would go at this moment."""
        return self._fleet.route(wish.demand, 0 if wish.canary else self._min_remote_prefill_tokens)

    @asynccontextmanager
    async def place(self, wish: Wish) -> AsyncIterator[Place]:
        """Wait for a place on the route that is right at the moment; on another one if that changes meanwhile."""
        while True:
            route = self.route_of(wish)
            began = False
            try:
                async with self._on(route, wish) as place:
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
    async def _on(self, route: Route, wish: Wish) -> AsyncIterator[Place]:
        splits = route == SPLIT
        if splits:  # do not prefill while it is not known whether there is a worker to decode
            await self._fleet.wait_until_usable("decode", self._recovery_timeout_s)
        turn = self._queues[route.prompt_pool].turn(wish.demand, urgent=wish.urgent, decodes_here=not splits)
        async with turn as granted:
            with ExitStack() as decoding:
                decode = self._take_decode(wish.demand, granted, decoding) if splits else None
                yield _LocalPlace(route, granted, decode)

    @contextmanager
    def keep(self, wish: Wish, route: Route, prompt_worker: Worker, decode_worker: Worker | None) -> Iterator[Place]:
        """Count a place that is in use already, because another dispatcher had given it, while the block runs."""
        with ExitStack() as held:
            queue = self._queues[route.prompt_pool]
            turn = queue.seat(wish.demand, prompt_worker, decodes_here=decode_worker is None)
            held.callback(turn.close)
            decode = None if decode_worker is None else _count_decode(wish.demand, turn, decode_worker, held)
            yield _LocalPlace(route, turn, decode)

    def _take_decode(self, demand: Demand, turn: PromptTurn, held: ExitStack) -> _Decode:
        """Pick a worker by the KV blocks that the sequence will need, half of its answer included, by its load and how
        near it is, and count it there.

        Its place in the batch came with the turn. Raises WorkerLost or WorkerDraining if no worker is left, and
        Rerouted if there is no such pool any more.
        """
        pool = self._fleet.usable("decode")
        if not pool and self._fleet.mode != "disaggregated":
            raise Rerouted("the mode was changed while the prompt waited for its turn")
        if not pool:
            leaves = any(worker.load().draining for worker in self._fleet.pool("decode"))
            gone = WorkerDraining if leaves else WorkerLost
            raise gone("the decode workers were lost while the prompt waited for its turn")
        here = turn.worker.description
        loads = [one.load(distance(here, one.description)) for one in pool]
        worker = self._fleet.get(pick(demand, loads, DECODE_SCORER))
        return _count_decode(demand, turn, worker, held)


def _count_decode(demand: Demand, turn: PromptTurn, worker: Worker, held: ExitStack) -> _Decode:
    slot = turn.take_slot()
    held.callback(slot.release)
    slot.on(worker)
    block_size_tokens = worker.description.block_size_tokens
    reserved = worker.reserve(
        promised_blocks=blocks_needed(demand, block_size_tokens),
        held_blocks=prompt_blocks(demand, block_size_tokens),
    )
    return _Decode(worker, held.enter_context(reserved))


@dataclass(frozen=True)
class _Decode:
    worker: Worker
    counted: PromptReservation


class _LocalPlace:
    """A turn on the worker that computes the prompt, and what is reserved on the one that decodes."""

    def __init__(self, route: Route, turn: PromptTurn, decode: _Decode | None) -> None:
        self.route = route
        self.prompt_worker = turn.worker
        self.decode_worker = decode.worker if decode else None
        self._turn = turn
        self._decode = decode

    def prompt_done(self) -> None:
        """Record that the first token has arrived."""
        self._turn.prompt_done()

    def prompt_left(self) -> None:
        """Record that the sequence has left the worker that computed its prompt."""
        self._turn.close()

    def decode_began(self) -> None:
        """Record that the worker that decodes has sent a token."""
        if self._decode is not None:
            self._decode.counted.prompt_done()
