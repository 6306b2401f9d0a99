"""Pulls that read the source's memory themselves: the checks and the stream that are the same however they copy.

The source is asked over gRPC to pin the blocks and to say where they lie. The stream stays open during the copy, so
that the source knows how long they are read, even if this process dies. What a source says is checked here: that it is
the process we paired with, and that its blocks and layers come in order and are as many as were asked for. There is no
checksum, as for any other copy in memory.

The stream may break unnoticed while we copy, and the source may then give the blocks to another request, but not before
the lease, which the pin renews, is over. A copy that took longer than a lease counts only if the lease is still open.

A transport of this kind is a `PinnedPuller`: it opens what a source offers, and copies blocks that are readable.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec

from ridgeline.contracts import errors
from ridgeline.decode_worker.kv_fetch.stream import SourceStream
from ridgeline.decode_worker.kv_fetch.threads import FetchThreads
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import UNSUPPORTED, Pull, Puller, SourceDescription
from ridgeline.kv_transfer.memory.blocks import BlockPool, CannotOpen
from ridgeline.kv_transfer.memory.shared import MappedPool, SharedOffer
from ridgeline.kv_transfer.wire import grpc_methods

_decode_pinned: Final = msgspec.msgpack.Decoder(grpc_methods.PinnedBlocks).decode

Opened = TypeVar("Opened")
"""What a transport keeps of one source process: a mapping, a handle, an agent."""


@dataclass(frozen=True, slots=True)
class Readable:
    """Blocks of the source of which these layers may be read from now on, and the places they go to."""

    source_ids: Sequence[int]
    target_ids: Sequence[int]
    layers: range
    first: int
    """Position of the first block, relative to the request's."""


Copy = Callable[[Readable], Generator[int, None, None]]
"""Copies what is readable while it is iterated over, and yields the bytes of each piece when they are in the target.

Between pieces it is stopped if the pull was cancelled: it is then closed, and returns only when nothing that it began
writes to the target any more. It raises ValueError if what the source said does not fit the pools, one of the puller's
`failures`, or a HandoffError.
"""


class PinnedPuller(Puller, Generic[Opened]):
    """A transport that opens each source process once and copies from it on a thread."""

    not_offered: ClassVar[str]
    """Why a source without an offer for this transport cannot be reached."""
    failures: ClassVar[tuple[type[Exception], ...]] = ()
    """What else opening and copying may raise. The source is then unreachable, and opened anew for the next pull."""

    def __init__(self, control: GrpcControl, threads: str) -> None:
        """`threads` is the prefix of the copying threads' names."""
        self._control = control
        self._threads = FetchThreads(threads)
        self._opened: dict[str, Opened] = {}

    @abstractmethod
    def open(self, offer: dict[str, Any]) -> Opened:
        """Open a source's memory by its offer. It is called on the event loop.

        Raises CannotOpen, one of `failures`, or msgspec's ValidationError for a malformed offer.
        """

    @abstractmethod
    def copier(self, opened: Opened, pull: Pull) -> Copy:
        """Return what copies for this pull, on its own thread, once for each segment or layer that is readable.

        Raises ValueError if what was opened does not have the part of each block that the pull asks for.
        """

    def unsupported_reason(self, source: SourceDescription) -> str | None:
        if source.incarnation in self._opened:
            return None
        if self.name not in source.offers:
            return self.not_offered
        offer = source.offers[self.name]
        if (why := offer.get(UNSUPPORTED)) is not None:
            return str(why)
        refusals: tuple[type[Exception], ...] = (CannotOpen, msgspec.ValidationError, *self.failures)
        try:
            self._opened[source.incarnation] = self.open(offer)
        except refusals as error:
            return errors.first_line(error)
        return None

    async def pull(self, pull: Pull) -> None:
        if (reason := self.unsupported_reason(pull.source)) is not None:  # forgotten meanwhile: another pull failed
            raise errors.TransferFailed(errors.STALE_PAIRING, f"{pull.address}: {reason}")
        try:
            copy = self.copier(self._opened[pull.source.incarnation], pull)
        except ValueError as error:
            raise errors.TransferFailed(errors.CORRUPTED, f"{pull.address} offers another cache: {error}") from error
        stream = SourceStream(self._control.channel(pull.address), grpc_methods.PIN, pull)
        read = PinnedRead(pull, copy, stream.raise_if_cancelled, self.failures)
        await self._threads.run(pull, lambda: stream.run(read.consume), stream.cancel)
        if not read.within_lease():
            await self._control.renew(pull.address, pull.request.handoff_id)  # raises unless it was open all the time

    def forget(self, source: SourceDescription) -> None:
        self._opened.pop(source.incarnation, None)

    async def close(self) -> None:
        self._threads.close()
        self._opened.clear()


