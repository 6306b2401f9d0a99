"""The `shm` transport's receiving end: maps the source's KV cache and copies each block once.

Each byte is copied from one cache to the other and nowhere else; see `pinned` for what keeps the blocks meanwhile.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.decode_worker.kv_fetch.pinned import Copy, PinnedPuller, copy_out_of
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import Pull
from ridgeline.kv_transfer.memory.shared import MappedPool, SharedOffer


class ShmPuller(PinnedPuller[MappedPool]):
    """The `shm` transport; keeps one mapping for each source process."""

    name = "shm"
    not_offered = "its KV cache is not in shared memory"

    def __init__(self, control: GrpcControl) -> None:
        super().__init__(control, "kv-copy")

    def open(self, offer: dict[str, Any]) -> MappedPool:
        return MappedPool(msgspec.convert(offer, SharedOffer))

    def copier(self, opened: MappedPool, pull: Pull) -> Copy:
        return copy_out_of(opened.pool, pull)
