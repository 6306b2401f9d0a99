"""The dispatcher: serves the routers of one deployment over gRPC, which are its only clients.

It carries no token. If it is lost, running streams go on; prompts wait in their routers until there is another, which
learns from each router which places are in use.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping

import grpc
import grpc.aio
import msgspec

from ridgeline.contracts.errors import AdapterRefused, EngineError
from ridgeline.contracts.handoff import UNREADABLE
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.contracts.rpc.channel import add_port
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.dispatch.modes import OwnModes
from ridgeline.router.fleet.adapters import OwnAdapters
from ridgeline.router.fleet.fleet import Fleet
from ridgeline.router.fleet.pairing import KvPair, PairingRefused
from ridgeline.router.fleet.roles import ModeImpossible, role_table
from ridgeline.router.placement.cluster_state import ClusterState
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.pool_queue import QueueNow, RouterRequests
from ridgeline.router.router_control import RouterControl
from ridgeline.router.settings import RouterSettings, RouterStart
from ridgeline.router.shared.holdings import Part, Parts
from ridgeline.router.shared.messages import (
    SERVICE,
    AdapterChanged,
    ChangeAdapter,
    ChangeMode,
    Complete,
    Down,
    EncodedDowns,
    Holds,
    Joins,
    ModeChanged,
    Offered,
    Pairs,
    Sums,
    Up,
    Ups,
)
from ridgeline.router.watching import Comparing, Wanted
from ridgeline.worker_runtime.client import OPTIONS, decoder, encode, unary_handler

SUMS_EVERY_S = 0.1
"""How often routers are told what the others hold, if it has changed; admission is late by as much."""
ALL_JOIN_WITHIN_S = 2.0
"""How long a new dispatcher waits for all routers, to know which places are in use, before it lets a prompt start."""
STOP_WITHIN_S = 1.0
MOST_UNREAD = 100_000
"""Messages that may wait for a router that does not read; far more than any router has requests."""
MOST_AT_ONCE = 1_000
"""Messages in one batch: a few MiB, far below the limit of gRPC
(`ridgeline.worker_runtime.client.MAX_MESSAGE_BYTES`)."""
logger = logging.getLogger(__name__)


class NotReading(Exception):
    """The router has not read what was sent to it, and counts as gone."""


class JoinedRouter:
    """One router as the dispatcher sees it: the prompts that it wants to start, its places, what it has admitted.

    `take` its messages in order, send it every `next_batch`, and `close` it: what is counted for it ends with it.
    """

    def __init__(self, state: ClusterState, parts: Parts) -> None:
        self.start = RouterStart()
        self.is_complete = False
        """Whether it has told all that it held when it joined."""
        self._parts = parts
        self._part: Part = parts.enter()
        self._news: dict[str, msgspec.Raw] = {}
        """By kind, the newest of what all routers are told, until it is sent."""
        self._state = state
        self._requests = RouterRequests(self.send)
        self._outbox: list[Down] = []
        self._filled = asyncio.Event()

    def take(self, message: Up) -> None:
        """Act on a message. An error in it is this message's own: the router's other requests go on."""
        try:
            self._act_on(message)
        except Exception:
            logger.exception("a message of %s failed: %s", self.start, type(message).__name__)

    def _act_on(self, message: Up) -> None:
        match message:
            case Joins():
                self.start = message.router
            case Holds():
                self._parts.take(self._part, message)
            case Complete():
                self.is_complete = True
            case _:
                self._state.apply(self._requests, message)

    def send(self, message: Down) -> None:
        """Put a message into the next batch."""
        self._outbox.append(message)
        self._filled.set()

    def show(self, kind: str, news: msgspec.Raw) -> None:
        """Put an encoded message into the next batch, in place of an older one of this kind that is not sent yet."""
        self._news[kind] = news
        self._filled.set()

    def look(self) -> None:
        """Have the next batch tell what has changed of the other routers' holdings."""
        self._filled.set()

    async def next_batch(self) -> EncodedDowns:
        """Wait for messages and return them. Raises NotReading if there are too many."""
        while True:
            await self._filled.wait()
            if len(self._outbox) > MOST_UNREAD:
                raise NotReading(f"{self.start} has not read {len(self._outbox)} messages")
            messages: list[Down | msgspec.Raw] = [*self._news.values()]
            if (others := self._parts.differences(self._part)) is not None:
                messages.append(others)
            messages += self._outbox[:MOST_AT_ONCE]
            del self._outbox[:MOST_AT_ONCE]
            self._news.clear()
            if not self._outbox:
                self._filled.clear()
            if messages:
                return EncodedDowns(messages)

    def close(self) -> None:
        """Give up all its requests, because the router has gone."""
        self._parts.leave(self._part)
        self._state.left(self._requests)


