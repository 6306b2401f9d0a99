"""Pulls blocks over gRPC, from any number of sources.

Lives in the engine's process. Its methods run on the `TransferService`'s event loop; each fetch borrows one thread,
which writes every frame straight into the pool and holds no more than one.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import msgspec

from kv_transfer import errors, grpc_wire
from kv_transfer.allocator import keep_freed_memory
from kv_transfer.base import FetchProgress, KvFetcher, SourceDescription, run_in_thread
from kv_transfer.block_server import FetchRequest
from kv_transfer.blocks import BlockPool
from kv_transfer.frames import FrameReader
from kv_transfer.handoff import KvHandoff, KvLayout

BUSY_RETRY_S: Final = 0.05

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_description: Final = msgspec.msgpack.Decoder(SourceDescription).decode


class GrpcKvFetcher(KvFetcher):
    """One channel for each source, kept until `close`."""

    def __init__(
        self,
        layout: KvLayout,
        fetch_deadline_s: float = 30.0,
        control_deadline_s: float = 3.0,
        max_concurrent_fetches: int = 4,
    ) -> None:
        """The fetch deadline counts from the call of `fetch`, waiting for a free thread included."""
        keep_freed_memory()
        self._layout = layout
        self._fetch_deadline_s = fetch_deadline_s
        self._control_deadline_s = control_deadline_s
        self._threads = ThreadPoolExecutor(max_concurrent_fetches, thread_name_prefix="kv-fetch")
        self._channels: dict[str, grpc.Channel] = {}

    async def _pull(
        self,
        handoff: KvHandoff,
        first_block: int,
        target_block_ids: Sequence[int],
        pool: BlockPool,
        progress: FetchProgress,
    ) -> None:
        request = FetchRequest(
            handoff_id=handoff.handoff_id,
            first_block=first_block,
            num_blocks=len(target_block_ids),
            layout=self._layout,
        )
        stream = _FrameStream(
            self._channel(handoff.address).unary_stream(f"/{grpc_wire.SERVICE}/{grpc_wire.FETCH}"),
            request,
            handoff.address,
            progress.started_s + self._fetch_deadline_s,
        )
        reader = FrameReader(pool, target_block_ids, progress)
        await run_in_thread(self._threads, lambda: stream.run(reader), stream.cancel)

    async def renew(self, handoff: KvHandoff) -> None:
        await self._call(handoff.address, grpc_wire.RENEW, handoff.handoff_id)

    async def release(self, handoff: KvHandoff) -> None:
        await self._call(handoff.address, grpc_wire.RELEASE, handoff.handoff_id)

    async def describe(self, address: str) -> SourceDescription:
        return _decode_description(await self._call(address, grpc_wire.DESCRIBE, None))

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address, options=grpc_wire.channel_options(self._layout))
        return self._channels[address]

    async def _call(self, address: str, method: str, argument: str | None) -> bytes:
        """A small call, awaited without a thread."""
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        method_call = self._channel(address).unary_unary(f"/{grpc_wire.SERVICE}/{method}")
        call = method_call.future(_encode(argument), timeout=self._control_deadline_s)
        call.add_done_callback(lambda _: loop.call_soon_threadsafe(answered.set))
        try:
            await answered.wait()
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.code() is not grpc.StatusCode.OK:
            raise grpc_wire.error_of(call, address)
        answer: bytes = call.result()
        return answer


class _FrameStream:
    """One fetch on its thread; `cancel` may be called from any other."""

    def __init__(self, method: Any, request: FetchRequest, address: str, give_up_at_s: float) -> None:
        self._method = method
        self._message = _encode(request)
        self._address = address
        self._give_up_at_s = give_up_at_s
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None

    def run(self, reader: FrameReader) -> None:
        """Read the whole stream into the pool, or raise a HandoffError. A busy source is asked again."""
        while True:
            try:
                return self._read(reader)
            except errors.TransferFailed as error:
                if error.reason != errors.BUSY or time.monotonic() + BUSY_RETRY_S > self._give_up_at_s:
                    raise
            self._cancelled.wait(BUSY_RETRY_S)

    def cancel(self) -> None:
        """Make `run` raise soon."""
        self._cancelled.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()

    def _read(self, reader: FrameReader) -> None:
        call = self._begin()
        try:
            for frame in call:
                reader.accept(frame)
            reader.finish()
        except grpc.RpcError as failure:
            if self._cancelled.is_set():
                raise errors.TransferCancelled(errors.CANCELLED, "cancelled by the fetching side") from failure
            raise grpc_wire.error_of(failure, self._address) from failure
        finally:
            call.cancel()

    def _begin(self) -> Any:
        left_s = self._give_up_at_s - time.monotonic()
        if left_s <= 0:
            raise errors.TransferFailed(errors.TIMEOUT, f"no thread was free to fetch from {self._address} in time")
        with self._lock:
            if self._cancelled.is_set():
                raise errors.TransferCancelled(errors.CANCELLED, "cancelled before it began")
            self._call = self._method(self._message, timeout=left_s)
        return self._call
