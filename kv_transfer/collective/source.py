"""The `collective` transport's sending end: gRPC methods that a `GrpcKvSource` serves beside its own.

Each group is held open by its fetcher's Join stream, so a fetcher that closes or dies takes its groups with it. The
source sends copies: tensors gathered from blocks that the fetcher has pinned, in the order in which it asks for them. A
tensor that does not leave breaks its group, because it is unknown what the fetcher has received.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

import grpc
import msgspec

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.kv_transfer.collective.group import SOURCE_RANK, PairGroup, backend_for, host_store
from ridgeline.kv_transfer.collective.wire import COLLECT, FORMED, JOIN, TENSOR_BYTES, WINDOW, Invitation, TensorRequest
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.names import MAX_GROUPS
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.prefill_worker.kv_source.block_server import BlockServer
from ridgeline.prefill_worker.kv_source.grpc_source import MAX_CONCURRENT_FETCHES, SourceExtension, limit_of, parse

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_decode_ask: Final = msgspec.msgpack.Decoder(TensorRequest).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class CollectiveSource(SourceExtension):
    """The pair groups of one source."""

    name: ClassVar[str] = "collective"
    max_streams = MAX_GROUPS + WINDOW * MAX_CONCURRENT_FETCHES

    def __init__(self, pool: BlockPool, host: str) -> None:
        """`host` is the address of this machine that fetchers reach: the gRPC server's."""
        self._device = pool.device
        self._host = host
        self._lock = threading.Lock()
        self._store: TCPStore | None = None
        self._groups: dict[str, _ServedGroup] = {}
        self._places = threading.BoundedSemaphore(MAX_GROUPS)
        self._closed = False

    def offer(self) -> dict[str, Any] | None:
        backend = backend_for(self._device)
        return None if backend is None else {"backend": backend}

    def handlers(self, server: BlockServer) -> Mapping[str, grpc.RpcMethodHandler]:
        def join(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._join(server, context)

        def collect(message: bytes, context: grpc.ServicerContext) -> bytes:
            return self._collect(server, message, context)

        return {
            JOIN: grpc.unary_stream_rpc_method_handler(join),
            COLLECT: grpc.unary_unary_rpc_method_handler(collect),
        }

    def close(self) -> None:
        with self._lock:
            self._closed = True
            groups = list(self._groups.values())
            self._store = None
        for served in groups:
            served.group.break_off()

    def _join(self, server: BlockServer, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Hold the group open, on one thread, until its fetcher leaves."""
        if not self._places.acquire(blocking=False):
            sentence = f"this source is in {MAX_GROUPS} pair groups already"
            grpc_methods.abort(context, errors.TransferFailed(errors.BUSY, sentence))
        left = threading.Event()
        try:
            if not context.add_callback(left.set):
                return
            store, name = self._meeting_point(), new_handoff_id()
            yield _encode(Invitation(incarnation=server.incarnation, group=name, store_port=store.port))
            with self._serving(name, PairGroup.form(SOURCE_RANK, name, store, self._host, self._device, "the fetcher")):
                yield FORMED
                left.wait()
        except errors.HandoffError as error:
            grpc_methods.abort(context, error)
        finally:
            self._places.release()

    def _meeting_point(self) -> TCPStore:
        with self._lock:
            self._refuse_if_closed()
            if self._store is None:
                try:
                    self._store = host_store(self._host)
                except OSError as error:
                    sentence = f"no store can be hosted on {self._host}: {error}"
                    raise errors.TransferFailed(errors.UNREACHABLE, sentence) from error
            return self._store

    @contextmanager
    def _serving(self, name: str, group: PairGroup) -> Iterator[None]:
        try:
            with self._lock:
                self._refuse_if_closed()
                self._groups[name] = _ServedGroup(group)
            yield
        finally:
            with self._lock:
                self._groups.pop(name, None)
            group.break_off()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise errors.TransferFailed(errors.UNREACHABLE, "this source is closing")

    def _collect(self, server: BlockServer, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            deadline_s = time.monotonic() + limit_of(context)
            ask = parse(_decode_ask, message)
            served = self._groups.get(ask.group)
            if served is None or served.group.broken:
                raise errors.TransferFailed(errors.STALE_PAIRING, "this pair group has ended")
            return _encode(served.send(server, ask, deadline_s))
        except errors.HandoffError as error:
            grpc_methods.abort(context, error)


class _ServedGroup:
    """A group from its source's point of view: one tensor at a time, on its own call's thread."""

    def __init__(self, group: PairGroup) -> None:
        self.group = group
        self._turn = threading.Condition()
        self._next = 0

    def send(self, server: BlockServer, ask: TensorRequest, deadline_s: float) -> int:
        """Send the tensor that is asked for, after those before it; return its checksum."""
        with self._turn:
            if not self._turn.wait_for(lambda: self._next >= ask.number, deadline_s - time.monotonic()):
                raise errors.TransferFailed(errors.TIMEOUT, "the tensor before this one has not left")
            if self._next != ask.number:
                raise errors.TransferFailed(errors.BAD_REQUEST, f"tensor {ask.number} comes after {self._next}")
            try:
                with server.read(ask.request, pinned=True) as read:
                    pool = read.pool
                    tensor = pool.gather(*_wanted(pool, ask, read.block_ids(ask.first_block, ask.num_blocks)))
                    [checksum] = pool.on_host([pool.checksum(tensor)])
                    self.group.send(tensor, deadline_s)
                    return checksum
            except BaseException:
                self.group.break_off()
                raise
            finally:
                self._next += 1
                self._turn.notify_all()


def _wanted(pool: BlockPool, ask: TensorRequest, block_ids: tuple[int, ...]) -> tuple[range, tuple[int, ...]]:
    """Return what to gather. Raises TransferFailed(`bad_request`) for layers that are not there, or too many bytes."""
    layers = range(ask.first_layer, ask.end_layer)
    num_bytes = len(layers) * len(block_ids) * pool.block_bytes
    if not 0 <= layers.start < layers.stop <= pool.num_layers:
        raise errors.TransferFailed(errors.BAD_REQUEST, f"{layers} of {pool.num_layers} layers")
    if num_bytes > max(TENSOR_BYTES[pool.device.type], pool.block_bytes):
        raise errors.TransferFailed(errors.BAD_REQUEST, f"a tensor of {num_bytes} bytes")
    return layers, block_ids
