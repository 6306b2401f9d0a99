"""The messages of the collective transport over gRPC, beside the bytes that the pair group carries.

Join      the fetcher opens it, reads an `Invitation`, meets the source in a new group, and reads `FORMED`; the group
          lives as long as the stream does
Collect   one transfer: a `Chunk` for each tensor sent, in that order, then one `End`
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ridgeline.kv_transfer.interfaces import FetchRequest
from ridgeline.kv_transfer.memory.blocks import BlockPool

JOIN: Final = "CollectiveJoin"
COLLECT: Final = "CollectiveFetch"
FORMED: Final = b"formed"
WINDOW_CHUNKS: Final = 3
"""Tensors sent and not yet received: what a transfer holds in source memory."""
CHUNK_BYTES: Final = {"cpu": 2 << 20, "cuda": 16 << 20}
"""Size of a tensor aimed at, by the kind of device. Links between GPUs reach their speed with messages of this size; in
host memory they would leave the caches between two copies, and gloo moves half as much (measured)."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Where to meet: in the source's store, under the group's name."""

    incarnation: str
    group: str
    store_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for one transfer in a group."""

    group: str
    request: FetchRequest


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One tensor: all layers of `count` blocks, positions ascending from `first`, relative to the request's."""

    first: int
    count: int
    ends_segment: bool
    """Whether prefill had made no more blocks final when this one was sent."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a transfer: the fetcher has received everything that was sent."""

    first_token: int | None = None
    checksums: list[int] = []
    """`BlockPool.checksum` of each tensor. They come at the end, so that a GPU is waited for once."""


def most_blocks(pool: BlockPool) -> int:
    """Return how many blocks a tensor has at most."""
    return max(1, CHUNK_BYTES[pool.device.type] // (pool.num_layers * pool.block_bytes))
