"""Limits what is kept for clients that have not read it yet: one time for each, and one total for all.

A client that does not read takes memory and nothing else: its place in admission is free once its sequences have
ended on the workers. A connection that takes nothing for `send_timeout_s` is ended. While the total is too large,
whoever is furthest behind is ended: first those that take nothing, then those that take something, by their bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector

LOOK_EVERY_S = 1.0
LATE_S = 1.0
"""If a look comes so much later than it was due, this router stood still."""
TOKEN_BYTES = 40
LOGPROB_BYTES = 250
"""Approximate size of one entry in memory."""

Why = Literal["total_bytes", "deadline"]


class Connection(Protocol):
    """The connection of a client."""

    @property
    def unread_bytes(self) -> int:
        """Bytes that its client has not read, in the socket and before it."""
        ...

    def silent_s(self, now_s: float) -> float:
        """Return for how long its client has taken nothing of what is waiting for it."""
        ...

    def give_up(self) -> None:
        """Drop the unread bytes, and end it with all its requests."""
        ...


class CountingCollector(RequestOutputCollector):  # type: ignore[misc]
    """One request's outputs, merged and counted while its client does not read them."""

    def __init__(self, output_kind: RequestOutputKind, request_id: str) -> None:
        super().__init__(output_kind, request_id)
        self.unread_bytes = 0

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        """Store an output as vLLM does, and count it."""
        unread = self.output
        super().put(output)
        if isinstance(unread, RequestOutput) and isinstance(output, RequestOutput):
            # vLLM's merging drops those of a sequence that comes first now, and `echo` would not find them.
            unread.prompt_logprobs = unread.prompt_logprobs or output.prompt_logprobs
        if isinstance(self.output, Exception):
            self.unread_bytes = 0  # it replaces everything before it, and vLLM drops what still comes
        elif isinstance(output, RequestOutput):
            self.unread_bytes += _bytes(output)

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


def _bytes(output: RequestOutput) -> int:
    tokens, entries = 1, 0
    for one in output.outputs:
        tokens += len(one.token_ids)
        if one.logprobs:
            entries += sum(len(position) for position in one.logprobs if position)
    return TOKEN_BYTES * tokens + LOGPROB_BYTES * entries


async def watch(
    connections: Callable[[], Iterable[Connection]],
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
        if time.monotonic() - due_s <= LATE_S:
            look(list(connections()), send_timeout_s, max_send_buffer_bytes, on_end)


def look(
    connections: list[Connection], send_timeout_s: float, max_send_buffer_bytes: int, on_end: Callable[[Why], None]
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
