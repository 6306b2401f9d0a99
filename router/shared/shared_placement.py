"""Places from the dispatcher: what `router.flow.placement.LocalPlacement` is where one router serves alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from itertools import count

from ridgeline.contracts.errors import EngineFailed, TaskRejected, WorkerDraining, WorkerLost
from ridgeline.router.fleet.fleet import Fleet, Worker
from ridgeline.router.fleet.policy import NoWorker, Route
from ridgeline.router.flow.placement import Answer, Place, Wish
from ridgeline.router.settings import RouterSettings
from ridgeline.router.shared.link import Link
from ridgeline.router.shared.messages import (
    Answered,
    Asked,
    Denied,
    Doubts,
    Forgets,
    Granted,
    Happened,
    Keeps,
    Leaves,
    Reason,
    Step,
    Up,
    Wants,
    WayOf,
)

LOOK_EVERY_S = 1.0
"""How often a router whose prompts wait looks whether there is a dispatcher."""
LATE_S = 1.0
"""If it looks so much later than it meant to, this router stood still."""
UNKNOWN_PAUSE_S = 0.1
"""Pause before a prompt asks again that was given a worker which this router does not reach."""
_ERRORS: dict[Reason, type[Exception]] = {
    "no_worker": NoWorker,
    "lost": WorkerLost,
    "draining": WorkerDraining,
    "failed": NoWorker,
}


class SharedPlacement:
    """Asks the dispatcher for places. Its messages go over the link, which gives it the answers."""

    def __init__(self, fleet: Fleet, link: Link, settings: RouterSettings) -> None:
        self._fleet = fleet
        self._link = link
        self._min_remote_prefill_tokens = settings.router.min_remote_prefill_tokens
        self._recovery_timeout_s = settings.router.recovery_timeout_s
        self._numbers = count(1)
        self._wishes: dict[int, _Wished] = {}
        self.placed_on: AbstractSet[str] = frozenset()
        """The workers that the dispatcher chooses from, as it last told."""

    def route_of(self, wish: Wish) -> Route:
        """Return which way it would go at this moment, as far as this router knows."""
        return self._fleet.route(wish.demand, 0 if wish.probe else self._min_remote_prefill_tokens)

    @asynccontextmanager
    async def place(self, wish: Wish) -> AsyncIterator[Place]:
        """Have the dispatcher choose a place, and hold it while the block runs.

        Raises NoWorker also if there has been no dispatcher for `router.recovery_timeout_s`.
        """
        number = next(self._numbers)
        wished = self._wishes[number] = _Wished(self._asked(wish))
        self._link.send(Wants(number, wished.asked))
        try:
            granted = await wished.answer
            place = _SharedPlace(self._link, number, wished, granted, *await self._workers_of(granted))
            try:
                yield place
            except (EngineFailed, TaskRejected, WorkerDraining, WorkerLost):
                self._doubt(place)
                raise
        finally:
            del self._wishes[number]
            wished.close()
            self._link.send(Leaves(number))

    def forget_prefixes(self) -> None:
        """Have the dispatcher forget which worker has which prompts."""
        self._link.send(Forgets())

    def state(self) -> list[Up]:
        """Return all wishes and places, for a dispatcher that does not know them."""
        return [wished.message(number) for number, wished in self._wishes.items()]

    def take(self, answer: Granted | Denied) -> None:
        """Take the dispatcher's answer to a wish; it may have been withdrawn meanwhile."""
        wished = self._wishes.get(answer.number)
        if wished is None or wished.answer.done():
            return
        if isinstance(answer, Denied):
            wished.answer.set_exception(_ERRORS[answer.reason](answer.sentence))
        else:
            wished.answer.set_result(answer)

    def _asked(self, wish: Wish) -> Asked:
        reached = {worker.worker_id for worker in self._fleet.workers if worker.reached}
        known = {worker.worker_id for worker in self._fleet.workers}
        avoided = tuple((known | self.placed_on) - reached)
        demand = wish.demand
        return Asked(
            demand.prompt_tokens,
            demand.output_tokens,
            demand.client,
            wish.urgent,
            wish.probe,
            avoided,
            demand.ttft_limit_s,
            demand.tpot_limit_s,
            demand.waited_s,
            demand.prefix,
        )

    async def give_up_without_a_dispatcher(self) -> None:
        """Fail all waiting prompts once there has been no dispatcher for too long; runs until cancelled."""
        while True:
            due_s = time.monotonic() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            stood_still = time.monotonic() - due_s > LATE_S  # then it was this router that could not hear
            if stood_still or self._link.away_s <= self._recovery_timeout_s:
                continue
            why = (
                f"there has been no dispatcher at {self._link.address} for {self._recovery_timeout_s:.0f} s "
                "(router.recovery_timeout_s): retry. Operators: serve's log says why the dispatcher does not start"
            )
            for wished in self._wishes.values():
                if not wished.answer.done():
                    wished.answer.set_exception(NoWorker(why))

    async def _workers_of(self, granted: Granted) -> tuple[Worker, Worker | None]:
        """Return the workers that were chosen.

        Raises WorkerLost if this router does not reach one of them, and NoWorker if it has reached none for long.
        """
        found: list[Worker] = []
        for worker_id, incarnation in filter(None, (granted.prompt_worker, granted.decode_worker)):
            known = next((one for one in self._fleet.workers if one.worker_id == worker_id), None)
            if known is None or known.description.incarnation != incarnation or not known.reached:
                self._refuse_if_deaf()
                await asyncio.sleep(UNKNOWN_PAUSE_S)
                raise WorkerLost(f"this router has no connection to {worker_id}, incarnation {incarnation}")
            found.append(known)
        return found[0], found[1] if len(found) > 1 else None

    def _refuse_if_deaf(self) -> None:
        if min((worker.unreached_s for worker in self._fleet.workers), default=0.0) > self._recovery_timeout_s:
            raise NoWorker(
                f"this router has reached no worker for {self._recovery_timeout_s:.0f} s (router.recovery_timeout_s): "
                "retry. Operators: check the network from this router to the workers (GET /ridgeline/workers)"
            )

    def _doubt(self, place: _SharedPlace) -> None:
        for worker in filter(None, (place.prompt_worker, place.decode_worker)):
            if worker.load().in_doubt:
                self._link.send(Doubts(worker.worker_id))


