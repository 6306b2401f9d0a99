"""Where the attempts of this router go: asks a `ClusterState` for a place, and tells it what happens there.

`Placement` is the same whether that is in this process (`own_placement`) or in the dispatcher that several
routers share (`ridgeline.router.shared`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from msgspec.structs import replace

from ridgeline.contracts.errors import EngineFailed, TaskRejected, WorkerDraining, WorkerLost
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.request_route import Demand, NoWorker, Route
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.placement_events import (
    Answer,
    Answered,
    Denied,
    Doubts,
    Event,
    Forgets,
    Granted,
    Happened,
    Keeps,
    Leaves,
    Reason,
    Reuse,
    Step,
    Wants,
)
from ridgeline.router.placement.pool_queue import RouterRequests
from ridgeline.router.scheduler.features import Assignment
from ridgeline.router.settings import RouterSettings

UNKNOWN_PAUSE_S = 0.1
"""Pause before a prompt asks again that was given a worker which this router does not reach."""
_ERRORS: dict[Reason, type[Exception]] = {
    "no_worker": NoWorker,
    "lost": WorkerLost,
    "draining": WorkerDraining,
    "failed": NoWorker,
}


class Place:
    """The workers of one attempt, which count it until the place is left. All methods may be called twice.

    Until `begin` it is only wanted, and has no workers.
    """

    route: Route
    """The way it goes."""
    prompt_worker: Worker
    """The worker that computes the prompt, and the rest too unless the route splits."""
    decode_worker: Worker | None
    """The worker that decodes after a hand-off; None unless the route splits."""
    assignment: Assignment | None
    """Why these workers, if a policy chose them."""
    reuse: Reuse | None = None
    """What the worker that computes the prompt had better fetch."""
    kv_source: Worker | None = None
    """The worker that should have it; None if this router does not reach it."""

    def __init__(self, number: int, demand: Demand, tell: Callable[[Event], object]) -> None:
        self.number = number
        self.answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self._demand = demand
        self._tell = tell
        self._steps: list[Step] = []

    def begin(
        self, granted: Granted, kv_source: Worker | None, prompt_worker: Worker, decode_worker: Worker | None = None
    ) -> None:
        """Take the workers that were granted."""
        self.route, self.assignment = granted.route, granted.assignment
        self.reuse, self.kv_source = granted.reuse, kv_source
        self.prompt_worker, self.decode_worker = prompt_worker, decode_worker

    def close(self) -> None:
        """Take no answer any more; asyncio would log an error that nobody has asked for."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()

    def message(self) -> Wants | Keeps:
        """Return what whoever grants places must be told of it."""
        if not self.answer.done() or self.answer.exception() is not None:
            return Wants(self.number, self._demand)
        granted = self.answer.result()
        decode = None if granted.decode_worker is None else granted.decode_worker[0]
        return Keeps(self.number, self._demand, granted.route, granted.prompt_worker[0], decode, tuple(self._steps))

    def prompt_done(self, cached_tokens: int | None = None) -> None:
        """Record that the first token has arrived, so that another prompt may start.

        `cached_tokens` of the prompt were in the prefix cache of the worker that computed it; None if not known.
        """
        self._happened("prompt_done", cached_tokens)

    def prompt_left(self) -> None:
        """Record that the sequence has left the worker that computed its prompt."""
        self._happened("prompt_left")

    def decode_began(self) -> None:
        """Record that the worker that decodes has sent a token, and so reports its blocks."""
        self._happened("decode_began")

    def answered(self, answer: Answer) -> None:
        """Record a complete answer."""
        self._tell(Answered(self.number, answer))

    def _happened(self, step: Step, cached_tokens: int | None = None) -> None:
        if step not in self._steps:
            self._steps.append(step)
            self._tell(Happened(self.number, step, cached_tokens))


