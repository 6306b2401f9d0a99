"""What both ends of the collective transport say over gRPC, beside the bytes that the pair group carries.

Join      the fetcher opens it, reads an `Invitation`, meets the source in a new group, and reads `FORMED`; the group
          lives as long as the stream does
Collect   one transfer: a `Chunk` for every tensor that was sent, in that order, then one `End`
Stop      send no more of this transfer; its Collect ends with an `End` as soon as what was sent is told
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kv_transfer.interfaces import FetchRequest

JOIN: Final = "CollectiveJoin"
COLLECT: Final = "CollectiveFetch"
STOP: Final = "CollectiveStop"
FORMED: Final = b"formed"
WINDOW_CHUNKS: Final = 3
"""Sent and not yet received: what a cancelled fetch drains, and what each transfer holds in the source's memory."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Where to meet: at the source's store, under the group's name."""

    incarnation: str
    group: str
    store_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for one transfer in a group; `number` tells it from the group's other ones."""

    group: str
    number: int
    request: FetchRequest


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a transfer early, also one whose request has not come yet."""

    group: str
    number: int


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One tensor: `count` whole blocks of one layer, positions ascending from `first`, of a segment that ends at `end`.

    Positions are relative to the request's, as they are in frames.
    """

    layer: int
    first: int
    count: int
    end: int
    checksum: int
    """`BlockPool.checksum` of the tensor."""


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that was sent has been received."""

    complete: bool
    """False if it was stopped."""
    first_token: int | None = None
