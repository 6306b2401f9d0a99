"""Takes requests a few at a time, in fair order among clients, because the router's own work per request counts too.

Parsing a body, the chat template, tokenising and admission take milliseconds of the one event loop. Without an order, a
client that sends hundreds of requests at once would have all of them processed before the next client's. So each
request waits here, with its body complete, for its turn, which lasts until it has been admitted or refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Final

from ridgeline.router.flow.fair_queue import FairQueue, may_have_more

AT_A_TIME: Final = 8
"""Requests being taken in at a time: some wait for a tokenising thread, while the loop handles one."""
PART: Final = 7 / 8
"""The fraction of these that one client alone may have."""


class ConcurrencyLimiter:
    """The requests that are being taken in or wait for it; one object per router."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(quantum_tokens=1, least_tokens=1)
        self._inside = Counter[str]()

    def of(self, client: str) -> int:
        """Return how many requests of this client have arrived and are not taken in yet."""
        return self._inside[client] + self._queue.waiting.of_client.get(client, 0)

    @asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[ExitStack]:
        """Wait for a turn; it ends with the block, or earlier when it is closed, which may happen twice."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = self._queue.push(client, 1, granted)
        self._wake()
        with ExitStack() as turn:
            try:
                await granted
            finally:
                self._queue.remove(entry)
                if granted.done() and not granted.cancelled():
                    turn.callback(self._leave, client)
            yield turn

    def _wake(self) -> None:
        with suppress(IndexError):  # none waits that may enter
            while True:
                entry = self._queue.pop(self._may_enter)
                if not entry.item.done():
                    self._inside[entry.client] += 1
                    entry.item.set_result(None)

    def _may_enter(self, client: str) -> bool:
        inside = self._inside[client]
        return may_have_more(inside, self._inside.total() - inside, AT_A_TIME, PART)

    def _leave(self, client: str) -> None:
        self._inside[client] -= 1
        if not self._inside[client]:
            del self._inside[client]
        self._wake()
