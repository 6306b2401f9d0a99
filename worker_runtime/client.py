"""The data plane between router and workers: gRPC, msgpack bodies, one stream of step batches per router.

`host.py` serves it in the worker; the router holds one `WorkerClient` per worker. Ray places and restarts the workers
but carries no token: an actor call costs about a millisecond and a streamed Ray item 150 us, each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import msgspec

from ridgeline.contracts.errors import (
    AdapterRefused,
    EngineFailed,
    HandoffLost,
    InvalidTask,
    TaskRejected,
    WorkerDraining,
    WorkerLost,
)
from ridgeline.contracts.handoff import UNREADABLE, KvHandoff
from ridgeline.contracts.rpc.channel import open_aio_channel, why_refused
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.contracts.tasks import Adapter, GenerateTask, StepBatch, TokenDelta
from ridgeline.contracts.workers import (
    AbortRequest,
    Ack,
    AdapterLoaded,
    AttachRequest,
    DrainRequest,
    LoadAdapter,
    Offer,
    OfferRequest,
    PairAnswer,
    PairRequest,
    Role,
    SubmitRequest,
    UnloadAdapter,
    WorkerDescription,
    WorkerStatus,
)

SERVICE = "ridgeline.Worker"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
CONTROL_DEADLINE_S = 10.0
STATUS_DEADLINE_S = 2.0
PAIR_DEADLINE_S = 30.0
ADAPTER_DEADLINE_S = 120.0
"""For reading and copying an adapter of gigabytes, or fetching it from the hub."""
RETRY_S = 0.2
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A dead peer is noticed within 15 s even when nothing is being sent.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # gRPC's own pause between two attempts to connect grows to two minutes, for which a worker would stay away after
    # its network is back. The last one also bounds one attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
]

T = TypeVar("T")
OnUnclaimed = Callable[[KvHandoff], None]
"""Called with a hand-off whose request has been given up: nobody else will release it before its lease ends."""
OnDelta = Callable[[TokenDelta], bool]
"""Receives a task's deltas in order, as they are read from the stream; returns True if no more is wanted."""
encode = msgspec.msgpack.Encoder().encode


MEANT = "ridgeline-worker-bin"
"""Metadata of a call: for which worker and incarnation it is. A call without it is for whoever answers."""


class Meant(msgspec.Struct, frozen=True, array_like=True):
    """The worker for which a call is; another one may have taken over its port."""

    worker_id: str
    incarnation: str


def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a deserializer that refuses anything that is not `kind`."""
    return msgspec.msgpack.Decoder(kind).decode


class _RunningTask:
    """A task that the worker runs for this router."""

    def __init__(self, on_delta: OnDelta) -> None:
        self._on_delta = on_delta
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the caller gets no more deltas."""
        self.finished = False
        """Whether the worker has nothing more to do for it."""
        self.last: TokenDelta | None = None

    def take(self, delta: TokenDelta) -> None:
        """Pass a delta on. What fails on the way is this task's own failure: others share the stream."""
        self.last, self.finished = delta, delta.finished
        try:
            _raise_error(delta)
            wanted = not self._on_delta(delta)
        except Exception as error:  # noqa: BLE001 - `run_task` raises it
            self.fail(error)
        else:
            if (delta.finished or not wanted) and not self.over.done():
                self.over.set_result(None)

    def fail(self, error: Exception) -> None:
        """Have the caller raise this error, unless it is over already."""
        if not self.over.done():
            self.over.set_exception(error)


