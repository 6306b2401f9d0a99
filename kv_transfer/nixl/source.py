"""The `nixl` transport's serving end: registers the KV cache and offers it. Pins go over the source's own gRPC method.

Registered is the whole cache, for as long as the source lives: NIXL has no narrower or shorter right. Whoever has the
metadata and reaches UCX's port can read any of it, leased or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import grpc
import msgspec
import numpy as np
import numpy.typing as npt

from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.kv_transfer.memory.blocks import BlockPool, CannotOpen
from ridgeline.kv_transfer.nixl.agent import Agent, Descriptors, descriptors, merged
from ridgeline.prefill_worker.kv_source.block_server import BlockServer
from ridgeline.prefill_worker.kv_source.grpc_source import SourceExtension

Numbers = npt.NDArray[np.uint64]
Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 36)]
"""Bounded, so that no sum of them exceeds 64 bits."""


class NixlOffer(msgspec.Struct, frozen=True, kw_only=True):
    """A registered pool. Its addresses mean something to its owner's process and to UCX only."""

    metadata: bytes
    """NIXL's own, of which this project knows nothing."""
    device_index: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    """Of the CUDA device; 0 for host memory."""
    num_blocks: Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
    block_bytes: Size
    layer_addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1)]
    """Of the first block of each layer."""
    layer_strides_bytes: tuple[Size, ...]
    """From one block to the next."""

    @classmethod
    def of(cls, pool: BlockPool, metadata: bytes) -> NixlOffer:
        """Describe this pool."""
        spans = pool.spans()
        return cls(
            metadata=metadata,
            device_index=pool.device.index or 0,
            num_blocks=pool.num_blocks,
            block_bytes=pool.block_bytes,
            layer_addresses=tuple(span.address for span in spans),
            layer_strides_bytes=tuple(span.stride_bytes for span in spans),
        )

    def check(self) -> None:
        """Raise CannotOpen for numbers that do not describe a pool; each is in its bounds already."""
        if len(self.layer_addresses) != len(self.layer_strides_bytes):
            raise CannotOpen("its description is not of a KV cache")
        if min(self.layer_strides_bytes) < self.block_bytes:
            raise CannotOpen("its blocks overlap")

    def part(self, start: int, num_bytes: int) -> BlockAddresses:
        """Return where `num_bytes` of each block lie, from `start` on. Raises ValueError if a block has none such."""
        if start < 0 or num_bytes <= 0 or start + num_bytes > self.block_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} are not inside a block of {self.block_bytes}")
        return BlockAddresses(self, start, num_bytes)


class BlockAddresses:
    """Where the same part of each block of a source lies."""

    def __init__(self, offer: NixlOffer, start: int, num_bytes: int) -> None:
        self._offer = offer
        self._num_bytes = num_bytes
        self._starts = np.array(offer.layer_addresses, dtype=np.uint64) + np.uint64(start)
        self._strides = np.array(offer.layer_strides_bytes, dtype=np.uint64)

    @property
    def num_layers(self) -> int:
        """The number of the source's layers."""
        return len(self._offer.layer_addresses)

    def of(self, block_ids: Sequence[int], layers: range) -> Descriptors:
        """Return descriptors of these blocks, layer by layer, neighbours as one where nothing lies between them.

        Raises ValueError for ids that name no block.
        """
        if min(block_ids) < 0 or max(block_ids) >= self._offer.num_blocks:
            raise ValueError(f"blocks {min(block_ids)} to {max(block_ids)} of a source of {self._offer.num_blocks}")
        ids = np.array(block_ids, dtype=np.uint64)
        rows = []
        for layer in layers:
            stride = self._strides[layer]
            firsts, counts = _runs(ids) if stride == self._num_bytes else (ids, np.ones(len(ids), dtype=np.uint64))
            addresses = self._starts[layer] + firsts * stride
            rows.append(descriptors(addresses, counts * np.uint64(self._num_bytes), self._offer.device_index))
        return np.concatenate(rows)


def _runs(ids: Numbers) -> tuple[Numbers, Numbers]:
    """Return the first of each run of ids that ascend by one, and how many ids it has."""
    begins = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1] + np.uint64(1))))
    return ids[begins], np.diff(np.append(begins, len(ids))).astype(np.uint64)


class NixlSource(SourceExtension):
    """A registered KV cache."""

    name: ClassVar[str] = "nixl"
    max_streams = 0

    def __init__(self, pool: BlockPool) -> None:
        """Start an agent and register the pool. Raises NixlFailed."""
        regions = merged([(span.address, span.num_bytes) for span in pool.spans()])
        addresses, sizes = zip(*regions, strict=True)
        self._pool = pool  # registered memory must not be freed before the agent
        self._agent: Agent | None = Agent(new_handoff_id(), pool.device, answers=True)
        self._agent.register(descriptors(addresses, sizes, pool.device.index))
        self._offer = NixlOffer.of(pool, self._agent.metadata())

    def offer(self) -> dict[str, Any]:
        offer: dict[str, Any] = msgspec.structs.asdict(self._offer)
        return offer

    def handlers(self, server: BlockServer) -> Mapping[str, grpc.RpcMethodHandler]:
        return {}

    def close(self) -> None:
        self._agent = None  # which ends it, and its connections
