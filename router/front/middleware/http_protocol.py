"""uvicorn's fast HTTP parser, with the limits it lacks: on connections, heads, their arrival time and unread answers.

httptools collects headers until they end, so a client that never ends them would fill our memory before any code of
ours runs. uvicorn's other parser, h11, stops at 64 KiB, as this one does, but costs the router more for each token.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, Literal, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ridgeline.router.front.http.context import Collector, new_request_id, note_head_read
from ridgeline.router.front.http.errors import error_body

MAX_HEAD_BYTES: Final = 64 << 10
"""Largest request head; it may be exceeded by one read of a socket, 256 KiB at most."""
LINGER_S: Final = 1.0
"""Time in which data still arriving is read and dropped: closing at once would reset the connection, and the client
would lose the answer it has not read."""
HEAD_WITHIN_S: Final = 30.0
"""Longest time from the connection, or from the first byte of a later request, to the end of the head."""
LOOK_EVERY_S: Final = 1.0
LATE_S: Final = 1.0
"""If a look comes so much later than it was due, this router stood still."""
Why = Literal["total_bytes", "deadline"]
MOST_CONNECTIONS: Final = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, 16_384)
"""Largest number of connections; the other files are for workers and the rest. An idle one takes about 20 KB."""


_TOO_LARGE: Final = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "The request line and headers are longer than 64 KiB: send less in them.",
)
_TOO_LATE: Final = (
    HTTPStatus.REQUEST_TIMEOUT,
    f"The request head was not complete within {HEAD_WITHIN_S:g} s: send it at once.",
)
_TOO_MANY: Final = HTTPStatus.SERVICE_UNAVAILABLE, "The server has no free connections: try again later."


class _Counted:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written_bytes = 0

    def write(self, data: bytes) -> None:
        """Count the bytes and write them."""
        self.written_bytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHeads(HttpToolsProtocol):
    """One connection, with limits."""

    _part_ended = False
    _head_bytes = 0
    _refused = False
    _taken_bytes = 0
    _taken_s = 0.0
    _counted: _Counted
    _collectors: set[Collector]
    _awaits_head = True
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count writes from now on, and start to wait for a head."""
        self._counted = _Counted(transport)
        self._taken_s = time.monotonic()
        self._collectors = set()
        super().connection_made(cast(asyncio.Transport, self._counted))
        if len(self.connections) > MOST_CONNECTIONS:
            self._end_with(*_TOO_MANY)
        else:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a head."""
        self._head_came()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_due = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # the next request's head is late, but this answer goes on
        else:
            self._end_with(*_TOO_LATE)

    def _end_with(self, status: HTTPStatus, sentence: str, linger_s: float = 0.0) -> None:
        """Send a whole answer, and close the connection."""
        self._refused = True
        body = json.dumps(error_body(status, sentence))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        head += f"x-request-id: {new_request_id()}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(f"{head}{body}".encode())
        if linger_s:
            self.loop.call_later(linger_s, self.transport.close)
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn's own answer is no JSON."""
        self._end_with(HTTPStatus.BAD_REQUEST, msg)

    @property
    def unread_bytes(self) -> int:
        """Bytes that the client's socket has not taken, and those of outputs that wait for that."""
        unsent_bytes = int(self._counted.get_write_buffer_size())
        return unsent_bytes + sum(collector.unread_bytes for collector in self._collectors)

    def silent_s(self, now_s: float) -> float:
        """Return for how long the client has taken nothing of what is waiting for it, as of the last call."""
        unsent_bytes = self._counted.get_write_buffer_size()
        taken_bytes = self._counted.written_bytes - unsent_bytes
        if not unsent_bytes or taken_bytes > self._taken_bytes:
            self._taken_bytes, self._taken_s = taken_bytes, now_s
        return now_s - self._taken_s

    def give_up(self) -> None:
        """Close at once and drop what the client has not read; the code that makes its answer is cancelled."""
        self._counted.abort()

    def data_received(self, data: bytes) -> None:
        """Parse, then count the bytes of a request head (or chunked trailer) that has not ended yet.

        Bytes that arrive in the same read as its end are not counted.
        """
        if self._refused:
            return
        self._part_ended = False
        super().data_received(data)
        if self._part_ended:
            self._head_bytes = 0
        else:
            self._head_bytes += len(data)
            if self._awaits_head and self._head_due is None and not self.transport.is_closing():
                self._wait_for_head()  # after the first byte of a head, uvicorn itself would wait without end
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._end_with(*_TOO_LARGE, linger_s=LINGER_S)

    def on_headers_complete(self) -> None:
        """Record the end of a head; a body or the next head follows."""
        self._part_ended = True
        self._awaits_head = False
        self._head_came()
        note_head_read(self.scope.setdefault("state", {}), self._collectors)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Record that a body has begun; `ridgeline.router.front.middleware.ingress` limits its length."""
        self._part_ended = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the end of a message; the next bytes belong to a head."""
        self._part_ended = True
        self._awaits_head = True
        super().on_message_complete()


async def watch_readers(
    connections: set[Any],
    send_timeout_s: float,
    max_send_buffer_bytes: int,
    on_end: Callable[[Why], None],
) -> None:
    """Limit what clients may leave unread, by one time for each and one total for all, until cancelled.

    A client that does not read takes memory and nothing else: its place in admission is free once its sequences have
    ended on the workers. A connection that takes nothing for `send_timeout_s` is ended. While the total is too large,
    whoever is furthest behind is ended: first those that take nothing, then those that take something, by their bytes.

    A look that is late is left out: this router stood still, and its clients had nothing to take meanwhile.
    """
    pause_s = min(LOOK_EVERY_S, send_timeout_s / 4)
    while True:
        due_s = time.monotonic() + pause_s
        await asyncio.sleep(pause_s)
        if time.monotonic() - due_s <= LATE_S:
            look(
                [one for one in connections if isinstance(one, BoundedHeads)],
                send_timeout_s,
                max_send_buffer_bytes,
                on_end,
            )


def look(
    connections: list[BoundedHeads], send_timeout_s: float, max_send_buffer_bytes: int, on_end: Callable[[Why], None]
) -> None:
    """End connections that are silent for too long, then the furthest behind until the rest is within the limit."""
    now_s, behind = time.monotonic(), []
    for connection in connections:
        if (silent_s := connection.silent_s(now_s)) > send_timeout_s:
            connection.give_up()
            on_end("deadline")
        else:
            behind.append((silent_s > 0, connection.unread_bytes, connection))
    total = sum(unread_bytes for _, unread_bytes, _ in behind)
    for _, unread_bytes, connection in sorted(behind, key=lambda one: one[:2], reverse=True):
        if total <= max_send_buffer_bytes:
            break
        total -= unread_bytes
        connection.give_up()
        on_end("total_bytes")
