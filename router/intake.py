"""Requests are taken in a few at a time, in fair order among clients: what the router does for a request is work too.

Parsing a body, the chat template, tokenising and admission take milliseconds of the one event loop. A client that sends
hundreds of requests in one moment would have all of that done before the next client's. So each waits here for its
turn, with its body complete, and has it until it has been let in or refused. Who holds its whole share already is
refused before its body is read, at a fraction of that.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from router.admission import Refused
from router.asgi import Asgi
from router.client_identity import CLIENT
from router.fair_queue import FairQueue, may_have_more
from router.routes import GENERATING

AT_A_TIME: Final = 8
"""Some wait for a thread that tokenises; the loop does one thing at a time."""
PART: Final = 7 / 8
"""Of these, for one client alone."""
_turn: ContextVar[Turn | None] = ContextVar("ridgeline_intake", default=None)


def taken_in() -> None:
    """The request being served needs no more of the router's attention than its tokens do. Safe to call twice."""
    turn = _turn.get()
    if turn is not None:
        turn.close()


class Turn:
    """Of one HTTP request. Tasks copy the context, but share what is in it."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close: Callable[[], None] | None = close

    def close(self) -> None:
        """Safe to call twice."""
        close, self._close = self._close, None
        if close is not None:
            close()


class Intake:
    """One per router."""

    def __init__(self) -> None:
        self._queue: FairQueue[asyncio.Future[Turn]] = FairQueue(quantum_tokens=1, least_tokens=1)
        self._inside = Counter[str]()
        self._waiting = Counter[str]()

    def of(self, client: str) -> int:
        """Requests of this client that have come and are not taken in yet."""
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


def refused_early(app: Asgi, intake: Intake, check_share: Callable[[str, int], None]) -> Asgi:
    """The app, without the requests of clients whose share is taken: `check_share` raises for one more than so many."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in GENERATING:
            client = CLIENT.get()
            try:
                check_share(client, intake.of(client))
            except Refused as refused:
                while (await receive()).get("more_body", False):  # to close before its end would reset the connection
                    pass
                await _refuse(send, refused)
                return
        await app(scope, receive, send)

    return wrapped


def in_fair_order(app: Asgi, intake: Intake) -> Asgi:
    """The app, whose requests wait for their turn; their bodies have come."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        async with intake.turn(CLIENT.get()) as turn:
            token = _turn.set(turn)

            async def sending(message: Any) -> None:
                turn.close()
                await send(message)

            try:
                await app(scope, receive, sending)
            finally:
                _turn.reset(token)

    return wrapped


async def _refuse(send: Any, refused: Refused) -> None:
    status = refused.status
    error = {"message": str(refused), "type": status.phrase, "param": None, "code": status.value}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(refused.retry_after_s).encode()),
    ]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})
