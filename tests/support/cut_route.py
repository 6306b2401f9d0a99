"""A route to a server on loopback that can be cut: what it carries is dropped, or its connections are refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Literal

from ridgeline.contracts.rpc.address import join_host_port

How = Literal["dropped", "refused"]


class Route:
    """Carries TCP connections to an address; `start` it first."""

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False

    async def start(self) -> str:
        """Returns the address to connect to."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return join_host_port("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def lead_to(self, target: str) -> None:
        """Carry later connections to this address."""
        self._host, _, port = target.rpartition(":")
        self._port = int(port)

    @property
    def carries(self) -> bool:
        """Whether it is not cut."""
        return self._open.is_set() and not self._refuses

    def cut(self, how: How) -> None:
        """Drop all that is sent from now on, or end all connections and refuse new ones."""
        self._refuses = how == "refused"
        if self._refuses:
            self._end_all()
        else:
            self._open.clear()

    def mend(self) -> None:
        """Carry again; connections from which something was dropped cannot go on."""
        if not self._open.is_set():
            self._end_all()
        self._open.set()
        self._refuses = False

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        self._end_all()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _end_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:  # its server has ended
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)
