"""Starts the client process, hands it the requests, and takes the records back."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import msgspec

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.loadtest.run.client.process import (
    Begin,
    ClientLoad,
    Job,
    Ready,
    RequestEnded,
    Sent,
    Told,
    frame,
    read_frame,
)
from ridgeline.loadtest.run.client.stream import Completion
from ridgeline.loadtest.run.records import RequestRecord

STDERR_CHARACTERS = 500
MESSAGE_BYTES = 2**20
ENDED = BrokenPipeError, ConnectionResetError
"""What writing raises when the process has ended; the reading side can say why."""


class ClientProcess:
    """A client process that has read its requests and waits for the start."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)

    async def load(self, job: Job, requests: Iterator[Completion]) -> None:
        """Hand over the job; the requests are made in a thread, one by one, so that they are in memory once."""
        with contextlib.suppress(*ENDED):
            self._stdin.write(frame(job))
            while (request := await asyncio.to_thread(next, requests, None)) is not None:
                self._stdin.write(frame(request))
                await self._stdin.drain()
        told = await self._next()
        assert isinstance(told, Ready), told

    async def run(self, on_sent: Callable[[int], None], on_record: Callable[[RequestRecord], None]) -> ClientLoad:
        """Start sending, and call back for everything that happens. Raises LoadTestError if the process dies."""
        with contextlib.suppress(*ENDED):
            self._stdin.write(frame(Begin()))
            await self._stdin.drain()
        while True:
            match await self._next():
                case Sent(requests):
                    on_sent(requests)
                case RequestEnded(record):
                    on_record(record)
                case ClientLoad() as load:
                    return load

    async def _next(self) -> Told:
        try:
            return self._decoder.decode(await read_frame(self._stdout))
        except asyncio.IncompleteReadError:
            raise await self._death() from None

    async def _death(self) -> LoadTestError:
        assert self._process.stderr is not None
        said = (await self._process.stderr.read()).decode(errors="replace").strip()
        status = await self._process.wait()
        return LoadTestError(f"the client process ended with status {status}: {said[-STDERR_CHARACTERS:] or 'no word'}")


@asynccontextmanager
async def client_process(job: Job, requests: Iterable[Completion]) -> AsyncIterator[ClientProcess]:
    """Start a client process that holds these requests; it is gone when the block ends, however it ends."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # the current folder may hold modules of the same names
        "-m",
        "ridgeline.loadtest.run.client.process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MESSAGE_BYTES,
        start_new_session=True,  # Ctrl-C is the command's to handle
    )
    try:
        client = ClientProcess(process)
        await client.load(job, iter(requests))
        yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
