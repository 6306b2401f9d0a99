"""Serves this engine's published blocks over gRPC.

Lives in the engine's process, started and closed by `TransferService`; calls run on the server's own threads, beside
the engine's step loop. Back-pressure is gRPC's: the next frame is made only when the last one has left for the socket,
so a slow reader costs one frame plus the flow-control window.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import grpc
import msgspec

from kv_transfer import errors, grpc_wire
from kv_transfer.allocator import keep_freed_memory
from kv_transfer.base import KvSource
from kv_transfer.block_server import BlockServer, FetchRequest
from kv_transfer.blocks import BlockPool
from kv_transfer.handoff import KvLayout
from kv_transfer.lease import LeaseTable

MAX_CONCURRENT_FETCHES: Final = 24
CONTROL_THREADS: Final = 4
"""Threads that fetches never take, so that renewals and releases get through."""
LONGEST_FETCH_S: Final = 600
"""A read pins blocks for as long as its call lives, so no call may live for ever."""

Parsed = TypeVar("Parsed")

_decode_request: Final = msgspec.msgpack.Decoder(FetchRequest).decode
_decode_id: Final = msgspec.msgpack.Decoder(str).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class GrpcKvSource(KvSource):
    """A gRPC server for one lease table."""

    def __init__(
        self,
        pool: BlockPool,
        leases: LeaseTable,
        layout: KvLayout,
        host: str,
        port: int = 0,
        max_concurrent_fetches: int = MAX_CONCURRENT_FETCHES,
    ) -> None:
        """Port 0 takes a free one."""
        keep_freed_memory()
        self.server = BlockServer(pool, leases, layout)
        self._host = host
        self._port = port
        self._fetch_slots = threading.BoundedSemaphore(max_concurrent_fetches)
        self._threads = ThreadPoolExecutor(max_concurrent_fetches + CONTROL_THREADS, thread_name_prefix="kv-serve")
        self._grpc = grpc.server(self._threads, options=grpc_wire.server_options())
        self._grpc.add_generic_rpc_handlers((self._handlers(),))

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def bytes_sent_total(self) -> int:
        return self.server.bytes_sent_total

    def start(self) -> None:
        try:
            self._port = self._grpc.add_insecure_port(self.address)
        except RuntimeError as error:
            raise OSError(f"cannot serve KV blocks on {self.address}: is the port taken?") from error
        self._grpc.start()

    def close(self) -> None:
        self._grpc.stop(grace=None).wait()
        self._threads.shutdown(wait=False)

    def _handlers(self) -> grpc.GenericRpcHandler:
        handlers = {
            grpc_wire.FETCH: grpc.unary_stream_rpc_method_handler(self._fetch),
            grpc_wire.RENEW: grpc.unary_unary_rpc_method_handler(_by_id(lambda id_: self.server.renew(id_))),
            grpc_wire.RELEASE: grpc.unary_unary_rpc_method_handler(_by_id(lambda id_: self.server.release(id_))),
            grpc_wire.DESCRIBE: grpc.unary_unary_rpc_method_handler(self._describe),
        }
        return grpc.method_handlers_generic_handler(grpc_wire.SERVICE, handlers)

    def _fetch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """One thread for the length of the stream. gRPC drops this generator, and so ends the read, on any ending."""
        if (context.time_remaining() or math.inf) > LONGEST_FETCH_S:
            sentence = f"a fetch must carry a deadline of at most {LONGEST_FETCH_S} s"
            grpc_wire.abort(context, errors.TransferFailed(errors.BAD_REQUEST, sentence))
        if not self._fetch_slots.acquire(blocking=False):
            grpc_wire.abort(context, errors.TransferFailed(errors.BUSY, "all fetch slots of this source are taken"))
        try:
            yield from self.server.frames(_parse(_decode_request, message), context.is_active)
        except errors.HandoffError as error:
            grpc_wire.abort(context, error)
        finally:
            self._fetch_slots.release()

    def _describe(self, _message: bytes, _context: grpc.ServicerContext) -> bytes:
        return _encode(self.server.describe())


def _by_id(action: Callable[[str], None]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """A handler for the calls that carry nothing but a hand-off id."""

    def handle(message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            action(_parse(_decode_id, message))
        except errors.HandoffError as error:
            grpc_wire.abort(context, error)
        return b""

    return handle


def _parse(decode: Callable[[bytes], Parsed], message: bytes) -> Parsed:
    try:
        return decode(message)
    except msgspec.DecodeError as error:
        raise errors.TransferFailed(errors.BAD_REQUEST, f"unreadable request: {error}") from error