class WorkerClient:
    """The router's end: submit tasks, pass their deltas on, abort.

    `run` must be running in a task group of the owner; it keeps the stream attached and ends only when cancelled. When
    the stream breaks, every open `run_task` raises WorkerLost, and the worker aborts what this router had asked for.
    """

    def __init__(
        self,
        address: str,
        router_id: str,
        on_unclaimed: OnUnclaimed = lambda _: None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.address = address
        self._router_id = router_id
        self._on_unclaimed = on_unclaimed
        self._channel = open_aio_channel(address, OPTIONS, tls)
        self._tasks: dict[str, _RunningTask] = {}
        self._asked: set[asyncio.Future[Offer]] = set()
        """Questions for what its cache has, whose asker may have left."""
        self._attached = asyncio.Event()
        self._closed = False
        self._metadata: tuple[tuple[str, bytes], ...] = ()
        """Once identified, the partner of all calls: no other process that gets this address acts on them."""
        self._why_lost = ""
        self._aborts: asyncio.Queue[str] = asyncio.Queue()
        self.last_token_s: float | None = None
        """When the worker last sent what it had computed, by `time.monotonic`."""
        self.failed_s = float("-inf")
        """When it last failed or refused a request, or lost its connection."""
        self.news = asyncio.Event()
        """Set when it has failed or refused a request, when its connection broke or came, and when it says that its
        health has changed. Who acts clears it."""

    @property
    def connected(self) -> bool:
        """True while the stream of step batches is open."""
        return self._attached.is_set()

    async def wait_connected(self, timeout_s: float) -> None:
        """Wait for the stream; raises WorkerLost when it does not come up in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._attached.wait()
        except TimeoutError as error:
            why = f": {self._why_lost}" if self._why_lost else ""
            raise WorkerLost(f"no connection to the worker at {self.address} within {timeout_s:.0f} s{why}") from error

    async def run(self) -> None:
        """Keep the stream attached and the aborts flowing, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._attach_for_ever())
            group.create_task(self._send_aborts())

    async def identify(self, within_s: float) -> WorkerDescription:
        """Ask which worker is there, before `run`: from then on it is this incarnation or nobody. Raises WorkerLost."""
        give_up_s = time.monotonic() + within_s
        while True:
            try:
                description = await self.describe()
            except WorkerLost as error:
                if time.monotonic() >= give_up_s:
                    message = f"no connection to the worker at {self.address} within {within_s:.0f} s: {error}"
                    raise WorkerLost(message) from error
                await asyncio.sleep(min(RETRY_S, within_s))
            else:
                self._metadata = ((MEANT, encode(Meant(description.worker_id, description.incarnation))),)
                return description

    async def describe(self) -> WorkerDescription:
        """Ask who the worker is. Raises WorkerLost."""
        return await self._unary("Describe", Ack(), WorkerDescription)

    async def status(self) -> WorkerStatus:
        """Ask how the worker is doing. Raises WorkerLost."""
        return await self._unary("Status", Ack(), WorkerStatus, deadline_s=STATUS_DEADLINE_S)

    async def pair(self, addresses: list[str], transport: str | None = None) -> PairAnswer:
        """Have the worker agree with the sources it will fetch from, before the first request. Raises WorkerLost."""
        return await self._unary("Pair", PairRequest(addresses, transport), PairAnswer, deadline_s=PAIR_DEADLINE_S)

    async def take_role(self, role: Role) -> None:
        """Have the worker keep this role and limit its engine's steps accordingly. Raises WorkerLost."""
        await self._unary("TakeRole", role, Ack)

    async def offer(self, task: GenerateTask, within_s: float) -> KvHandoff | None:
        """Ask what its prefix cache has of the prompt of a task for another worker.

        What comes later than `within_s`, or after a cancellation, is unclaimed. Raises WorkerLost.
        """
        asked = asyncio.ensure_future(self._unary("Offer", OfferRequest(task), Offer))
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        try:
            async with asyncio.timeout(within_s):
                return (await asyncio.shield(asked)).handoff
        except BaseException as error:
            asked.add_done_callback(self._unwanted)
            if isinstance(error, TimeoutError):
                raise WorkerLost(f"Offer at {self.address}: no answer within {within_s:.3f} s") from error
            raise

    def _unwanted(self, asked: asyncio.Future[Offer]) -> None:
        if not asked.cancelled() and asked.exception() is None and (handoff := asked.result().handoff) is not None:
            self._on_unclaimed(handoff)

    async def load_adapter(self, name: str, path: str, digest: str = "") -> Adapter:
        """Have the worker take an adapter in. Raises AdapterRefused or WorkerLost."""
        asked = LoadAdapter(name=name, path=path, digest=digest)
        answer = await self._unary("LoadAdapter", asked, AdapterLoaded, deadline_s=ADAPTER_DEADLINE_S)
        if answer.adapter is None:
            raise AdapterRefused(answer.refused)
        return answer.adapter

    async def unload_adapter(self, adapter: Adapter, after_s: float) -> None:
        """Have the worker forget an adapter once nothing can run with it any more. Raises WorkerLost."""
        await self._unary("UnloadAdapter", UnloadAdapter(adapter=adapter, after_s=after_s), Ack)

    async def drain(self, timeout_s: float) -> None:
        """Have the worker leave, see `DrainRequest`; returns at once. Raises WorkerLost."""
        await self._unary("Drain", DrainRequest(timeout_s), Ack)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False when some are in use. Raises WorkerLost."""
        return (await self._unary("ResetPrefixCache", Ack(), Ack)).accepted

    async def run_task(self, task: GenerateTask, on_delta: OnDelta) -> None:
        """Have the worker run a task, and return after its last delta, or once `on_delta` wants no more.

        `on_delta` is called from the loop that reads the stream, so that a token wakes nobody on its way: it must
        neither block nor wait. Cancelling this aborts the task on the worker.

        Raises WorkerLost, WorkerDraining, TaskRejected, InvalidTask, HandoffLost or EngineFailed, and what `on_delta`
        raises.
        """
        if not self.connected:
            # Otherwise the worker could accept the task into a session that is being torn down, and the stream of its
            # deltas would never end.
            raise WorkerLost(self._why_lost or f"the worker at {self.address} is not connected")
        running = self._tasks[task.request_id] = _RunningTask(on_delta)
        try:
            ack = await self._submit(task)
            if not ack.accepted:
                running.finished = True
                if not ack.attached:  # broken on its side already; it is no sign of a drain
                    raise WorkerLost(f"the worker at {self.address} has no stream of this router: {ack.reason}")
                raise TaskRejected(ack.reason)
            await running.over
        except BaseException:
            if running.finished:
                self._unclaimed(running.last)  # its caller will not see it as finished
            raise
        finally:
            del self._tasks[task.request_id]
            if running.over.done() and not running.over.cancelled():
                running.over.exception()  # else asyncio would log one that came while the task was submitted
            if not running.finished:
                # Also after WorkerLost: the task may have come in on a stream that was up again already.
                self._aborts.put_nowait(task.request_id)

    async def close(self) -> None:
        """Close the channel and fail what is still open; call after `run` has been cancelled."""
        self._closed = True
        self._lose(f"the worker at {self.address} has left")
        await self._channel.close()

    async def _attach_for_ever(self) -> None:
        while True:
            try:
                await self._attach_once()
            except grpc.aio.AioRpcError as error:
                self._lose(f"the connection to the worker at {self.address} broke: {why_refused(error.details())}")
            except WorkerLost as error:
                self._lose(str(error))
            else:
                self._lose(f"the worker at {self.address} closed its stream")
            await asyncio.sleep(RETRY_S)

    async def _attach_once(self) -> None:
        method = self._channel.unary_stream(
            f"/{SERVICE}/Attach", request_serializer=encode, response_deserializer=decoder(StepBatch)
        )
        call = method(AttachRequest(self._router_id), metadata=self._metadata)
        try:
            async for batch in call:
                self._require(batch, "Attach")
                if not self.connected or not batch.deltas:  # the worker greets, or its health has changed
                    self._attached.set()
                    self.news.set()
                for delta in batch.deltas:
                    self._deliver(delta)
        finally:
            call.cancel()

    def _deliver(self, delta: TokenDelta) -> None:
        if delta.error is None:
            self.last_token_s = time.monotonic()
        elif delta.error_kind in ("engine", "draining"):
            self.has_failed()
        running = self._tasks.get(delta.request_id)
        if running is None or running.over.done():
            self._unclaimed(delta)
        else:
            running.take(delta)

    def _unclaimed(self, delta: TokenDelta | None) -> None:
        if delta is not None and delta.handoff is not None:
            self._on_unclaimed(delta.handoff)

    def _lose(self, reason: str) -> None:
        if self.connected:
            self.has_failed()
        self._attached.clear()
        self._why_lost = reason
        for running in self._tasks.values():
            running.fail(WorkerLost(reason))

    async def _submit(self, task: GenerateTask) -> Ack:
        try:
            ack = await self._unary("Submit", SubmitRequest(self._router_id, task), Ack)
        except WorkerLost:
            self.has_failed()
            raise
        if not ack.accepted:
            self.has_failed()
        return ack

    def has_failed(self) -> None:
        """Note that a request there has failed or been refused, so that its status is asked for at once."""
        self.failed_s = time.monotonic()
        self.news.set()

    async def _send_aborts(self) -> None:
        while True:
            ids = [await self._aborts.get()]
            while not self._aborts.empty():
                ids.append(self._aborts.get_nowait())
            try:
                await self._unary("Abort", AbortRequest(self._router_id, ids), Ack)
            except WorkerLost:
                continue  # the worker aborts everything of a router whose stream is gone

    async def _unary(
        self, name: str, message: msgspec.Struct, kind: type[T], deadline_s: float = CONTROL_DEADLINE_S
    ) -> T:
        method = self._channel.unary_unary(
            f"/{SERVICE}/{name}", request_serializer=encode, response_deserializer=decoder(kind)
        )
        if self._closed:
            raise WorkerLost(f"the worker at {self.address} has left")
        try:
            reply = await method(message, timeout=deadline_s, metadata=self._metadata)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            # A channel that is closed cancels its calls: nobody has cancelled us, and the request must not just vanish.
            raise WorkerLost(f"the worker at {self.address} has left") from None
        except grpc.aio.AioRpcError as error:
            why = why_refused(error.details())
            raise WorkerLost(f"{name} at {self.address}: {error.code().name}: {why}") from error
        self._require(reply, name)
        return cast(T, reply)

    def _require(self, reply: object, name: str) -> None:
        """Return the answer, or raise: `grpc` logs an answer that cannot be decoded and returns None for it."""
        if reply is None:
            raise WorkerLost(f"{name} at {self.address}: the answer makes no sense; is it of the same version?")


def _is_cancelled() -> bool:
    """Return whether somebody cancels the current task.

    A function of its own: a frame that holds its task and is in the error's traceback is a circle with both, which
    keeps all of the request until Python's collector finds it.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _raise_error(delta: TokenDelta) -> None:
    if delta.error is None:
        return
    kinds = {"handoff": HandoffLost, "invalid": InvalidTask, "draining": WorkerDraining}
    raise kinds.get(delta.error_kind, EngineFailed)(delta.error)