class _Wished:
    """A wish, the answer, and what has happened since."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.answer: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        self.steps: list[Step] = []

    def close(self) -> None:
        """Take no answer any more; asyncio would log an error that nobody has asked for."""
        if not self.answer.cancel() and not self.answer.cancelled():
            self.answer.exception()

    def message(self, number: int) -> Up:
        """Return what a new dispatcher must be told."""
        if not self.answer.done() or self.answer.exception() is not None:
            return Wants(number, self.asked)
        granted = self.answer.result()
        decode = granted.decode_worker
        return Keeps(
            number,
            self.asked,
            granted.way,
            granted.prompt_worker[0],
            None if decode is None else decode[0],
            tuple(self.steps),
        )


class _SharedPlace:
    """A place that the dispatcher has given; it is told what happens there."""

    def __init__(
        self, link: Link, number: int, wished: _Wished, granted: Granted, prompt: Worker, decode: Worker | None
    ) -> None:
        way: WayOf = granted.way
        self.route = Route(way.path, way.prompt_pool, way.recompute_reason)
        self.prompt_worker = prompt
        self.decode_worker = decode
        self.assignment = granted.assignment
        self._link = link
        self._number = number
        self._wished = wished

    def prompt_done(self, cached_tokens: int | None = None) -> None:
        """Tell that the first token has arrived."""
        self._tell("prompt_done", cached_tokens)

    def prompt_left(self) -> None:
        """Tell that the sequence has left the worker that computed its prompt."""
        self._tell("prompt_left")

    def decode_began(self) -> None:
        """Tell that the worker that decodes has sent a token."""
        self._tell("decode_began")

    def answered(self, answer: Answer) -> None:
        """Tell that the answer is complete."""
        self._link.send(Answered(self._number, answer))

    def _tell(self, step: Step, cached_tokens: int | None = None) -> None:
        if step not in self._wished.steps:
            self._wished.steps.append(step)
            self._link.send(Happened(self._number, step, cached_tokens))
