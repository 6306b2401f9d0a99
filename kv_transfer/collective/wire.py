"""The messages of the collective transport over gRPC, beside the bytes that the pair group carries.

Join     the fetcher opens it, reads an `Invitation`, meets the source in a new group, and reads `FORMED`; the group
         lives as long as the stream does
Collect  asks for one tensor by a `TensorRequest`; the group carries it, and the answer is its checksum
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from ridgeline.kv_transfer.interfaces import FetchRequest

JOIN: Final = "CollectiveJoin"
COLLECT: Final = "CollectiveFetch"
FORMED: Final = b"formed"
WINDOW: Final = 3
"""Tensors asked for and not yet received, so that the source gathers one while another travels."""
TENSOR_BYTES: Final = {"cpu": 4 << 20, "cuda": 16 << 20}
"""Largest tensor, by the kind of device, unless one block is larger. Links between GPUs reach their speed with messages
of this size; in host memory 8 MiB leave the caches between two copies, and gloo moves a third less (measured)."""


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """Where to meet: in the source's store, under the group's name."""

    incarnation: str
    group: str
    store_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class TensorRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks a group for these layers of some of the blocks of a request, which its fetcher has pinned."""

    group: str
    number: int
    """Counts the group's tensors from 0: they are sent in this order."""
    request: FetchRequest
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    """Counted from the request's first."""
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    first_layer: int
    end_layer: int
