"""The `collective` transport's sending end: gRPC methods that a `GrpcKvSource` serves beside its own.

Each group is held open by its fetcher's Join stream, so a fetcher that closes or dies takes its groups with it. The
source sends copies: tensors gathered from the blocks of all layers, at most `WINDOW_CHUNKS` of them at a time, each
described to the fetcher, and all their checksums at the end. A transfer that ends otherwise breaks its group, because
it is unknown what the fetcher has received.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

import grpc
import msgspec
import torch

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.kv_transfer.collective.group import SOURCE_RANK, PairGroup, backend_for, host_store
from ridgeline.kv_transfer.collective.wire import (
    COLLECT,
    FORMED,
    JOIN,
    WINDOW_CHUNKS,
    Chunk,
    End,
    Invitation,
    Transfer,
    most_blocks,
)
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.names import MAX_GROUPS
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.prefill_worker.kv_source.block_server import BlockRead, BlockServer, Segment, Wanted
from ridgeline.prefill_worker.kv_source.grpc_source import FetchSlot, SourceExtension, parse

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

TURN_WAIT_S: Final = 1.0
"""A fetcher may begin its next transfer shortly before the last one's call has ended here."""

_decode_transfer: Final = msgspec.msgpack.Decoder(Transfer).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class CollectiveSource(SourceExtension):
    """The pair groups of one source."""

    name: ClassVar[str] = "collective"
    max_streams = MAX_GROUPS

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

    def handlers(self, server: BlockServer, slot: FetchSlot) -> Mapping[str, grpc.RpcMethodHandler]:
        def join(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._join(server, context)

        def collect(message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            return self._collect(server, slot, message, context)

        return {
            JOIN: grpc.unary_stream_rpc_method_handler(join),
            COLLECT: grpc.unary_stream_rpc_method_handler(collect),
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

    def _collect(
        self, server: BlockServer, slot: FetchSlot, message: bytes, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        with slot(context):
            transfer = parse(_decode_transfer, message)
            served = self._groups.get(transfer.group)
            if served is None or served.group.broken:
                raise errors.TransferFailed(errors.STALE_PAIRING, "this pair group has ended")
            with served.turn():
                yield from served.answer(server, transfer, context)


class _ServedGroup:
    """A group from its source's point of view: one transfer at a time, on that call's thread."""

    def __init__(self, group: PairGroup) -> None:
        self.group = group
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the group for one transfer; raises TransferFailed(`busy`) if another transfer holds it."""
        if not self._turn.acquire(timeout=TURN_WAIT_S):
            raise errors.TransferFailed(errors.BUSY, "another transfer of this pair group has not ended")
        try:
            yield
        finally:
            self._turn.release()

    def answer(self, server: BlockServer, transfer: Transfer, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send the blocks that are asked for, and yield a message for each tensor."""
        left_s = context.time_remaining()
        assert left_s is not None  # the slot requires a deadline
        sent = _Sent(self.group, time.monotonic() + left_s)
        try:
            with server.read(transfer.request, context.is_active) as read:
                end = yield from _send_all(server, read, sent, context.is_active)
            sent.finish()
        except BaseException as error:
            if sent.any:
                if isinstance(error, errors.HandoffError):
                    with suppress(errors.TransferFailed):
                        sent.finish()  # the fetcher receives everything announced so far, then the error
                self.group.break_off()
            raise
        yield _encode(end)


class _Sent:
    """The tensors sent and not yet received: at most WINDOW_CHUNKS, which bounds the memory that a transfer holds."""

    def __init__(self, group: PairGroup, deadline_s: float) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()
        self.any = False

    def finish(self, but: int = 0) -> None:
        """Wait until all tensors have arrived but so many; raises like `PairGroup.finish`."""
        while len(self._under_way) > but:
            self._group.finish(self._under_way.popleft()[0], self._deadline_s)

    def send(self, tensor: torch.Tensor) -> None:
        """Begin to send a tensor, and keep it until it has arrived; raises like `PairGroup.send`."""
        self.any = True
        self._under_way.append((self._group.send(tensor), tensor))


def _send_all(server: BlockServer, read: BlockRead, sent: _Sent, wanted: Wanted) -> Generator[bytes, None, End]:
    """Yield the encoded chunks; return the End. Raises TransferFailed if the fetcher leaves meanwhile."""
    pool, checksums = read.pool, []
    for segment in read.segments(wanted):
        for start, block_ids in _chunks(pool, segment):
            sent.finish(but=WINDOW_CHUNKS - 1)
            tensor = pool.gather(pool.layers, block_ids)
            checksums.append(pool.checksum(tensor))
            sent.send(tensor)
            server.count_sent(tensor.nbytes)
            ends = start + len(block_ids) == len(segment.block_ids)
            yield _encode(Chunk(first=segment.first + start, count=len(block_ids), ends_segment=ends))
        if segment.last:
            return End(first_token=segment.first_token, checksums=pool.on_host(checksums))
    raise errors.TransferFailed(errors.UNREACHABLE, "the fetcher has left")


def _chunks(pool: BlockPool, segment: Segment) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (position in the segment, blocks)."""
    most = most_blocks(pool)
    for start in range(0, len(segment.block_ids), most):
        yield start, segment.block_ids[start : start + most]
