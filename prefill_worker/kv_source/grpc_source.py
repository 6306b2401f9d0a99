"""Serves this engine's published blocks over gRPC.

It runs in the engine's process; `ridgeline.kv_transfer.service` starts and closes it. Calls run on the server's own
threads, beside the engine's step loop. gRPC provides the back-pressure: the next frame is made only when the last one
has left for the socket, so a slow reader costs one frame plus the flow-control window.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, Final, TypeVar

import grpc
import msgspec

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import UNREADABLE, HandoffId
from ridgeline.contracts.rpc.address import join_host_port
from ridgeline.contracts.rpc.channel import add_port
from ridgeline.kv_transfer.interfaces import FetchRequest
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.memory.glibc import keep_freed_memory
from ridgeline.kv_transfer.names import LONGEST_FETCH_S
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.kv_transfer.wire.frames import largest_frame_bytes
from ridgeline.prefill_worker.kv_source.block_server import BlockServer, RankCache, Segment

MAX_CONCURRENT_FETCHES: Final = 24
CONTROL_THREADS: Final = 4
"""Threads that fetches never occupy, so that renewals and releases get through."""

Parsed = TypeVar("Parsed")

_decode_request: Final = msgspec.msgpack.Decoder(FetchRequest).decode
_decode_id: Final = msgspec.msgpack.Decoder(HandoffId).decode
_decode_release: Final = msgspec.msgpack.Decoder(grpc_methods.Release).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class SourceExtension(ABC):
    """Another way to fetch the blocks, with gRPC methods of its own beside the source's as its control side."""

    name: ClassVar[str]
    """The transport's name."""
    max_streams: ClassVar[int]
    """Streams it holds open beside the fetch slots; the server has a thread for each."""

    @abstractmethod
    def offer(self) -> dict[str, Any] | None:
        """Return what its pullers need to know; None if it does not work here."""

    @abstractmethod
    def handlers(self, server: BlockServer) -> Mapping[str, grpc.RpcMethodHandler]:
        """Return its methods by name."""

    @abstractmethod
    def close(self) -> None:
        """Release whatever blocks its handlers; called before the server stops. Calling it again does nothing."""


