"""What a transport is made of, and the words its parts share.

A hand-over has a control side, the same for all transports (describe, renew, release: a few small messages), and a side
that moves bytes, which is what transports differ in:

    KvSource        one per engine rank: serves the blocks that its lease table holds open, in every way it can
    SourceControl   asks any source for its description, renews and releases
    Puller          moves the bytes of one fetch; one class per transport

`fetcher.KvFetcher` joins a control and some pullers, picks one for each source, and is what the service uses. A
transport must pass `tests/conformance/check_transport.py`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from contracts import errors
from contracts.handoff import FetchReceipt, HandoffId, KvLayout
from kv_transfer.memory.blocks import BlockPool


class SourceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says about itself, so that two workers can be refused when they pair, before any request."""

    layout: KvLayout
    incarnation: str
    """Another one means another process, whatever its address: nothing known of the old one holds."""
    offers: dict[str, dict[str, Any]]
    """By transport, what its puller needs to know."""
    open_leases: int
    pinned_blocks: int
    expired_leases_total: int
    bytes_sent_total: int


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for positions `first_block` to `first_block + num_blocks` of a hand-off, in the asker's layout.

    Of every block, bytes [part_start, part_start + part_bytes): all of it unless the ranks differ in number.
    """

    handoff_id: HandoffId
    first_block: int
    num_blocks: int
    layout: KvLayout
    part_start: int
    part_bytes: int
    wire_dtype: str = "none"
    """How frames are to be encoded, by `codec.WIRE_DTYPES`; of no effect where nothing is on a wire."""


class KvSource(ABC):
    """Serves the blocks that the lease table holds open. Reads the pool from its own threads."""

    @property
    @abstractmethod
    def address(self) -> str:
        """host:port; valid after `start`."""

    @property
    @abstractmethod
    def bytes_sent_total(self) -> int:
        """Payload bytes handed to the transport so far: in frames as encoded, else the blocks' own."""

    @abstractmethod
    def start(self) -> None:
        """Bind and serve; returns once peers can connect."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving; running fetches end with `unreachable` at their fetchers. Idempotent."""


class SourceControl(ABC):
    """The small messages of a hand-over. Its methods run on one event loop; each has a deadline of seconds."""

    @abstractmethod
    async def describe(self, address: str) -> SourceDescription:
        """Raises TransferFailed if the source is unreachable."""

    @abstractmethod
    async def renew(self, address: str, handoff_id: str) -> None:
        """Extend the lease; raises LeaseExpired or UnknownHandoff if it is gone, TransferFailed if unreachable.

        A hand-off that is announced but not yet published counts as unknown: its lease has not begun.
        """

    @abstractmethod
    async def release(self, address: str, handoff_id: str, reader: int, readers: int) -> None:
        """Give the blocks back; idempotent, silent for an unknown id. Raises TransferFailed only if unreachable."""

    def forget(self, address: str) -> None:  # noqa: B027 - some keep nothing
        """Keep nothing of a source that has left for good. Calls that run, and later ones, are not disturbed."""

    def known(self) -> Set[str]:
        """Addresses of which something is kept."""
        return frozenset()

    @abstractmethod
    async def close(self) -> None:
        """Drop connections. Idempotent."""


@dataclass(slots=True)
class FetchProgress:
    """Pullers fill it in as bytes land in the pool."""

    started_s: float
    transport: str = ""
    first_byte_s: float | None = None
    last_first_byte_s: float | None = None
    num_bytes: int = 0
    first_token: int | None = None

    @property
    def anything_arrived(self) -> bool:
        """Whether a byte came, in this segment or an earlier one."""
        return self.first_byte_s is not None or self.last_first_byte_s is not None

    def landed(self, num_bytes: int) -> None:
        """Note that this many bytes were written to the pool: decoded, however few of them travelled."""
        self.first_byte()
        self.num_bytes += num_bytes

    def first_byte(self) -> None:
        """Note that bytes arrived; of a segment only the first call counts."""
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic()

    def segment_ends(self) -> None:
        """Note that what comes next is another segment, or one of its layers: the wire's time is that of the last."""
        self.last_first_byte_s, self.first_byte_s = self.first_byte_s, None

    def receipt(self, error: errors.HandoffError | None) -> FetchReceipt:
        """Close the books."""
        ended_s = time.monotonic()
        first_byte_s = self.first_byte_s or self.last_first_byte_s or ended_s
        return FetchReceipt(
            outcome="ok" if error is None else "cancelled" if error.reason == errors.CANCELLED else "failed",
            reason="" if error is None else error.reason,
            message="" if error is None else error.message,
            num_bytes=self.num_bytes,
            wait_s=first_byte_s - self.started_s,
            wire_s=ended_s - first_byte_s,
            transport=self.transport,
            first_token=self.first_token,
        )


@dataclass(frozen=True, slots=True)
class Pull:
    """One transfer from one source: what is asked for and where it goes."""

    address: str
    source: SourceDescription
    request: FetchRequest
    target_block_ids: Sequence[int]
    pool: BlockPool
    """Narrowed to the part of each block that this source fills."""
    progress: FetchProgress
    lease_s: float
    follows: bool
    """Whether the hand-off still grows: this pull then lasts as long as its prefill."""
    give_up_at_s: float
    """On time.monotonic's scale."""


class Puller(ABC):
    """Moves bytes. Its methods run on the fetcher's event loop; pulls may run concurrently."""

    name: ClassVar[str]

    @abstractmethod
    def obstacle(self, source: SourceDescription) -> str | None:
        """Why this transport cannot reach that source, in words; None if it can. May try, and keep what it opened."""

    @abstractmethod
    async def pull(self, pull: Pull) -> None:
        """Move the bytes or raise a HandoffError; on cancellation return only when `pull.pool` is no longer written."""

    def forget(self, source: SourceDescription) -> None:  # noqa: B027 - most keep nothing
        """Drop what `obstacle` opened: that process is gone. Pulls that run from it are not disturbed."""

    @abstractmethod
    async def close(self) -> None:
        """Idempotent."""


async def run_in_thread(threads: ThreadPoolExecutor, work: Callable[[], None], stop: Callable[[], None]) -> None:
    """Await `work` on a thread. If cancelled, call `stop` and come back only when the thread has ended."""
    running = threads.submit(work)
    ended = asyncio.wrap_future(running)
    try:
        await asyncio.wait((ended,))  # which, unlike awaiting it, leaves it running when we are cancelled
    except asyncio.CancelledError:
        stop()
        running.cancel()  # succeeds only if no thread has taken it yet
        while not ended.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((ended,))
        if not ended.cancelled():
            ended.exception()  # how it ended matters no more
        raise
    ended.result()
