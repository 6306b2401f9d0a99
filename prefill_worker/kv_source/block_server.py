"""What every source does with a request, whichever transport moves the bytes: check it, pin the blocks, serve them.

It runs on a transport's server threads. The peer names a hand-off and positions in its block list. Which blocks those
are comes from the lease table, so a peer can never ask for a block by number.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvLayout, explain_mismatch, new_handoff_id
from ridgeline.kv_transfer.interfaces import FetchRequest, SourceDescription, are_runs
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.wire import frames
from ridgeline.prefill_worker.kv_source.lease import Lease, LeaseTable

PUBLISH_WAIT_S: Final = 1.0
"""How long a fetch may wait for a hand-off that is announced but not yet published."""
_WAIT_SLICE_S: Final = 0.25

Wanted = Callable[[], bool]
"""Tells, at intervals during a wait, whether the peer is still there."""


LayerFinal = Callable[[int], None]
"""Waits until that layer may be read."""


def _at_once(_layer: int) -> None:
    """Return immediately, for blocks that are final."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks that became final together. A read always has a last segment, which may be empty."""

    first: int
    """Position of the first block, relative to the request's first."""
    block_ids: tuple[int, ...]
    last: bool
    first_token: int | None
    """The token that prefill sampled; set on the last segment only."""
    wait_layer: LayerFinal = _at_once
    """Call this before reading each layer."""

    @property
    def by_layer(self) -> bool:
        """Whether prefill still computes these blocks, so that `wait_layer` may wait."""
        return self.wait_layer is not _at_once


class BlockRead:
    """One request in progress: its blocks stay readable until the read ends."""

    def __init__(self, request: FetchRequest, leases: LeaseTable, lease: Lease, pool: BlockPool) -> None:
        self.pool = pool
        """The pool narrowed to the part of each block that was asked for."""
        self._request = request
        self._leases = leases
        self._lease = lease

    def segments(self, wanted: Wanted = lambda: True, *, by_layer: bool = False) -> Iterator[Segment]:
        """Yield segments in order, as prefill makes them final.

        With `by_layer`, the last step's blocks come while it still computes their layers. Raises
        TransferFailed(`revoked`) if the prefill was given up, TransferFailed(`bad_request`) if fewer blocks were
        published than asked for. Ends early when the peer has gone.
        """
        asked = self._request.positions()
        stop = asked[-1] + 1 if asked else 0
        sent = 0
        while wanted():
            due = asked[sent] if sent < len(asked) else stop
            in_last_step = stop if by_layer and sent < len(asked) else None
            blocks = self._leases.wait_blocks(self._lease, due, _WAIT_SLICE_S, in_last_step)
            if blocks.complete and len(blocks.block_ids) < stop:
                raise errors.TransferFailed(errors.BAD_REQUEST, f"block {stop} of {len(blocks.block_ids)}")
            ready = bisect_left(asked, len(blocks.block_ids))
            if ready > sent or blocks.complete:
                token = blocks.first_token if blocks.complete else None
                yield Segment(sent, _at(asked[sent:ready], blocks.block_ids), blocks.complete, token)
                sent = max(sent, ready)
            if blocks.complete:
                return
            if by_layer and sent < len(asked) and len(self._lease.all_block_ids) >= stop:
                rest = _at(asked[sent:], self._lease.all_block_ids)
                yield Segment(sent, rest, False, None, lambda layer: self._wait_layer(layer, wanted))
                sent = len(asked)

    def block_ids(self, first: int, num_blocks: int) -> tuple[int, ...]:
        """Return some of the blocks asked for, of which the running step may still compute some layers.

        Raises TransferFailed(`bad_request`) if there are fewer.
        """
        asked = self._request.positions()[first : first + num_blocks]
        known = self._lease.all_block_ids or self._lease.blocks.block_ids
        if len(asked) < num_blocks or asked[-1] >= len(known):
            raise errors.TransferFailed(errors.BAD_REQUEST, f"{num_blocks} blocks from {first} of {len(known)}")
        return _at(asked, known)

    def _wait_layer(self, layer: int, wanted: Wanted) -> None:
        while not self._leases.wait_layer(self._lease, layer, _WAIT_SLICE_S):
            if not wanted():
                raise errors.TransferCancelled(errors.CANCELLED, "the peer went away while prefill computed")