def unary_handler(
    function: Callable[[Any], Any], kind: type[Any], is_for: Meant | None = None
) -> grpc.RpcMethodHandler:
    """Make a unary method: `function` takes the decoded message, and what it returns is awaited and sent.

    A message that is not `kind` ends the call with INVALID_ARGUMENT, one that is for another worker than this one
    (`is_for`) with FAILED_PRECONDITION.
    """
    decode = decoder(kind)

    async def call(message: bytes, context: grpc.aio.ServicerContext) -> Any:
        await _refuse_mistaken(is_for, context)
        return await function(await _readable(decode, message, context))

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=encode)


def stream_handler(
    function: Callable[[Any], AsyncIterator[Any]], kind: type[Any], is_for: Meant | None = None
) -> grpc.RpcMethodHandler:
    """Make a method with one request and a stream of replies; it ends early as `unary_handler` says."""
    decode = decoder(kind)

    async def call(message: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        await _refuse_mistaken(is_for, context)
        async for reply in function(await _readable(decode, message, context)):
            yield reply

    return grpc.unary_stream_rpc_method_handler(call, response_serializer=encode)


async def _refuse_mistaken(here: Meant | None, context: grpc.aio.ServicerContext) -> None:
    """End a call that is for another worker; its router may have known this address as that one's."""
    said = next((value for name, value in context.invocation_metadata() or () if name == MEANT), None)
    if here is None or said is None or said == encode(here):
        return
    try:
        meant = decoder(Meant)(said)
    except UNREADABLE:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unreadable {MEANT}")
        raise
    await context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"this is {here.worker_id}, incarnation {here.incarnation}, not {meant.worker_id}, incarnation "
        f"{meant.incarnation}",
    )


async def _readable(decode: Callable[[bytes], T], message: bytes, context: grpc.aio.ServicerContext) -> T:
    """Decode the message here, not in gRPC, which would log the exception with its stack and answer UNKNOWN."""
    try:
        return decode(message)
    except UNREADABLE as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"unreadable request: {error}")
        raise AssertionError("gRPC's abort returned") from error
