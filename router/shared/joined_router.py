"""One router as the dispatcher sees it: the prompts that it wants to start, its places, and what it has admitted.

Everything that is counted for the router ends with it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack, suppress
from itertools import count

import msgspec

from ridgeline.contracts.errors import WorkerDraining, WorkerLost
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.policy import Demand, NoWorker, Route
from ridgeline.router.flow.placement import LocalPlacement, Place, Wish
from ridgeline.router.settings import RouterStart
from ridgeline.router.shared.counts import Counts
from ridgeline.router.shared.holdings import Part, Parts
from ridgeline.router.shared.messages import (
    Answered,
    Asked,
    Complete,
    Count,
    Counted,
    Denied,
    Doubts,
    Down,
    EncodedDowns,
    Forgets,
    Granted,
    Happened,
    Holds,
    Joins,
    Keeps,
    Leaves,
    Reason,
    Remembers,
    Up,
    Wants,
    WayOf,
)

MOST_UNREAD = 100_000
"""Messages that may wait for a router that does not read; far more than any router has requests."""
MOST_AT_ONCE = 1_000
"""Messages in one batch: a few MiB, far below the limit of gRPC
(`ridgeline.worker_runtime.client.MAX_MESSAGE_BYTES`)."""
_REASONS: dict[type[Exception], Reason] = {NoWorker: "no_worker", WorkerLost: "lost", WorkerDraining: "draining"}
logger = logging.getLogger(__name__)


class NotReading(Exception):
    """The router has not read what was sent to it, and counts as gone."""


class JoinedRouter:
    """A router's wishes and places. `take` its messages in order, send it every `next_batch`, and `close` it."""

    def __init__(
        self, placement: LocalPlacement, fleet: Fleet, all_there: asyncio.Event, parts: Parts, counts: Counts
    ) -> None:
        """`all_there`: set once all routers have told which places they hold; no prompt starts before."""
        self.start = RouterStart()
        self.is_complete = False
        """Whether it has told all that it held when it joined."""
        self._all_there = all_there
        self._parts = parts
        self._part: Part = parts.enter()
        self._counts = counts
        self._news: dict[str, msgspec.Raw] = {}
        """By kind, the newest of what all routers are told, until it is sent."""
        self._placement = placement
        self._fleet = fleet
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._places: dict[int, Place] = {}
        self._kept: dict[int, ExitStack] = {}
        """What counts for each place that was given before."""
        self._numbers = count(1)
        self._counting: dict[int, asyncio.Future[None]] = {}
        self._outbox: list[Down] = []
        self._filled = asyncio.Event()

    def take(self, message: Up) -> None:
        """Act on a message. An error in it is this message's own: the router's other requests go on."""
        try:
            self._act_on(message)
        except Exception:
            logger.exception("a message of %s failed: %s", self.start, type(message).__name__)

    def _act_on(self, message: Up) -> None:
        match message:
            case Wants():
                self._begin(message.number, _wish_of(message.asked))
            case Keeps():
                self._keep(message)
            case Happened() | Answered():
                self._record(message)
            case Leaves():
                self._leave(message.number)
            case Doubts():
                with suppress(KeyError):  # it has been removed meanwhile
                    self._fleet.get(message.worker_id).client.has_failed()
            case _:
                self._learn(message)

    def _learn(self, message: Up) -> None:
        """Take what is told of no single prompt or worker."""
        match message:
            case Joins():
                self.start = message.router
            case Forgets():
                self._placement.forget_prefixes()
            case Holds():
                self._parts.take(self._part, message)
            case Counted():
                self._counted(message)
            case Remembers():
                self._counts.remember(message.ended)
            case Complete():
                self.is_complete = True

    def send(self, message: Down) -> None:
        """Put a message into the next batch."""
        self._outbox.append(message)
        self._filled.set()

    def show(self, kind: str, news: msgspec.Raw) -> None:
        """Put an encoded message into the next batch, in place of an older one of this kind that is not sent yet."""
        self._news[kind] = news
        self._filled.set()

    def look(self) -> None:
        """Have the next batch tell what has changed of the other routers' holdings."""
        self._filled.set()

    async def next_batch(self) -> EncodedDowns:
        """Wait for messages and return them. Raises NotReading if there are too many."""
        while True:
            await self._filled.wait()
            if len(self._outbox) > MOST_UNREAD:
                raise NotReading(f"{self.start} has not read {len(self._outbox)} messages")
            messages: list[Down | msgspec.Raw] = [*self._news.values()]
            if (others := self._parts.differences(self._part)) is not None:
                messages.append(others)
            messages += self._outbox[:MOST_AT_ONCE]
            del self._outbox[:MOST_AT_ONCE]
            self._news.clear()
            if not self._outbox:
                self._filled.clear()
            if messages:
                return EncodedDowns(messages)

    async def count(self, within_s: float) -> None:
        """Bring its counts up to date, if it answers in time."""
        number = next(self._numbers)
        answered = self._counting[number] = asyncio.get_running_loop().create_future()
        self.send(Count(number))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(answered, within_s)
        finally:
            del self._counting[number]

    async def close(self) -> None:
        """Give up all wishes and places, because the router has gone."""
        self._parts.leave(self._part)
        serving = list(self._serving.values())
        for number in (*self._serving, *self._kept):
            self._leave(number)
        if serving:
            await asyncio.wait(serving)

    def _record(self, message: Happened | Answered) -> None:
        """Record what has happened at a place; it may have been left meanwhile."""
        place = self._places.get(message.number)
        if place is None:
            return
        if isinstance(message, Answered):
            place.answered(message.answer)
        elif message.step == "prompt_done":
            place.prompt_done(message.cached_tokens)
        else:
            getattr(place, message.step)()

    def _begin(self, number: int, wish: Wish) -> None:
        task = asyncio.create_task(self._serve(number, wish), name=f"place-{self.start}-{number}")
        self._serving[number] = task
        task.add_done_callback(lambda _: self._serving.pop(number, None))

    def _leave(self, number: int) -> None:
        if number in self._serving:
            self._serving[number].cancel()
        elif number in self._kept:
            self._places.pop(number)
            self._kept.pop(number).close()

    async def _serve(self, number: int, wish: Wish) -> None:
        """Wait for a place and hold it until cancelled, which means that the router has left it."""
        try:
            await self._all_there.wait()
            async with self._placement.place(wish) as place:
                self._places[number] = place
                self.send(_granted(number, place))
                await asyncio.Event().wait()
        except tuple(_REASONS) as error:
            self.send(Denied(number, _REASONS[type(error)], str(error)))
        except Exception as error:  # without an answer the router would wait until the request's deadline
            logger.exception("no place for prompt %d of %s", number, self.start)
            sentence = f"the dispatcher failed to place the prompt ({type(error).__name__}: {error}): see its log"
            self.send(Denied(number, "failed", sentence))
        finally:
            self._places.pop(number, None)

    def _keep(self, kept: Keeps) -> None:
        """Count a place that was given before; one whose worker is gone is about to be left anyway."""
        try:
            prompt_worker = self._fleet.get(kept.prompt_worker)
            decode_worker = None if kept.decode_worker is None else self._fleet.get(kept.decode_worker)
        except KeyError:
            return
        route = Route(kept.way.path, kept.way.prompt_pool, kept.way.recompute_reason)
        self._kept[kept.number] = held = ExitStack()
        place = held.enter_context(self._placement.keep(_wish_of(kept.asked), route, prompt_worker, decode_worker))
        self._places[kept.number] = place
        for step in kept.steps:
            getattr(place, step)()

    def _counted(self, message: Counted) -> None:
        self._counts.told(self.start, message.samples)
        for number, answered in self._counting.items():
            if number <= message.number and not answered.done():
                answered.set_result(None)


def _wish_of(asked: Asked) -> Wish:
    demand = Demand(
        asked.prompt_tokens,
        asked.output_tokens,
        asked.client,
        frozenset(asked.avoided),
        asked.ttft_limit_s,
        asked.tpot_limit_s,
        asked.waited_s,
        asked.prefix,
    )
    return Wish(demand, urgent=asked.urgent, probe=asked.probe)


def _granted(number: int, place: Place) -> Granted:
    route, prompt, decode = place.route, place.prompt_worker, place.decode_worker
    return Granted(
        number,
        WayOf(route.path, route.prompt_pool, route.recompute_reason),
        (prompt.worker_id, prompt.description.incarnation),
        None if decode is None else (decode.worker_id, decode.description.incarnation),
        place.assignment,
    )
