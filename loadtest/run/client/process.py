"""The process that sends a replay's requests, and nothing else.

Alone in its process, it is delayed neither by a display nor by whatever else the command does, and its own load can be
told: CPU share, delay of its event loop, events a second. Messages are length-prefixed msgpack: on standard input a
Job, its Completions and a Begin; on standard output Ready, then Sent and RequestRecords as they come, and ClientLoad
at the end. It ends as soon as its standard input does, so it never outlives the command.

It imports neither numpy nor httpx, to start quickly.
"""

import asyncio
import gc
import math
import os
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ridgeline.loadtest.run.client.stream import Completion, Endpoint, LoadClient, not_sent
from ridgeline.loadtest.run.records import RequestRecord

try:
    from uvloop import new_event_loop
except ImportError:  # it comes with the serving part
    from asyncio import new_event_loop  # type: ignore[assignment]  # a loop either way

LENGTH = struct.Struct("!I")
PROBE_S = 0.01
TELL_EVERY_S = 0.25


class Job(msgspec.Struct, frozen=True, tag=True):
    """What holds for all requests; `requests` Completions follow."""

    base_urls: tuple[str, ...]
    """Servers, which get the requests in turn."""
    headers: dict[str, str]
    endpoint: Endpoint
    deadline_s: float
    requests: int
    cores: tuple[int, ...] = ()
    """Cores to run on; empty: those of the command."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The time of the first request is now."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All requests have been read."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """How many requests have been sent so far."""

    requests: int


class RequestEnded(msgspec.Struct, frozen=True, tag=True):
    """One request has ended."""

    record: RequestRecord


class ClientLoad(msgspec.Struct, frozen=True, tag=True):
    """The load on the client itself during a replay; `client` in summary.json."""

    duration_s: float
    cpu_share: float
    """CPU seconds of the process a second; 1 is a whole core, of which one event loop has no more than one."""
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    """How late the event loop wakes a task that sleeps, sampled all the time."""
    loop_lag_max_ms: float
    events_per_s: float
    """Server-sent events read a second."""
    reconnects: int
    """Requests sent again because the server had closed an idle connection."""
    cores: tuple[int, ...]
    """Cores on which the process was allowed to run."""
    niceness: int


Told = Ready | Sent | RequestEnded | ClientLoad


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front."""
    encoded = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(encoded)) + encoded


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one message. Raises asyncio.IncompleteReadError at the end of the stream."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


async def run() -> None:
    """Read the job, send its requests at their times, tell how they end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    job = msgspec.msgpack.decode(await read_frame(reader), type=Job)
    if job.cores:
        os.sched_setaffinity(0, job.cores)
    decoder = msgspec.msgpack.Decoder(Completion)
    requests = [decoder.decode(await read_frame(reader)) for _ in range(job.requests)]
    gc.collect()
    gc.freeze()  # the bodies are never garbage, and looking through them would delay a request
    writer.write(frame(Ready()))
    msgspec.msgpack.decode(await read_frame(reader), type=Begin)
    sending = asyncio.create_task(_Sending(job, requests, writer).run())
    orphaned = asyncio.create_task(reader.read())
    await asyncio.wait((sending, orphaned), return_when=asyncio.FIRST_COMPLETED)
    if sending.done():
        writer.write(frame(sending.result()))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    else:
        os._exit(1)  # nobody is left to tell anything to


@dataclass(slots=True)
class _Later:
    """A request that has to wait for the answers to others."""

    request: Completion
    answers: int
    """How many of them are still to come."""
    due_s: float
    """What is known of when it is due, in seconds since the start."""
    failed: bool = False


class _Sending:
    """One replay under way."""

    def __init__(self, job: Job, requests: Sequence[Completion], writer: asyncio.StreamWriter) -> None:
        self._job = job
        self._writer = writer
        self._first = [request for request in requests if not request.after]
        self._later: dict[int, list[_Later]] = {}
        for request in requests:
            later = _Later(request, len(request.after), request.scheduled_s)
            for index in request.after:
                self._later.setdefault(index, []).append(later)
        last_s = max((request.scheduled_s for request in self._first), default=0.0)
        self._window_s = last_s or math.inf
        """Until then new sessions begin; if they all begin at once, no request is out of the window."""
        self._sent = 0
        self._start = 0.0

    async def run(self) -> ClientLoad:
        """Send everything, and return what that took."""
        lags_s: list[float] = []
        async with LoadClient(self._job.base_urls, self._job.headers, self._job.endpoint) as client:
            helpers = [asyncio.create_task(_probe(lags_s)), asyncio.create_task(self._tell_sent())]
            cpu_s, self._start = time.process_time(), time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    for request in self._first:
                        await self._wait_until(request.scheduled_s)
                        group.create_task(self._send(client, group, request, request.scheduled_s))
            finally:
                for helper in helpers:
                    helper.cancel()
            duration_s = time.perf_counter() - self._start
            cpu_s = time.process_time() - cpu_s
            lags_s.sort()
            return ClientLoad(
                duration_s=duration_s,
                cpu_share=cpu_s / duration_s,
                loop_lag_p50_ms=_at(lags_s, 0.5) * 1e3,
                loop_lag_p99_ms=_at(lags_s, 0.99) * 1e3,
                loop_lag_max_ms=_at(lags_s, 1.0) * 1e3,
                events_per_s=client.events / duration_s,
                reconnects=client.reconnects,
                cores=tuple(sorted(os.sched_getaffinity(0))),
                niceness=os.nice(0),
            )

    async def _send(
        self, client: LoadClient, group: asyncio.TaskGroup, request: Completion, due_s: float, failed: bool = False
    ) -> None:
        """Send a request, unless one that it waited for failed; then begin those that had to wait for its answer."""
        self._sent += 1
        if failed:
            record = not_sent(request, due_s, "not sent: a request that it waits for failed")
        else:
            await self._wait_until(due_s)
            record = await client.complete(request, self._start, self._job.deadline_s, due_s)
        self._tell(msgspec.structs.replace(record, in_window=due_s <= self._window_s))
        answered_s = time.perf_counter() - self._start if record.ok else record.sent_s + (record.latency_s or 0.0)
        for later in self._later.get(request.index, ()):
            later.answers -= 1
            later.failed |= not record.ok
            later.due_s = max(later.due_s, answered_s + later.request.think_s)
            if not later.answers:
                group.create_task(self._send(client, group, later.request, later.due_s, later.failed))

    def _tell(self, record: RequestRecord) -> None:
        self._writer.write(frame(RequestEnded(record)))

    async def _wait_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - self._start)))

    async def _tell_sent(self) -> None:
        while True:
            self._writer.write(frame(Sent(self._sent)))
            await asyncio.sleep(TELL_EVERY_S)


async def _probe(lags_s: list[float]) -> None:
    """Sleep for a short time again and again, and note how much longer it took."""
    while True:
        due = time.perf_counter() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lags_s.append(max(0.0, time.perf_counter() - due))


def _at(ordered: Sequence[float], quantile: float) -> float:
    return ordered[round(quantile * (len(ordered) - 1))] if ordered else 0.0


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())
