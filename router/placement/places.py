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
from ridgeline.router.fleet.request_route import NoWorker, Route
from ridgeline.router.placement.cluster_state import ClusterState, RouterRequests
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
    Step,
    Wants,
    Wish,
)
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
    """The workers of one attempt, which count it until the place is left. All methods may be called twice."""

    def __init__(self, tell: Callable[[Event], object], asked: _Asked, granted: Granted, *workers: Worker) -> None:
        self.route = granted.route
        """The way it goes."""
        self.prompt_worker = workers[0]
        """The worker that computes the prompt, and the rest too unless the route splits."""
        self.decode_worker = workers[1] if len(workers) > 1 else None
        """The worker that decodes after a hand-off; None unless the route splits."""
        self.assignment = granted.assignment
        """Why these workers, if a policy chose them."""
        self._tell = tell
        self._asked = asked

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
        self._tell(Answered(self._asked.number, answer))

    def _happened(self, step: Step, cached_tokens: int | None = None) -> None:
        if step not in self._asked.steps:
            self._asked.steps.append(step)
            self._tell(Happened(self._asked.number, step, cached_tokens))


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
        self._asked: dict[int, _Asked] = {}

    def route_of(self, wish: Wish) -> Route:
        """Return which way it would go at this moment, as far as this router knows."""
        return self._fleet.route(wish.demand, 0 if wish.probe else self._min_remote_prefill_tokens)

    @asynccontextmanager
    async def place(self, wish: Wish) -> AsyncIterator[Place]:
        """Wait until the prompt may start, and hold its place while the block runs.

        Raises NoWorker if a pool that it needs stays without a worker, and WorkerLost or WorkerDraining if the workers
        that it would get were lost while it waited.
        """
        if avoided := self._avoided():
            wish = replace(wish, demand=replace(wish.demand, avoided=avoided))
        asked = _Asked(next(self._numbers), wish)
        self._asked[asked.number] = asked
        try:
            self._tell(Wants(asked.number, wish))
            granted = await asked.answer
            place = Place(self._tell, asked, granted, *await self._workers_of(granted))
            try:
                yield place
            except (EngineFailed, TaskRejected, WorkerDraining, WorkerLost):
                self._doubt(place)
                raise
        finally:
            del self._asked[asked.number]
            asked.close()
            self._tell(Leaves(asked.number))

    def forget_prefixes(self) -> None:
        """Have it forgotten which worker has which prompts, because the workers' prefix caches were emptied."""
        self._tell(Forgets())

    def take(self, answer: Granted | Denied) -> None:
        """Take the answer to a wish; it may have been withdrawn meanwhile."""
        asked = self._asked.get(answer.number)
        if asked is None or asked.answer.done():
            return
        if isinstance(answer, Denied):
            asked.answer.set_exception(_ERRORS[answer.reason](answer.sentence))
        else:
            asked.answer.set_result(answer)

    def state(self) -> list[Wants | Keeps]:
        """Return all places and wishes, for a dispatcher that does not know them.

        Places come first: else prompts would start where others run that are told of later.
        """
        return sorted((asked.message() for asked in self._asked.values()), key=lambda told: isinstance(told, Wants))

    def give_up(self, why: str) -> None:
        """Fail all prompts that wait."""
        for asked in self._asked.values():
            if not asked.answer.done():
                asked.answer.set_exception(NoWorker(why))

    async def _workers_of(self, granted: Granted) -> list[Worker]:
        """Return the workers that were chosen.

        Raises WorkerLost if this router does not reach one of them, and NoWorker if it has reached none for long.
        """
        found: list[Worker] = []
        for worker_id, incarnation in filter(None, (granted.prompt_worker, granted.decode_worker)):
            known = self._fleet.find(worker_id)
            if known is None or known.description.incarnation != incarnation or not known.reached:
                self._refuse_if_deaf()
                await asyncio.sleep(UNKNOWN_PAUSE_S)
                raise WorkerLost(f"this router has no connection to {worker_id}, incarnation {incarnation}")
            found.append(known)
        return found

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


class _Asked:
    """A wish, the answer, and what has happened since."""

    def __init__(self, number: int, wish: Wish) -> None:
        self.number = number
        self.wish = wish
        self.answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self.steps: list[Step] = []

    def close(self) -> None:
        """Take no answer any more; asyncio would log an error that nobody has asked for."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()

    def message(self) -> Wants | Keeps:
        """Return what a new dispatcher must be told."""
        if not self.answer.done() or self.answer.exception() is not None:
            return Wants(self.number, self.wish)
        granted = self.answer.result()
        decode = None if granted.decode_worker is None else granted.decode_worker[0]
        return Keeps(self.number, self.wish, granted.route, granted.prompt_worker[0], decode, tuple(self.steps))


def own_placement(state: ClusterState, fleet: Fleet, settings: RouterSettings) -> Placement:
    """Return the placement of a router that has a `ClusterState` of its own."""

    def tell(event: Event) -> None:
        if not isinstance(event, Doubts):  # both know the same workers: told late, it would only date a doubt anew
            state.apply(requests, event)

    requests = RouterRequests(lambda answer: placement.take(answer))
    placement = Placement(fleet, settings, tell)
    return placement