def copy_out_of(pool: BlockPool, pull: Pull) -> Copy:
    """Return the copy from a pool that was opened. Raises ValueError if its blocks have no such part."""
    part = pool.part(pull.request.part_start, pull.request.part_bytes)
    return lambda readable: pull.pool.copies_from(part, readable.source_ids, readable.target_ids, readable.layers)


def pieces(readable: Readable, block_bytes: int, most_bytes: int) -> Iterator[Readable]:
    """Cut what is readable into pieces of at most `most_bytes`, or of one block: whole layers, or parts of one."""
    source_ids, target_ids, layers = readable.source_ids, readable.target_ids, readable.layers
    if not source_ids:
        return
    most_layers = most_bytes // (len(source_ids) * block_bytes)
    most_blocks = len(source_ids) if most_layers else max(1, most_bytes // block_bytes)
    for first in range(layers.start, layers.stop, max(1, most_layers)):
        some = range(first, min(first + max(1, most_layers), layers.stop))
        for start in range(0, len(source_ids), most_blocks):
            blocks = slice(start, start + most_blocks)
            yield Readable(source_ids[blocks], target_ids[blocks], some, readable.first + start)


class PinnedRead:
    """The answer to one pin, read on its thread: checks each message, and has copied what it makes readable."""

    def __init__(
        self,
        pull: Pull,
        copy: Copy,
        raise_if_cancelled: Callable[[], None],
        failures: tuple[type[Exception], ...] = (),
    ) -> None:
        """`failures` are what `copy` raises if the source's memory cannot be read any more."""
        self._pull = pull
        self._failures = failures
        self._copy = copy
        self._raise_if_cancelled = raise_if_cancelled
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
        """Copy each segment as it is announced, until the source marks the last one.

        Raises TransferFailed(`stale_pairing`) if another process answers, (`corrupted`) if what it says cannot be
        right, (`unreachable`) if it ends early; and TransferCancelled.
        """
        asked_s = time.monotonic()
        for message in call:
            self._safe_until_s, asked_s = asked_s + self._pull.lease_s, time.monotonic()
            pinned = grpc_methods.read_answer(_decode_pinned, message, self._pull.address)
            if pinned.incarnation != self._pull.source.incarnation:
                raise errors.TransferFailed(errors.STALE_PAIRING, f"{self._pull.address} is another process now")
            self._copy_segment(pinned.block_ids, pinned.final_layers)
            if pinned.complete:
                self._check_whole()
                self._pull.progress.first_token = pinned.first_token
                return
        raise errors.TransferFailed(errors.UNREACHABLE, f"{self._pull.address} ended the pin")

    def _copy_segment(self, block_ids: list[int], final_layers: int | None) -> None:
        num_layers = self._pull.pool.num_layers
        layers = range(self._layers_done, num_layers if final_layers is None else final_layers)
        targets = self._pull.target_block_ids[self._done : self._done + len(block_ids)]
        if not 0 <= layers.start < layers.stop <= num_layers:
            raise errors.TransferFailed(errors.CORRUPTED, f"{layers} of {num_layers} layers")
        if self._layers_done and block_ids != self._computed:
            raise errors.TransferFailed(errors.CORRUPTED, "other blocks came before all layers of the last ones")
        if len(targets) != len(block_ids):
            raise errors.TransferFailed(errors.CORRUPTED, "more blocks were pinned than were asked for")
        self._pull.progress.first_byte()
        try:
            with closing(self._copy(Readable(block_ids, targets, layers, self._done))) as pieces:
                for num_bytes in pieces:
                    self._pull.progress.landed(num_bytes)
                    self._raise_if_cancelled()
        except ValueError as error:
            raise errors.TransferFailed(errors.CORRUPTED, str(error)) from error
        except self._failures as error:
            raise errors.TransferFailed(
                errors.UNREACHABLE, f"{self._pull.address}: {errors.first_line(error)}"
            ) from error
        self._layers_done, self._computed = layers.stop % num_layers, block_ids
        if self._layers_done == 0:
            self._done += len(block_ids)
        self._pull.progress.segment_ends()

    def _check_whole(self) -> None:
        wanted = len(self._pull.target_block_ids)
        if self._done != wanted or self._layers_done:
            raise errors.TransferFailed(errors.CORRUPTED, f"{self._done} of {wanted} blocks were pinned")


class ShmPuller(PinnedPuller[MappedPool]):
    """The `shm` transport: maps the source's KV cache, once for each process, and copies each byte once."""

    name = "shm"
    not_offered = "its KV cache is not in shared memory"

    def __init__(self, control: GrpcControl) -> None:
        super().__init__(control, "kv-copy")

    def open(self, offer: dict[str, Any]) -> MappedPool:
        return MappedPool(msgspec.convert(offer, SharedOffer))

    def copier(self, opened: MappedPool, pull: Pull) -> Copy:
        return copy_out_of(opened.pool, pull)
