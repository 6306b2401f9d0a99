"""A router's connection to the dispatcher: it joins, joins again after a break, and carries messages both ways.

What is said while there is no connection is not kept: on joining, the router tells all that still holds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import msgspec

from ridgeline.contracts.handoff import UNREADABLE
from ridgeline.contracts.rpc.channel import open_aio_channel, why_refused
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.router.placement.places import Placement
from ridgeline.router.settings import RouterStart
from ridgeline.router.shared.messages import SERVICE, Down, Downs, Joins, Up, Ups
from ridgeline.worker_runtime.client import OPTIONS, RETRY_S, decoder, encode

T = TypeVar("T")
MOST_AT_ONCE = 200
"""Messages in one batch: those of places with prompts of 128k tokens, whose hashes are sent along, take 15 MiB."""
LOOK_EVERY_S = 1.0
"""How often a router whose prompts wait looks whether there is a dispatcher."""
LATE_S = 1.0
"""If it looks so much later than it meant to, this router stood still."""
logger = logging.getLogger(__name__)


class NoDispatcher(Exception):
    """The dispatcher does not answer."""


class _Outbox:
    """What one connection has still to send. Each has its own, since gRPC may go on reading that of a broken one."""

    def __init__(self) -> None:
        self._messages: list[Up] = []
        self._filled = asyncio.Event()

    def put(self, message: Up) -> None:
        """Put a message into the next batch."""
        self._messages.append(message)
        self._filled.set()

    async def batches(self) -> AsyncIterator[Ups]:
        """Yield what there is to send, for ever."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(0)  # what else this turn of the loop says goes with it
            batch, self._messages = Ups(self._messages[:MOST_AT_ONCE]), self._messages[MOST_AT_ONCE:]
            if not self._messages:
                self._filled.clear()
            yield batch


class Link:
    """The connection; `run` keeps it up, once `follow` has said to whom."""

    def __init__(self, router: RouterStart, tls: TlsFiles | None) -> None:
        self.router = router
        self.state: Callable[[], list[Up]] = list
        """Returns what a dispatcher must know of this router when it joins."""
        self.on_message: Callable[[Down], None] = lambda _: None
        self._tls = tls
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._outbox: _Outbox | None = None
        """That of the present connection; None while there is none."""
        self._away_since_s: float | None = time.monotonic()

    @property
    def address(self) -> str:
        """Where the dispatcher is."""
        return self._address

    @property
    def away_s(self) -> float:
        """Seconds without a dispatcher; 0 while there is one."""
        return 0.0 if self._away_since_s is None else time.monotonic() - self._away_since_s

    def send(self, message: Up) -> None:
        """Put a message into the next batch; drop it while there is no connection."""
        if self._outbox is not None:
            self._outbox.put(message)

    async def follow(self, address: str) -> None:
        """Join the dispatcher at this address from now on. Raises TlsFileError."""
        former, self._channel, self._address = self._channel, open_aio_channel(address, OPTIONS, self._tls), address
        if former is not None:
            await former.close()

    async def run(self) -> None:
        """Keep the connection up until cancelled."""
        try:
            while True:
                try:
                    await self._join()
                except grpc.aio.AioRpcError as error:
                    why = why_refused(error.details())
                except (*UNREADABLE, asyncio.CancelledError) as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    why = f"{type(error).__name__}: {error}"  # a channel that is closed cancels its calls
                else:
                    why = "it closed the connection"
                if self._away_since_s is None:
                    logger.warning("the dispatcher at %s is away: %s", self._address, why)
                    self._away_since_s = time.monotonic()
                await asyncio.sleep(RETRY_S)
        finally:
            await self._open_channel().close()

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise NoDispatcher("this router has not been told where its dispatcher is")
        return self._channel

    async def _join(self) -> None:
        method = self._open_channel().stream_stream(f"/{SERVICE}/Join", request_serializer=encode)
        outbox = self._outbox = _Outbox()
        for first in (Joins(self.router), *self.state()):
            outbox.put(first)
        call = method(outbox.batches())
        readable = decoder(Downs)
        try:
            async for batch in call:
                self._away_since_s = None
                for message in readable(batch).messages:
                    self.on_message(message)
        finally:
            self._outbox = None
            call.cancel()

    async def lines(self, name: str, message: msgspec.Struct) -> AsyncGenerator[bytes, None]:
        """Yield what a method of the dispatcher streams, until it ends. Raises NoDispatcher."""
        method: Any = self._open_channel().unary_stream(f"/{SERVICE}/{name}", request_serializer=encode)
        call = method(message)
        try:
            async for lines in call:
                yield lines
        except grpc.aio.AioRpcError as error:
            raise NoDispatcher(f"the dispatcher at {self._address} has ended {name}: {error.details()}") from error
        finally:
            call.cancel()

    async def call(self, name: str, message: msgspec.Struct, kind: type[T], deadline_s: float) -> T:
        """Call a method of the dispatcher. Raises NoDispatcher."""
        method: Any = self._open_channel().unary_unary(
            f"/{SERVICE}/{name}", request_serializer=encode, response_deserializer=decoder(kind)
        )
        try:
            reply: T | None = await method(message, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise NoDispatcher(
                f"the dispatcher at {self._address} does not answer: {why_refused(error.details())}"
            ) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise NoDispatcher(f"the dispatcher has left {self._address}") from None
        if reply is None:
            raise NoDispatcher(f"{name} at {self._address}: the answer makes no sense; is it of the same version?")
        return reply


async def give_up_without_a_dispatcher(link: Link, placement: Placement, after_s: float) -> None:
    """Fail all waiting prompts once there has been no dispatcher for too long; runs until cancelled."""
    while True:
        due_s = time.monotonic() + LOOK_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
        stood_still = time.monotonic() - due_s > LATE_S  # then it was this router that could not hear
        if not stood_still and link.away_s > after_s:
            placement.give_up(
                f"there has been no dispatcher at {link.address} for {after_s:.0f} s (router.recovery_timeout_s): "
                "retry. Operators: serve's log says why the dispatcher does not start"
            )
