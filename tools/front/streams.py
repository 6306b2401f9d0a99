"""Clients that hold many streams open and only count: events, tokens' worth of answers, and the gaps between reads.

A stream is one connection read by a protocol without a parser, since a client that parses would need more of the
machine than the router that is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

EVENT: Final = b'data: {"id"'
END: Final = b"[DONE]"
DEADLINE_S: Final = 300.0


@dataclass
class StreamRecord:
    """One answer as its client saw it."""

    sent_s: float
    read_s: list[float] = field(default_factory=list)
    """When bytes with events came."""
    events: int = 0
    complete: bool = False
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first event."""
        return self.read_s[0] - self.sent_s

    @property
    def largest_gap_s(self) -> float:
        """Longest time between two reads with events."""
        return max((b - a for a, b in zip(self.read_s, self.read_s[1:], strict=False)), default=0.0)


class _Stream(asyncio.Protocol):
    """Sends one request, and counts the events of its answer."""

    def __init__(self, request: bytes) -> None:
        self.record = StreamRecord(time.monotonic())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tail = b""
        self._began = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self._began and not data.startswith(b"HTTP/1.1 200"):
            self.record.problem = data[:300].decode(errors="replace")
        self._began = True
        text = self._tail + data
        events = text.count(EVENT)
        if events:
            self.record.events += events
            self.record.read_s.append(time.monotonic())
        if END in text:
            self.record.complete = not self.record.problem
            self._end()
        self._tail = text[1 - len(EVENT) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.record.complete and not self.record.problem:
            self.record.problem = f"the connection ended: {exc}"
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def stream(url: str, prompt: str, output_tokens: int) -> StreamRecord:
    """Send one completion and read it to its end."""
    where = urlsplit(url)
    options = {"max_tokens": output_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"model": "m", "prompt": prompt, **options}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
    request = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(lambda: _Stream(request), where.hostname or "", where.port or 80)
    try:
        async with asyncio.timeout(DEADLINE_S):
            await protocol.ended
    except TimeoutError:
        protocol.record.problem = f"not answered in {DEADLINE_S:g} s"
    finally:
        transport.close()
    return protocol.record


async def lanes(url: str, streams: int, rounds: int, prompt_tokens: int, output_tokens: int) -> list[StreamRecord]:
    """Keep `streams` answers in progress, each lane `rounds` one after the other."""
    records: list[StreamRecord] = []

    async def lane(index: int) -> None:
        for number in range(rounds):
            prompt = f"{index * rounds + number}:" + " word" * prompt_tokens
            records.append(await stream(url, prompt, output_tokens))

    async with asyncio.TaskGroup() as group:
        for index in range(streams):
            group.create_task(lane(index))
    return records
