"""What a transport is: a `Puller`, and the types that it shares with sources and the fetcher.

A hand-off has a control side, the same for all transports (`control.GrpcControl`: describe, renew, release), and a side
that moves the bytes, which is where transports differ. One `GrpcKvSource` per engine rank serves the blocks that its
lease table holds open, in every way it can; `KvFetcher` picks a puller for each source. Every transport must pass
`tests/conformance/check_transport.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import HandoffId, KvLayout, TransferResult
from ridgeline.kv_transfer.memory.blocks import BlockPool

UNSUPPORTED: Final = "unsupported_reason"
"""The one field of an offer that cannot be made: a sentence that says why."""


class SourceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A source's description of itself, so that two workers that do not match are refused when they pair."""

    layout: KvLayout
    incarnation: str
    """The process behind the address: if this changes, everything known of the old process is void."""
    offers: dict[str, dict[str, Any]]
    """For each transport that the source supports, what its puller needs to know; or UNSUPPORTED and the reason."""
    open_leases: int
    pinned_blocks: int
    expired_leases_total: int
    bytes_sent_total: int


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for runs of positions of a hand-off, in the fetcher's layout.

    It covers bytes [part_start, part_start + part_bytes) of every block: all of them unless the rank counts differ.
    """

    handoff_id: HandoffId
    runs: tuple[tuple[int, int], ...]
    """First position and number of each, in order."""
    layout: KvLayout
    part_start: int
    part_bytes: int

    def positions(self) -> list[int]:
        """Return the positions one after the other, once `are_runs` has found them sound."""
        return [position for first, count in self.runs for position in range(first, first + count)]


Targets: TypeAlias = Mapping[int, Sequence[int]]
"""Which blocks of the target a fetch fills, by the first position of each run."""


def are_runs(runs: Iterable[tuple[int, int]], num_blocks: int) -> bool:
    """Return whether these are runs of positions below `num_blocks`, each behind the one before it."""
    end = 0
    for first, count in runs:
        if first < end or count < 0:
            return False
        end = first + count
    return end <= num_blocks


@dataclass(slots=True)
class FetchProgress:
    """The progress of one fetch, updated by pullers as bytes land in the pool."""

    started_s: float
    transport: str = ""
    first_byte_s: float | None = None
    last_first_byte_s: float | None = None
    num_bytes: int = 0
    first_token: int | None = None

    @property
    def anything_arrived(self) -> bool:
        """Whether any byte has arrived, in this segment or an earlier one."""
        return self.first_byte_s is not None or self.last_first_byte_s is not None

    def landed(self, num_bytes: int) -> None:
        """Record that this many bytes were written to the pool, counted after decoding."""
        self.first_byte()
        self.num_bytes += num_bytes

    def first_byte(self) -> None:
        """Record that bytes arrived; only the first call of a segment counts."""
        if self.first_byte_s is None:
            self.first_byte_s = time.monotonic()

    def segment_ends(self) -> None:
        """Record the end of a segment or of one of its layers: `wire_s` is measured from the last one's first byte."""
        self.last_first_byte_s, self.first_byte_s = self.first_byte_s, None

    def result(self, error: errors.HandoffError | None) -> TransferResult:
        """Return the result of this fetch, with the times until now."""
        ended_s = time.monotonic()
        first_byte_s = self.first_byte_s or self.last_first_byte_s or ended_s
        return TransferResult(
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
    """One transfer from one source: what to read and where to write it."""

    address: str
    source: SourceDescription
    request: FetchRequest
    target_block_ids: Sequence[int]
    pool: BlockPool
    """The target pool, narrowed to the part of each block that this source fills."""
    progress: FetchProgress
    lease_s: float
    overlaps: bool
    """Whether the prefill is still running; the pull then lasts until it ends."""
    give_up_at_s: float
    """The pull's deadline on time.monotonic's scale."""


class Puller(ABC):
    """Moves bytes by one transport. Its methods run on the fetcher's event loop; pulls may run concurrently."""

    name: str
    covered_by_tls: bool = True
    """Whether TLS, where it is configured, protects what it sends over a network, if it sends anything."""

    @abstractmethod
    def unsupported_reason(self, source: SourceDescription) -> str | None:
        """Return why this transport cannot reach that source, or None if it can.

        It may connect to find out, and keep what it opened.
        """

    @abstractmethod
    async def pull(self, pull: Pull) -> None:
        """Move the bytes or raise a HandoffError. If cancelled, return only after the last write to `pull.pool`."""

    def forget(self, source: SourceDescription) -> None:  # noqa: B027 - most keep no state
        """Drop what `unsupported_reason` opened, because that process is gone. Pulls in progress still work."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections. Calling it again does nothing."""
