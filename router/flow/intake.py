"""Requests are taken in a few at a time, in fair order among clients: what the router does for a request is work too.

Parsing a body, the chat template, tokenising and admission take milliseconds of the one event loop. A client that sends
hundreds of requests in one moment would have all of that done before the next client's. So each waits here for its
turn, with its body complete, and has it until it has been let in or refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from router.flow.fair_queue import FairQueue, may_have_more

AT_A_TIME: Final = 8
"""Some wait for a thread that tokenises; the loop does one thing at a time."""
PART: Final = 7 / 8
"""Of these, for one client alone."""


class Turn:
    """The right of one request to the router's attention, until it is closed."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Give it back. Safe to call twice."""
        close, self._close = self._close, None
        if close is not None:
            close()


class Intake:
    """Who is being taken in, and who waits for that; a router has one."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[Turn]] = FairQueue(quantum_tokens=1, least_tokens=1)
        self._inside = Counter[str]()
        self._waiting = Counter[str]()

    def of(self, client: str) -> int:
        """Count the requests of this client that have come and are not taken in yet."""
        return self._inside[client] + self._waiting[client]

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[Turn]:
        """Wait for it; it ends when the block does, or before when it is closed."""
        granted: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        entry = self._queue.push(client, 1, granted)
        self._count(self._waiting, client, 1)
        self._wake()
        try:
            turn = await granted
        except BaseException:
            self._queue.remove(entry)
            if granted.done() and not granted.cancelled():
                granted.result().close()
            raise
        finally:
            self._count(self._waiting, client, -1)
        try:
            yield turn
        finally:
            turn.close()

    def _wake(self) -> None:
        while len(self._queue):
            try:
                entry = self._queue.pop(self._may_enter)
            except IndexError:
                return
            if not entry.item.done():
                self._count(self._inside, entry.client, 1)
                entry.item.set_result(Turn(partial(self._leave, entry.client)))

    def _may_enter(self, client: str) -> bool:
        inside = self._inside[client]
        return may_have_more(inside, self._inside.total() - inside, AT_A_TIME, PART)

    def _leave(self, client: str) -> None:
        self._count(self._inside, client, -1)
        self._wake()

    @staticmethod
    def _count(counter: Counter[str], client: str, number: int) -> None:
        counter[client] += number
        if not counter[client]:
            del counter[client]
