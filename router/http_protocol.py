"""uvicorn's fast HTTP parser, with the limits it lacks: how long a request's line and headers may be, and how long an
answer may lie unread.

httptools collects headers until they end, so a client that never ends them would fill our memory before anything of
ours is asked. uvicorn's other parser, h11, stops at 64 KiB, and so does this; it costs the router more for each token.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.arrival import note_head_read

MAX_HEAD_BYTES: Final = 64 << 10
"""A head may exceed it by what one read of a socket brings, 256 KiB at most."""
LINGER_S: Final = 1.0
"""How long what is still on its way is taken in and dropped: to close at once would reset the connection, and with it
the answer that the client has not read."""
_WHY = b"The request line and headers are longer than 64 KiB: send less in them.\n"
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_WHY), _WHY)
)


class _Counted:
    """A transport that knows how much was written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written_bytes = 0

    def write(self, data: bytes) -> None:
        """Count, and write."""
        self.written_bytes += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHeads(HttpToolsProtocol):
    """One connection."""

    _part_ended = False
    _head_bytes = 0
    _refused = False
    _taken_bytes = 0
    _taken_s = 0.0
    _counted: _Counted | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count what is written from now on."""
        self._counted = _Counted(transport)
        self._taken_s = time.monotonic()
        super().connection_made(cast(asyncio.Transport, self._counted))

    @property
    def unread_bytes(self) -> int:
        """Written, and not taken by the client's socket."""
        return 0 if self._counted is None else int(self._counted.get_write_buffer_size())

    def silent_s(self, now_s: float) -> float:
        """For how long the client has taken nothing of what there is for it, as far as has been asked."""
        if self._counted is None:
            return 0.0
        unread_bytes = self.unread_bytes
        taken_bytes = self._counted.written_bytes - unread_bytes
        if not unread_bytes or taken_bytes > self._taken_bytes:
            self._taken_bytes, self._taken_s = taken_bytes, now_s
        return now_s - self._taken_s

    def give_up(self, why: str) -> None:
        """Close at once and forget what the client has not read; what makes its answer is cancelled."""
        del why
        if self._counted is not None:
            self._counted.abort()

    def data_received(self, data: bytes) -> None:
        """Parse, then count what may belong to a head, or to the trailer of a body in chunks, that has not ended; not
        what a read has besides the end of one."""
        if self._refused:
            return
        self._part_ended = False
        super().data_received(data)
        if self._part_ended:
            self._head_bytes = 0
        else:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refused = True
            self.transport.write(_TOO_LARGE)
            self.loop.call_later(LINGER_S, self.transport.close)

    def on_headers_complete(self) -> None:
        """A body follows, or the next request's head."""
        self._part_ended = True
        note_head_read(self.scope.setdefault("state", {}))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """How long bodies may be is `router.guard`'s to say."""
        self._part_ended = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes now is a head."""
        self._part_ended = True
        super().on_message_complete()