def _at(positions: Sequence[int], block_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple([block_ids[position] for position in positions])


@dataclass(frozen=True, slots=True)
class RankCache:
    """The KV cache of one rank, which is what a transport's two ends work on."""

    pool: BlockPool
    leases: LeaseTable
    layout: KvLayout
    rank: int = 0
    """Which tensor parallel rank this is."""
    offers: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """By transport, how peers reach its memory directly; see `ridgeline.kv_transfer.transports.exports`."""


class BlockServer:
    """The part of a source that is the same for all transports."""

    def __init__(self, cache: RankCache, offers: Mapping[str, dict[str, Any]]) -> None:
        """`offers` are made beside those of the cache."""
        self.incarnation = new_handoff_id()
        self._cache = cache
        self._offers = {**cache.offers, **offers}
        self._publish_wait_s = PUBLISH_WAIT_S
        self._counter_lock = threading.Lock()
        self._bytes_sent_total = 0

    @property
    def bytes_sent_total(self) -> int:
        """KV bytes handed to transports so far: encoded for frames, otherwise the blocks' own size."""
        return self._bytes_sent_total

    def count_sent(self, num_bytes: int) -> None:
        """Add to the bytes handed to transports, whenever some have been."""
        with self._counter_lock:
            self._bytes_sent_total += num_bytes

    @contextmanager
    def read(
        self, request: FetchRequest, wanted: Wanted = lambda: True, *, pinned: bool = False
    ) -> Iterator[BlockRead]:
        """Check the request, wait until the hand-off is published, and pin it while the block runs.

        One that is `pinned` its reader holds by another call. Raises a HandoffError that says what is wrong with the
        request or the hand-off.
        """
        mismatch = explain_mismatch(self._cache.layout, request.layout)
        if mismatch is not None:
            raise errors.LayoutMismatch(errors.LAYOUT_MISMATCH, mismatch)
        try:
            pool = self._cache.pool.part(request.part_start, request.part_bytes)
        except ValueError as error:
            raise errors.TransferFailed(errors.BAD_REQUEST, str(error)) from error
        if not are_runs(request.runs, pool.num_blocks):
            raise errors.TransferFailed(errors.BAD_REQUEST, f"{len(request.runs)} runs that are no positions in order")
        if not pinned:
            self._wait_published(request.handoff_id, wanted)
        with self._cache.leases.reading(request.handoff_id, again=pinned) as lease:
            yield BlockRead(request, self._cache.leases, lease, pool)

    def frames(self, request: FetchRequest, wanted: Wanted = lambda: True) -> Generator[bytes, None, int | None]:
        """Yield the answer as frames; the generator returns the first token.

        The blocks stay pinned until the generator is exhausted or closed.
        """
        with self.read(request, wanted) as read:
            first_token = None
            for segment in read.segments(wanted, by_layer=True):
                for frame in frames.write_frames(
                    read.pool, segment.block_ids, segment.first, wait_layer=segment.wait_layer
                ):
                    self.count_sent(frames.payload_bytes(frame))
                    yield frame
                first_token = segment.first_token
            return first_token

    def renew(self, handoff_id: str) -> None:
        """Extend a lease. Raises LeaseExpired, UnknownHandoff or TransferFailed if it is not open."""
        if not self._cache.leases.renew(handoff_id):
            raise self._cache.leases.refusal(handoff_id)

    def describe(self) -> SourceDescription:
        """Return what a peer needs to know before it asks for blocks."""
        leases = self._cache.leases.stats()
        return SourceDescription(
            layout=self._cache.layout,
            incarnation=self.incarnation,
            offers=self._offers,
            open_leases=leases.open_leases,
            pinned_blocks=leases.pinned_blocks,
            expired_leases_total=leases.expired_leases_total,
            bytes_sent_total=self._bytes_sent_total,
        )

    def _wait_published(self, handoff_id: str, wanted: Wanted) -> None:
        left_s = self._publish_wait_s
        while not self._cache.leases.wait_published(handoff_id, min(left_s, _WAIT_SLICE_S)):
            left_s -= _WAIT_SLICE_S
            if left_s <= 0 or not wanted():
                return
