"""Takes requests a few at a time, in fair order among clients, because the router's own work per request counts too.

Parsing a body, the chat template, tokenising and admission take milliseconds of the one event loop. Without an order, a
client that sends hundreds of requests at once would have all of them processed before the next client's. So each
request waits here, with its body complete, for its turn, which lasts until it has been admitted or refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from ridgeline.router.flow.fair_queue import FairQueue, may_have_more

AT_A_TIME: Final = 8
"""Requests being taken in at a time: some wait for a tokenising thread, while the loop handles one."""
PART: Final = 7 / 8
"""The fraction of these that one client alone may have."""


class LimiterTurn:
    """One request's right to be processed by the router, until it is closed."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """End the turn. May be called twice."""
        close, self._close = self._close, None
        if close is not None:
            close()


class ConcurrencyLimiter:
    """The requests that are being taken in or wait for it; one object per router."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[LimiterTurn]] = FairQueue(quantum_tokens=1, least_tokens=1)
        self._inside = Counter[str]()
        self._waiting = Counter[str]()

    def of(self, client: str) -> int:
        """Return how many requests of this client have arrived and are not taken in yet."""
        return self._inside[client] + self._waiting[client]

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[LimiterTurn]:
        """Wait for a turn; it ends with the block, or earlier when it is closed."""
        granted: asyncio.Future[LimiterTurn] = asyncio.get_running_loop().create_future()
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
                entry.item.set_result(LimiterTurn(partial(self._leave, entry.client)))

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
