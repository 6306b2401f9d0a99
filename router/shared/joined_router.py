"""One router as the dispatcher sees it: the prompts that it wants to start, its places, and what it has admitted.

Everything that is counted for the router ends with it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.pool_queue import RouterRequests
from ridgeline.router.settings import RouterStart
from ridgeline.router.shared.holdings import Part, Parts
from ridgeline.router.shared.messages import Complete, Down, EncodedDowns, Holds, Joins, Up

MOST_UNREAD = 100_000
"""Messages that may wait for a router that does not read; far more than any router has requests."""
MOST_AT_ONCE = 1_000
"""Messages in one batch: a few MiB, far below the limit of gRPC
(`ridgeline.worker_runtime.client.MAX_MESSAGE_BYTES`)."""
logger = logging.getLogger(__name__)


class NotReading(Exception):
    """The router has not read what was sent to it, and counts as gone."""


class JoinedRouter:
    """A router's wishes and places. `take` its messages in order, send it every `next_batch`, and `close` it."""

    def __init__(self, state: ClusterState, parts: Parts) -> None:
        self.start = RouterStart()
        self.is_complete = False
        """Whether it has told all that it held when it joined."""
        self._parts = parts
        self._part: Part = parts.enter()
        self._news: dict[str, msgspec.Raw] = {}
        """By kind, the newest of what all routers are told, until it is sent."""
        self._state = state
        self._requests = RouterRequests(self.send)
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
            case Joins():
                self.start = message.router
            case Holds():
                self._parts.take(self._part, message)
            case Complete():
                self.is_complete = True
            case _:
                self._state.apply(self._requests, message)

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

    def close(self) -> None:
        """Give up all its requests, because the router has gone."""
        self._parts.leave(self._part)
        self._state.left(self._requests)
