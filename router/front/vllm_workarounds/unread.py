"""Limits what is kept for clients that have not read it yet: by time, by bytes of one stream, and by bytes of all.

A client that does not read takes memory and nothing else: its place in admission is free once its sequences have
ended on the workers. A stream that falls too far behind is ended at once (`router/front/engine_client.py`). A
connection that takes nothing for `send_timeout_s` is ended here, and so are the largest while the total is too large.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
LATE_S = 1.0
"""If a look comes so much later than it was due, this router stood still."""
TOKEN_BYTES = 40
LOGPROB_BYTES = 250
"""Approximate size of one entry in memory."""

Why = Literal["stream_bytes", "total_bytes", "deadline"]


class Holder(Protocol):
    """A stream or a connection that may hold unread bytes."""

    @property
    def unread_bytes(self) -> int:
        """Bytes that its client has not read."""
        ...

    def give_up(self, why: Why) -> None:
        """Drop the unread bytes and end it."""
        ...


class Connection(Holder, Protocol):
    """A holder that has a socket."""

    def silent_s(self, now_s: float) -> float:
        """Return for how long its client has taken nothing of what is waiting for it."""
        ...


class BoundedCollector(RequestOutputCollector):  # type: ignore[misc]
    """One request's outputs, merged while its client does not read them; a stream may hold up to `max_bytes`."""

    def __init__(
        self, output_kind: RequestOutputKind, request_id: str, max_bytes: int, end: Callable[[Why], None]
    ) -> None:
        super().__init__(output_kind, request_id)
        self._max_bytes = max_bytes
        self._end = end
        self.unread_bytes = 0

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Store an output as vLLM does, and count it. A whole answer in one piece is limited by admission only."""
        unread = self.output
        super().put(output)
        if isinstance(unread, RequestOutput) and isinstance(output, RequestOutput):
            # vLLM's merging drops those of a sequence that comes first now, and `echo` would not find them.
            unread.prompt_logprobs = unread.prompt_logprobs or output.prompt_logprobs
        if isinstance(self.output, Exception):
            self.unread_bytes = 0  # it replaces everything before it, and vLLM drops what still comes
            return
        if isinstance(output, RequestOutput):
            self.unread_bytes += _bytes(output)
        if self.aggregate and self.unread_bytes > self._max_bytes:
            self.give_up("stream_bytes")

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        """Return what has come since the last call, waiting if there is nothing."""
        output = await super().get()
        self.unread_bytes = 0
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        """Return what has come since the last call; None if there is nothing."""
        output = super().get_nowait()
        self.unread_bytes = 0
        return output

    def give_up(self, why: Why) -> None:
        """End the request everywhere; if the client reads on, it gets an error."""
        self._end(why)

    def forget_end(self) -> None:
        """Let go of what ends the request, which is over and is held by that in a circle."""
        self._end = _nothing_to_end


def _nothing_to_end(why: Why) -> None:
    """Do nothing: the request is over."""


def _bytes(output: RequestOutput) -> int:
    tokens, entries = 1, 0
    for one in output.outputs:
        tokens += len(one.token_ids)
        if one.logprobs:
            entries += sum(len(position) for position in one.logprobs if position)
    return TOKEN_BYTES * tokens + LOGPROB_BYTES * entries


async def watch(
    connections: Callable[[], Iterable[Connection]],
    streams: Callable[[], Iterable[Holder]],
    send_timeout_s: float,
    max_send_buffer_bytes: int,
    on_end: Callable[[Why], None],
) -> None:
    """Look once a second, or more often for a short `send_timeout_s`, until cancelled.

    A look that is late is left out: this router stood still, and its clients had nothing to take meanwhile.
    """
    pause_s = min(LOOK_EVERY_S, send_timeout_s / 4)
    while True:
        due_s = time.monotonic() + pause_s
        await asyncio.sleep(pause_s)
        if time.monotonic() - due_s > LATE_S:
            continue
        look(list(connections()), list(streams()), send_timeout_s, max_send_buffer_bytes, on_end)


def look(
    connections: list[Connection],
    streams: list[Holder],
    send_timeout_s: float,
    max_send_buffer_bytes: int,
    on_end: Callable[[Why], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """End connections that are silent for too long, then the largest holders until the rest is within the limit."""
    now_s = clock()
    silent = [connection for connection in connections if connection.silent_s(now_s) > send_timeout_s]
    for connection in silent:
        connection.give_up("deadline")
        on_end("deadline")
    holders: list[Holder] = [*(one for one in connections if one not in silent), *streams]
    total = sum(holder.unread_bytes for holder in holders)
    for holder in sorted(holders, key=lambda holder: -holder.unread_bytes):
        if total <= max_send_buffer_bytes:
            break
        total -= holder.unread_bytes
        holder.give_up("total_bytes")
        on_end("total_bytes")