class GrpcKvSource:
    """A gRPC server for one rank's cache. It reads the pool on its own threads."""

    def __init__(
        self,
        cache: RankCache,
        options: TransferOptions,
        extensions: Sequence[SourceExtension] = (),
        max_concurrent_fetches: int = MAX_CONCURRENT_FETCHES,
    ) -> None:
        keep_freed_memory()
        self._leases = cache.leases
        self._extensions = tuple(extensions)
        offers = {extension.name: extension.offer() for extension in extensions}
        self.server = BlockServer(cache, {name: offer for name, offer in offers.items() if offer is not None})
        self._host, self._port, self._tls = options.host, options.port, options.tls
        self._fetch_slots = threading.BoundedSemaphore(max_concurrent_fetches)
        threads = max_concurrent_fetches + CONTROL_THREADS + sum(each.max_streams for each in extensions)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kv-serve")
        self._grpc = grpc.server(self._threads, options=grpc_methods.server_options(largest_frame_bytes(cache.layout)))
        self._grpc.add_generic_rpc_handlers((self._handlers(),))

    @property
    def address(self) -> str:
        """The source's host:port; valid after `start`."""
        return join_host_port(self._host, self._port)

    @property
    def bytes_sent_total(self) -> int:
        """Payload bytes handed to transports so far: encoded for frames, otherwise the blocks' own size."""
        return self.server.bytes_sent_total

    def start(self) -> None:
        """Bind and serve; return once peers can connect. Raises OSError if the port is taken."""
        try:
            self._port = add_port(self._grpc, self.address, self._tls)
        except RuntimeError as error:
            raise OSError(f"cannot serve KV blocks on {self.address}: is the port taken?") from error
        self._grpc.start()

    def close(self) -> None:
        """Stop serving; running fetches end with `unreachable` at their fetchers. Calling it again does nothing."""
        for extension in self._extensions:
            extension.close()
        self._grpc.stop(grace=None).wait()
        self._threads.shutdown(wait=False)

    def _handlers(self) -> grpc.GenericRpcHandler:
        handlers = {
            grpc_methods.FETCH: grpc.unary_stream_rpc_method_handler(self._fetch),
            grpc_methods.PIN: grpc.unary_stream_rpc_method_handler(self._pin),
            grpc_methods.RENEW: grpc.unary_unary_rpc_method_handler(self._renew),
            grpc_methods.RELEASE: grpc.unary_unary_rpc_method_handler(self._release),
            grpc_methods.DESCRIBE: grpc.unary_unary_rpc_method_handler(self._describe),
        }
        for extension in self._extensions:
            handlers.update(extension.handlers(self.server))
        return grpc.method_handlers_generic_handler(grpc_methods.SERVICE, handlers)

    def _fetch(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Stream the frames, on one thread.

        When the call ends in any way, gRPC drops this generator, which ends the read.
        """
        with self._slot(context):
            request = parse(_decode_request, message)
            first_token = yield from self.server.frames(request, context.is_active)
            grpc_methods.end_with_first_token(context, first_token)

    def _pin(self, message: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Report where the blocks lie and keep them there until the reader closes the stream or dies."""
        closed = threading.Event()
        with self._slot(context):
            if not context.add_callback(closed.set):
                return  # the call is already over, so nothing would end the wait below
            request = parse(_decode_request, message)
            with self.server.read(request, context.is_active) as read:
                for segment in read.segments(context.is_active, by_layer=True):
                    yield from self._pinned(segment, read.pool)
                closed.wait(LONGEST_FETCH_S)

    def _pinned(self, segment: Segment, pool: BlockPool) -> Iterator[bytes]:
        pinned = grpc_methods.PinnedBlocks(
            incarnation=self.server.incarnation,
            block_ids=list(segment.block_ids),
            complete=segment.last,
            first_token=segment.first_token,
        )
        layer_bytes = len(segment.block_ids) * pool.block_bytes
        if not segment.by_layer:
            self.server.count_sent(layer_bytes * pool.num_layers)
            yield _encode(pinned)
            return
        for layer in range(pool.num_layers):
            segment.wait_layer(layer)
            self.server.count_sent(layer_bytes)
            yield _encode(msgspec.structs.replace(pinned, final_layers=layer + 1))

    @contextmanager
    def _slot(self, context: grpc.ServicerContext) -> Iterator[None]:
        """Reserve room for one stream; a HandoffError inside becomes the call's status."""
        try:
            limit_of(context)
        except errors.HandoffError as error:
            grpc_methods.abort(context, error)
        if not self._fetch_slots.acquire(blocking=False):
            grpc_methods.abort(context, errors.TransferFailed(errors.BUSY, "all fetch slots of this source are taken"))
        try:
            yield
        except errors.HandoffError as error:
            grpc_methods.abort(context, error)
        finally:
            self._fetch_slots.release()

    def _renew(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            self.server.renew(parse(_decode_id, message))
        except errors.HandoffError as error:
            grpc_methods.abort(context, error)
        return b""

    def _release(self, message: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            release = parse(_decode_release, message)
        except errors.HandoffError as error:
            grpc_methods.abort(context, error)
        self._leases.release(release.handoff_id, release.reader, release.readers, context.peer())
        return b""

    def _describe(self, _message: bytes, _context: grpc.ServicerContext) -> bytes:
        return _encode(self.server.describe())


def limit_of(context: grpc.ServicerContext) -> float:
    """Return the seconds that a fetch has left. Raises TransferFailed(`bad_request`) unless they have a bound."""
    left_s: float | None = context.time_remaining()
    if left_s is None or left_s > LONGEST_FETCH_S:  # 0.0 is a deadline that has passed
        sentence = f"a fetch must carry a deadline of at most {LONGEST_FETCH_S:g} s"
        raise errors.TransferFailed(errors.BAD_REQUEST, sentence)
    return left_s


def parse(decode: Callable[[bytes], Parsed], message: bytes) -> Parsed:
    """Decode a message. Raises TransferFailed(`bad_request`) if it is unreadable."""
    try:
        return decode(message)
    except UNREADABLE as error:
        raise errors.TransferFailed(errors.BAD_REQUEST, f"unreadable request: {error}") from error