class _Stopped(Exception):
    """Raised inside the dispatcher's task group to end all of it."""


class Dispatcher(RouterControl):
    """The dispatcher of a deployment. Create it inside a running event loop."""

    TITLE = "dispatcher"
    comparing: Comparing

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        fleet = Fleet(
            f"dispatcher-{secrets.token_hex(4)}",
            tls=settings.tls,
            stall_timeout_s=settings.stall_timeout_s,
            roles=role_table(settings),
            reuses_decode_kv=settings.reuse_decode_kv,
        )
        super().__init__(fleet)
        learned = Learned()
        self.comparing = Comparing(self.fleet, learned, settings.router)
        self._state = ClusterState(self.fleet, settings, learned, self.comparing.policy, paused=True)
        self._modes = OwnModes(self.fleet, self._state.mode_changed)
        self._adapters = OwnAdapters(self.fleet, settings.served_names, settings.router.request_timeout_s)
        self._routers: set[JoinedRouter] = set()
        self._parts = Parts()
        self._told_sums = self._told_pairs = msgspec.Raw(b"")
        self._told_adapters = msgspec.Raw(encode(Offered([])))
        """What all routers were told last, encoded."""
        self._pairs_of: list[KvPair] | None = None
        """The pairs that `_told_pairs` tells."""
        self._all_there = asyncio.Event()
        self._server = grpc.aio.server(options=OPTIONS)
        self._stop = asyncio.Event()

    async def serve(self, worker_addresses: list[str], host: str, port: int, *, some: bool = False) -> str:
        """Connect to the workers, listen, and return host:port; with `some`, begin with those that are reached.

        Raises PairingRefused, WorkerLost or RuntimeError.
        """
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(worker_addresses, host, port, address, some), name="dispatcher")
        waiting: list[asyncio.Future[object]] = [self._running, address]  # type: ignore[list-item]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running  # raises the cause
        return await address

    @property
    def queues(self) -> Mapping[Pool, QueueNow]:
        """The prompts that wait."""
        return self._state.queues_now()

    def fleet_changed(self) -> None:
        """Look again what can start, now that there are other workers."""
        self._state.look()

    async def stop(self) -> None:
        """End all connections; streams go on without it."""
        self._stop.set()
        if self._running is not None:
            await self._running

    async def _run(self, workers: list[str], host: str, port: int, address: asyncio.Future[str], some: bool) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self.fleet.connect(workers, group, some=some)
                await self._adapters.load_first(self._settings.lora_modules, again=some)
                self._adapters.on_change(self._tell_adapters)
                group.create_task(self._lag.watch(), name="loop-lag")
                group.create_task(self._tell_sums(), name="sums")
                group.create_task(self.comparing.run(), name="compare-policies")
                address.set_result(await self._listen(host, port))
                asyncio.get_running_loop().call_later(ALL_JOIN_WITHIN_S, self._all_have_joined)
                await self._stop.wait()
                raise _Stopped
        except* _Stopped:
            pass
        except* (EngineError, PairingRefused, RuntimeError) as errors:
            raise errors.exceptions[0] from None
        finally:
            await self._server.stop(STOP_WITHIN_S)

    async def _listen(self, host: str, port: int) -> str:
        methods = {
            "Join": grpc.stream_stream_rpc_method_handler(self._join, response_serializer=encode),
            "ChangeMode": unary_handler(self._change_mode, ChangeMode),
            "ChangeAdapter": unary_handler(self._change_adapter, ChangeAdapter),
            "Record": grpc.unary_stream_rpc_method_handler(self._record, decoder(Wanted)),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = add_port(self._server, join_host_port(host, port), self._settings.tls)
        await self._server.start()
        return join_host_port(host, port)

    # --- routers

    async def _join(self, batches: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one router until its stream ends."""
        router = JoinedRouter(self._state, self._parts)
        self._routers.add(router)
        self._look()
        router.show("sums", self._told_sums)
        router.show("pairs", self._told_pairs)
        router.show("adapters", self._told_adapters)
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(_write(router, context), name="write-to-router")
                await self._read(router, batches)
                writing.cancel()
        except* NotReading as errors:
            logger.warning("%s", errors.exceptions[0])
        except* UNREADABLE as errors:
            logger.warning("%s sent what nobody can read: %s", router.start, errors.exceptions[0])
        finally:
            self._routers.discard(router)
            router.close()

    async def _read(self, router: JoinedRouter, batches: AsyncIterator[bytes]) -> None:
        """Take a router's messages; the first ones have all the places that it holds."""
        readable = decoder(Ups)
        async for batch in batches:
            for message in readable(batch).messages:
                router.take(message)
            if sum(one.is_complete for one in self._routers) >= self._settings.routers:
                self._all_have_joined()

    def _all_have_joined(self) -> None:
        if not self._all_there.is_set():
            self._all_there.set()
            self._state.resume()

    def _sums(self) -> Sums:
        return Sums(
            mode=self.fleet.mode,
            role_number=self.fleet.role_number,
            queues=self._state.queues_now(),
            outstanding={worker.worker_id: worker.outstanding for worker in self.fleet.workers},
        )

    def _tell_adapters(self) -> None:
        self._told_adapters = msgspec.Raw(encode(Offered([*self.fleet.adapters.values()])))
        for router in self._routers:
            router.show("adapters", self._told_adapters)

    def _look(self) -> None:
        """Tell each router what has changed since it was told last."""
        sums = encode(self._sums())
        if sums != self._told_sums:
            self._told_sums = msgspec.Raw(sums)
            for router in self._routers:
                router.show("sums", self._told_sums)
        if self._pairs_of is not self.fleet.kv_pairs:  # the fleet makes a new list with each change
            self._pairs_of = self.fleet.kv_pairs
            self._told_pairs = msgspec.Raw(encode(Pairs(self._pairs_of)))
            for router in self._routers:
                router.show("pairs", self._told_pairs)
        for router in self._routers:
            router.look()

    async def _tell_sums(self) -> None:
        """Look every `SUMS_EVERY_S`, until cancelled."""
        while True:
            await asyncio.sleep(SUMS_EVERY_S)
            self._look()

    # --- calls

    async def _change_mode(self, asked: ChangeMode) -> ModeChanged:
        try:
            change = await self._modes.change(asked.mode)
        except (ModeImpossible, PairingRefused) as error:
            return ModeChanged(refused=str(error))
        self._look()
        return ModeChanged(change.rerouted_prompts, change.took_s)

    async def _change_adapter(self, asked: ChangeAdapter) -> AdapterChanged:
        try:
            if not asked.path:
                return AdapterChanged(found=await self._adapters.unload(asked.name))
            await self._adapters.load(asked.name, asked.path, in_place=asked.in_place)
        except AdapterRefused as error:
            return AdapterChanged(refused=str(error))
        return AdapterChanged()

    async def _record(self, wanted: Wanted | None, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        if wanted is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request makes no sense")
            return
        async for lines in self.comparing.record(wanted):
            yield lines


async def _write(router: JoinedRouter, context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await router.next_batch())
