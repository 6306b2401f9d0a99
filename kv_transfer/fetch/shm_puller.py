"""The `shm` transport's receiving end: maps the source's KV cache and copies each block once.

The source is asked over gRPC to pin the blocks and to say where they lie. The stream stays open during the copy, so
that the source knows how long they are read, even if this process dies. Each byte is copied from one cache to the other
and nowhere else. There is no checksum, as for any other copy in memory.

The stream may break unnoticed while we copy, and the source may then give the blocks to another request, but not before
the lease, which the pin renews, is over. A copy that took longer than a lease counts only if the lease is still open.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from contracts import errors
from kv_transfer.fetch.control import GrpcControl
from kv_transfer.fetch.stream import SourceStream
from kv_transfer.fetch.threads import FetchThreads
from kv_transfer.interfaces import Pull, Puller, SourceDescription
from kv_transfer.memory.blocks import BlockPool
from kv_transfer.memory.shared import CannotMap, MappedPool, SharedOffer
from kv_transfer.wire import grpc_methods

_decode_pinned: Final = msgspec.msgpack.Decoder(grpc_methods.PinnedBlocks).decode


class ShmPuller(Puller):
    """The `shm` transport; keeps one mapping for each source process."""

    name = "shm"
    copies_raw = True

    def __init__(self, control: GrpcControl) -> None:
        self._control = control
        self._threads = FetchThreads("kv-copy")
        self._mapped: dict[str, MappedPool] = {}

    def obstacle(self, source: SourceDescription) -> str | None:
        if source.incarnation in self._mapped:
            return None
        if self.name not in source.offers:
            return "its KV cache is not in shared memory"
        try:
            offer = msgspec.convert(source.offers[self.name], SharedOffer)
            self._mapped[source.incarnation] = MappedPool(offer)
        except (CannotMap, msgspec.ValidationError) as error:
            return str(error)
        return None

    async def pull(self, pull: Pull) -> None:
        if (obstacle := self.obstacle(pull.source)) is not None:  # forgotten meanwhile: another pull failed
            raise errors.TransferFailed(errors.STALE_PAIRING, f"{pull.address}: {obstacle}")
        part = self._mapped[pull.source.incarnation].pool.part(pull.request.part_start, pull.request.part_bytes)
        stream = SourceStream(self._control.channel(pull.address), grpc_methods.PIN, pull)
        copy = _Copy(pull, part, stream)
        await self._threads.run(pull, lambda: stream.run(copy.consume), stream.cancel)
        if not copy.within_lease():
            await self._control.renew(pull.address, pull.request.handoff_id)  # raises unless it was open all the time

    def forget(self, source: SourceDescription) -> None:
        self._mapped.pop(source.incarnation, None)

    async def close(self) -> None:
        self._threads.close()
        self._mapped.clear()


class _Copy:
    """The copy of one pull, on its thread."""

    def __init__(self, pull: Pull, source: BlockPool, stream: SourceStream) -> None:
        self._pull = pull
        self._source = source
        self._stream = stream
        self._done = 0
        self._layers_done = 0
        """Layers copied of the segment that prefill still computes."""
        self._computed: list[int] = []
        """The source's blocks of that segment."""
        self._safe_until_s = 0.0

    def within_lease(self) -> bool:
        """Return whether the source cannot have given the blocks away before the last one was copied."""
        return time.monotonic() < self._safe_until_s

    def consume(self, call: Any) -> None:
        """Copy each segment as it is announced, until the source marks the last one."""
        asked_s = time.monotonic()
        for message in call:
            self._safe_until_s, asked_s = asked_s + self._pull.lease_s, time.monotonic()
            pinned = grpc_methods.read_answer(_decode_pinned, message, self._pull.address)
            if pinned.incarnation != self._pull.source.incarnation:
                raise errors.TransferFailed(errors.STALE_PAIRING, f"{self._pull.address} is another process now")
            self._copy(pinned.block_ids, pinned.final_layers)
            if pinned.complete:
                self._check_whole()
                self._pull.progress.first_token = pinned.first_token
                return
        raise errors.TransferFailed(errors.UNREACHABLE, f"{self._pull.address} ended the pin")

    def _copy(self, block_ids: list[int], final_layers: int | None) -> None:
        num_layers = self._pull.pool.num_layers
        layers = range(self._layers_done, num_layers if final_layers is None else final_layers)
        targets = self._pull.target_block_ids[self._done : self._done + len(block_ids)]
        if self._layers_done and block_ids != self._computed:
            raise errors.TransferFailed(errors.CORRUPTED, "other blocks came before all layers of the last ones")
        if len(targets) != len(block_ids):
            raise errors.TransferFailed(errors.CORRUPTED, "more blocks were pinned than were asked for")
        self._pull.progress.first_byte()
        try:
            for num_bytes in self._pull.pool.copies_from(self._source, block_ids, targets, layers):
                self._pull.progress.landed(num_bytes)
                self._stream.raise_if_cancelled()
        except ValueError as error:
            raise errors.TransferFailed(errors.CORRUPTED, str(error)) from error
        self._layers_done, self._computed = layers.stop % num_layers, block_ids
        if self._layers_done == 0:
            self._done += len(block_ids)
        self._pull.progress.segment_ends()

    def _check_whole(self) -> None:
        wanted = len(self._pull.target_block_ids)
        if self._done != wanted or self._layers_done:
            raise errors.TransferFailed(errors.CORRUPTED, f"{self._done} of {wanted} blocks were pinned")