class Placement:
    """Gives attempts their places. What the `ClusterState` answers to `tell` goes to `take`."""

    def __init__(
        self,
        fleet: Fleet,
        settings: RouterSettings,
        tell: Callable[[Event], object],
        avoided: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """`avoided`: the workers that this router does not reach, where others may."""
        self._avoided = avoided
        self._fleet = fleet
        self._min_remote_prefill_tokens = settings.router.min_remote_prefill_tokens
        self._recovery_timeout_s = settings.router.recovery_timeout_s
        self._tell = tell
        self._numbers = count(1)
        self._places: dict[int, Place] = {}
        """By number, those that are wanted and those that are held."""

    def route_of(self, demand: Demand) -> Route:
        """Return which way it would go at this moment, as far as this router knows."""
        return self._fleet.route(demand, self._min_remote_prefill_tokens)

    @property
    def prefix_block_tokens(self) -> int:
        """Tokens by which prefixes are compared, as the workers say; 0 if none keeps any."""
        return max((worker.description.prefix_block_tokens for worker in self._fleet.workers), default=0)

    @asynccontextmanager
    async def place(self, demand: Demand) -> AsyncIterator[Place]:
        """Wait until the prompt may start, and hold its place while the block runs.

        Raises NoWorker if a pool that it needs stays without a worker, and WorkerLost or WorkerDraining if the workers
        that it would get were lost while it waited.
        """
        if avoided := self._avoided():
            demand = replace(demand, avoided=avoided)
        place = Place(next(self._numbers), demand, self._tell)
        self._places[place.number] = place
        try:
            self._tell(place.message())
            granted = await place.answer
            place.begin(granted, self._source_of(granted), *await self._workers_of(granted))
            try:
                yield place
            except (EngineFailed, TaskRejected, WorkerDraining, WorkerLost):
                self._doubt(place)
                raise
        finally:
            del self._places[place.number]
            place.close()
            self._tell(Leaves(place.number))

    def forget_prefixes(self) -> None:
        """Have it forgotten which worker has which prompts, because the workers' prefix caches were emptied."""
        self._tell(Forgets())

    def take(self, answer: Granted | Denied) -> None:
        """Take the answer for a place; it may not be wanted any more."""
        place = self._places.get(answer.number)
        if place is None or place.answer.done():
            return
        if isinstance(answer, Denied):
            place.answer.set_exception(_ERRORS[answer.reason](answer.sentence))
        else:
            place.answer.set_result(answer)

    def state(self) -> list[Wants | Keeps]:
        """Return all places, held or wanted, for a dispatcher that does not know them.

        Those that are held come first: else prompts would start where others run that are told of later.
        """
        return sorted((place.message() for place in self._places.values()), key=lambda told: isinstance(told, Wants))

    def give_up(self, why: str) -> None:
        """Fail all prompts that wait."""
        for place in self._places.values():
            if not place.answer.done():
                place.answer.set_exception(NoWorker(why))

    async def _workers_of(self, granted: Granted) -> list[Worker]:
        """Return the workers that were chosen.

        Raises WorkerLost if this router does not reach one of them, and NoWorker if it has reached none for long.
        """
        found: list[Worker] = []
        for worker_id, incarnation in filter(None, (granted.prompt_worker, granted.decode_worker)):
            known = self._reached(worker_id, incarnation)
            if known is None:
                self._refuse_if_deaf()
                await asyncio.sleep(UNKNOWN_PAUSE_S)
                raise WorkerLost(f"this router has no connection to {worker_id}, incarnation {incarnation}")
            found.append(known)
        return found

    def _source_of(self, granted: Granted) -> Worker | None:
        wanted = granted.reuse
        return None if wanted is None else self._reached(wanted.worker_id, wanted.incarnation)

    def _reached(self, worker_id: str, incarnation: str) -> Worker | None:
        known = self._fleet.find(worker_id)
        if known is None or known.description.incarnation != incarnation or not known.reached:
            return None
        return known

    def _refuse_if_deaf(self) -> None:
        if min((worker.unreached_s for worker in self._fleet.workers), default=0.0) > self._recovery_timeout_s:
            raise NoWorker(
                f"this router has reached no worker for {self._recovery_timeout_s:.0f} s (router.recovery_timeout_s): "
                "retry. Operators: check the network from this router to the workers (GET /ridgeline/workers)"
            )

    def _doubt(self, place: Place) -> None:
        for worker in filter(None, (place.prompt_worker, place.decode_worker)):
            if worker.in_doubt:
                self._tell(Doubts(worker.worker_id, worker.description.incarnation))


def own_placement(state: ClusterState, fleet: Fleet, settings: RouterSettings) -> Placement:
    """Return the placement of a router that has a `ClusterState` of its own."""

    def tell(event: Event) -> None:
        if not isinstance(event, Doubts):  # both know the same workers: told late, it would only date a doubt anew
            state.apply(requests, event)

    requests = RouterRequests(lambda answer: placement.take(answer))
    placement = Placement(fleet, settings, tell)
    return placement
