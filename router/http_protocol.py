"""uvicorn's fast HTTP parser, with the limit it lacks: how long a request's line and headers may be.

httptools collects headers until they end, so a client that never ends them would fill our memory before anything of
ours is asked. uvicorn's other parser, h11, stops at 64 KiB, and so does this; it costs the router more for each token.
"""

from __future__ import annotations

from typing import Final

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


class BoundedHeads(HttpToolsProtocol):
    """One connection."""

    _part_ended = False
    _head_bytes = 0
    _refused = False

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
