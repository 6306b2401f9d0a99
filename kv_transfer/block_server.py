"""What every source does with a fetch request, whatever carries the bytes: check it, pin the blocks, make frames.

Called from a transport's server threads. The peer names a hand-off and positions in its block list; which blocks those
are is read from the lease table, so a peer can never ask for a block by number.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Final

import msgspec

from kv_transfer import errors, frames
from kv_transfer.base import SourceDescription
from kv_transfer.blocks import BlockPool
from kv_transfer.handoff import KvLayout, explain_mismatch
from kv_transfer.lease import LeaseTable

PUBLISH_WAIT_S: Final = 1.0
"""How long a fetch may wait for a hand-off that is announced but not yet published."""
_WAIT_SLICE_S: Final = 0.25


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for positions `first_block` to `first_block + num_blocks` of a hand-off, in the asker's layout."""

    handoff_id: str
    first_block: int
    num_blocks: int
    layout: KvLayout


class BlockServer:
    """The transport-independent half of a source."""

    def __init__(
        self, pool: BlockPool, leases: LeaseTable, layout: KvLayout, publish_wait_s: float = PUBLISH_WAIT_S
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._layout = layout
        self._publish_wait_s = publish_wait_s
        self._counter_lock = threading.Lock()
        self._bytes_sent_total = 0

    @property
    def bytes_sent_total(self) -> int:
        """KV bytes put into frames so far."""
        return self._bytes_sent_total

    def frames(self, request: FetchRequest, wanted: Callable[[], bool] = lambda: True) -> Generator[bytes]:
        """The answer; raises a HandoffError before its first frame or not at all.

        The blocks stay pinned until the iterator is exhausted or closed. While it waits for the publication it asks
        now and then whether the answer is still `wanted`.
        """
        mismatch = explain_mismatch(self._layout, request.layout)
        if mismatch is not None:
            raise errors.LayoutMismatch(errors.LAYOUT_MISMATCH, mismatch)
        self._wait_published(request.handoff_id, wanted)
        with self._leases.reading(request.handoff_id) as published:
            stop = request.first_block + request.num_blocks
            if not 0 <= request.first_block <= stop <= len(published.block_ids):
                raise errors.TransferFailed(
                    errors.BAD_REQUEST, f"blocks {request.first_block} to {stop} of {len(published.block_ids)}"
                )
            for frame in frames.write_frames(self._pool, published.block_ids[request.first_block : stop]):
                with self._counter_lock:
                    self._bytes_sent_total += frames.payload_bytes(frame)
                yield frame

    def renew(self, handoff_id: str) -> None:
        """Extend a lease or raise why not."""
        if not self._leases.renew(handoff_id):
            raise self._leases.refusal(handoff_id)

    def release(self, handoff_id: str) -> None:
        """Close a lease; an unknown id is none of the caller's faults."""
        self._leases.release(handoff_id)

    def describe(self) -> SourceDescription:
        """What a peer may know before it asks for anything."""
        leases = self._leases.stats()
        return SourceDescription(
            layout=self._layout,
            open_leases=leases.open_leases,
            pinned_blocks=leases.pinned_blocks,
            expired_leases_total=leases.expired_leases_total,
            bytes_sent_total=self._bytes_sent_total,
        )

    def _wait_published(self, handoff_id: str, wanted: Callable[[], bool]) -> None:
        left_s = self._publish_wait_s
        while not self._leases.wait_published(handoff_id, min(left_s, _WAIT_SLICE_S)):
            left_s -= _WAIT_SLICE_S
            if left_s <= 0 or not wanted():
                return
