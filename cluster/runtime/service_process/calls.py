"""Calls over a socket between an actor and the process that runs its service; pickled, since both are ours.

A message is a pickle with its length in front, as `multiprocessing.connection` sends it. Either side's end is seen by
the other at once: as the end of the stream. A call is its number, the method and its arguments; an answer is the
number, a value and an exception or None.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ridgeline.cluster.runtime.processes import ProcessId

READABLE = ("builtins", "asyncio", "ridgeline.contracts", "ridgeline.cluster", "ridgeline.router")
"""Packages whose exceptions travel as they are: an actor can read them without importing vLLM."""
Collect = Callable[[], Awaitable[object]]
ENDED = "the service's process has ended"
_ENDED = (asyncio.IncompleteReadError, ConnectionError)
_LENGTH = struct.Struct("!i")
"""That of `multiprocessing.connection`, for messages below 2 GiB."""


class ServiceGone(RuntimeError):
    """The process of a service has ended."""


class ServiceError(RuntimeError):
    """What a service raised, in words, where its class is one that an actor cannot read or would import vLLM for."""


class Service(Protocol):
    """An object whose coroutine methods may be called.

    Those named in `OFF_LOOP` are plain functions instead, and are answered on another thread, also while the event loop
    is stuck.
    """

    OFF_LOOP: frozenset[str]


def encode(message: object) -> bytes:
    """Return the message with its length in front."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def readable(error: Exception) -> Exception:
    """Return the exception, or its words if an actor could not read it."""
    if type(error).__module__.startswith(READABLE):
        with suppress(Exception):  # its pickling may do anything, and some can be written and not read
            pickle.loads(pickle.dumps(error))
            return error
    return ServiceError(f"{type(error).__name__}: {error}")


class ServiceClient:
    """The actor's side: any number of calls at a time. `open` makes one."""

    def __init__(self, process: ProcessId, writer: asyncio.StreamWriter, collect: Collect) -> None:
        self.process = process
        self._writer = writer
        self._collect = collect
        self._ids = count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, sock: socket.socket, on_gone: Callable[[], None], collect: Collect) -> ServiceClient:
        """Wait until the process says who it is; `on_gone` is called once it has ended.

        Raises ServiceGone, or why it cannot be that service. `collect` is awaited once the process is let go: if it is
        a child, somebody must wait for its end.
        """
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        try:
            first: ProcessId | Exception = await _next(reader)
            if isinstance(first, Exception):
                raise first
        except BaseException as error:
            writer.close()
            if isinstance(error, Exception):
                await collect()
            if isinstance(error, _ENDED):
                raise ServiceGone("the service's process ended before it answered") from error
            raise
        client = cls(first, writer, collect)
        client._reading = asyncio.create_task(client._read(reader, on_gone), name="service-replies")
        return client

    async def call(self, method: str, *args: Any) -> Any:
        """Return what the method returns, or raise what it raises. Raises ServiceGone. The caller sets the deadline."""
        call_id = next(self._ids)
        answer = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(encode((call_id, method, args)))
            await self._writer.drain()
            return await answer
        except ConnectionError as error:
            raise ServiceGone(ENDED) from error
        finally:
            self._calls.pop(call_id, None)

    async def _read(self, reader: asyncio.StreamReader, on_gone: Callable[[], None]) -> None:
        try:
            await self._take_replies(reader)
        except _ENDED:
            pass
        finally:
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(ServiceGone(ENDED))
            on_gone()

    async def _take_replies(self, reader: asyncio.StreamReader) -> None:
        while True:
            call_id, value, error = await _next(reader)
            answer = self._calls.get(call_id)
            if answer is None or answer.done():
                continue  # its caller has given up
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

    async def close(self) -> None:
        """Let go of the service, which then ends; what is still called fails."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,))
        await self._collect()
        if self.process.folder:
            await asyncio.to_thread(shutil.rmtree, self.process.folder, ignore_errors=True)


async def _next(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


class CallServer:
    """The service's side: reads calls on a thread of its own and runs them in the service's event loop."""

    def __init__(self, connection: Connection, service: Service, on_gone: Callable[[], None]) -> None:
        self._connection = connection
        self._service = service
        self._on_gone = on_gone
        self._sending = threading.Lock()

    def start(self, loop: asyncio.AbstractEventLoop, process: ProcessId) -> None:
        """Say who this is and answer calls from now on; `on_gone` is called on the thread when the caller is gone."""
        self._send(pickle.dumps(process))
        threading.Thread(target=self._serve, args=(loop,), name="calls", daemon=True).start()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with suppress(EOFError, ConnectionError):
                while True:
                    self._take(loop, *self._connection.recv())
        finally:
            self._on_gone()

    def _take(self, loop: asyncio.AbstractEventLoop, call_id: int, method: str, args: tuple[Any, ...]) -> None:
        if method in self._service.OFF_LOOP:
            self._answer(call_id, lambda: getattr(self._service, method)(*args))
            return
        running = asyncio.run_coroutine_threadsafe(self._run(method, args), loop)
        running.add_done_callback(lambda done: self._answer(call_id, done.result))

    async def _run(self, method: str, args: tuple[Any, ...]) -> Any:
        return await getattr(self._service, method)(*args)

    def _answer(self, call_id: int, result: Callable[[], Any]) -> None:
        try:
            data = pickle.dumps((call_id, result(), None))
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets it
            data = pickle.dumps((call_id, None, readable(error)))
        self._send(data)

    def _send(self, data: bytes) -> None:
        with self._sending, suppress(OSError):  # a caller that is gone is seen where its calls are read
            self._connection.send_bytes(data)
