"""The interface every transport implements, and the part of a fetch that is the same for all.

`TransferService` is the only production caller; it runs the fetcher on its own event loop, beside the engine's step
loop. A transport adds a `KvSource` and a `KvFetcher` and must pass `tests/conformance/check_transport.py`.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kv_transfer import errors
from kv_transfer.blocks import BlockPool
from kv_transfer.handoff import FetchReceipt, KvHandoff, KvLayout


class SourceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says about itself, so that two workers can be refused when they pair, before any request."""

    layout: KvLayout
    open_leases: int
    pinned_blocks: int
    expired_leases_total: int
    bytes_sent_total: int


class KvSource(ABC):
    """Serves the blocks that the lease table holds open. Reads the pool from its own threads."""

    @property
    @abstractmethod
    def address(self) -> str:
        """host:port; valid after `start`."""

    @property
    @abstractmethod
    def bytes_sent_total(self) -> int:
        """Payload bytes handed to the transport so far."""

    @abstractmethod
    def start(self) -> None:
        """Bind and serve; returns once peers can connect."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving; running fetches end with `unreachable` at their fetchers. Idempotent."""


@dataclass(slots=True)
class FetchProgress:
    """Filled in by a transport as bytes land in the pool."""

    started_s: float
    first_byte_s: float | None = None
    num_bytes: int = 0

    def landed(self, num_bytes: int) -> None:
        """Note that a frame of this many payload bytes was written to the pool."""
        self.num_bytes += num_bytes

    def first_byte(self) -> None:
        """Note that a frame arrived; only the first call counts."""
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic()

    def receipt(self, error: errors.HandoffError | None) -> FetchReceipt:
        """Close the books."""
        ended_s = time.monotonic()
        first_byte_s = ended_s if self.first_byte_s is None else self.first_byte_s
        return FetchReceipt(
            outcome="ok" if error is None else "cancelled" if error.reason == errors.CANCELLED else "failed",
            reason="" if error is None else error.reason,
            message="" if error is None else error.message,
            num_bytes=self.num_bytes,
            wait_s=first_byte_s - self.started_s,
            wire_s=ended_s - first_byte_s,
        )


class KvFetcher(ABC):
    """Pulls blocks from any number of sources. Its methods run on one event loop; fetches may run concurrently."""

    async def fetch(
        self, handoff: KvHandoff, first_block: int, target_block_ids: Sequence[int], pool: BlockPool
    ) -> FetchReceipt:
        """Pull source blocks `handoff.block_ids[first_block : first_block + len(target_block_ids)]` into the targets.

        Every failure becomes a receipt. A task cancelled here stops the transfer and raises CancelledError. However
        this ends, nothing writes to `pool` after it returned or raised; on failure the targets hold garbage.
        """
        progress = FetchProgress(started_s=time.monotonic())
        try:
            check_fetch(handoff, first_block, target_block_ids, pool)
            if target_block_ids:
                await self._pull(handoff, first_block, target_block_ids, pool, progress)
        except errors.HandoffError as error:
            return progress.receipt(error)
        return progress.receipt(None)

    @abstractmethod
    async def _pull(
        self,
        handoff: KvHandoff,
        first_block: int,
        target_block_ids: Sequence[int],
        pool: BlockPool,
        progress: FetchProgress,
    ) -> None:
        """Move the bytes or raise a HandoffError; on cancellation return only when `pool` is no longer written."""

    @abstractmethod
    async def renew(self, handoff: KvHandoff) -> None:
        """Extend the lease; raises LeaseExpired or UnknownHandoff if it is gone, TransferFailed if unreachable.

        A hand-off that is announced but not yet published counts as unknown: its lease has not begun.
        """

    @abstractmethod
    async def release(self, handoff: KvHandoff) -> None:
        """Give the blocks back; idempotent, silent for an unknown id. Raises TransferFailed only if unreachable."""

    @abstractmethod
    async def describe(self, address: str) -> SourceDescription:
        """Ask a source for its layout and counts; raises TransferFailed if unreachable."""

    @abstractmethod
    async def close(self) -> None:
        """Drop connections. Idempotent."""


def check_fetch(handoff: KvHandoff, first_block: int, target_block_ids: Sequence[int], pool: BlockPool) -> None:
    """Refuse, before anything is sent, a fetch that cannot be right."""
    if first_block < 0 or first_block + len(target_block_ids) > len(handoff.block_ids):
        raise errors.TransferFailed(
            errors.BAD_REQUEST,
            f"blocks {first_block} to {first_block + len(target_block_ids)} of a hand-off of {len(handoff.block_ids)}",
        )
    if len(set(target_block_ids)) != len(target_block_ids):
        raise errors.TransferFailed(errors.BAD_REQUEST, "the target blocks are not distinct")
    try:
        pool.check_block_ids(target_block_ids)
    except ValueError as error:
        raise errors.TransferFailed(errors.BAD_REQUEST, str(error)) from error


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
