"""The `nixl` transport's serving end: registers the KV cache and offers it. Pins go over the source's own gRPC method.

Registered is the whole cache, for as long as the source lives: NIXL has no narrower or shorter right. Whoever has the
metadata and reaches UCX's port can read any of it, leased or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import grpc
import msgspec

from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.nixl.agent import Agent, descriptors, merged
from ridgeline.kv_transfer.nixl.offer import NixlOffer
from ridgeline.prefill_worker.kv_source.block_server import BlockServer
from ridgeline.prefill_worker.kv_source.grpc_source import FetchSlot, SourceExtension


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

    def handlers(self, server: BlockServer, slot: FetchSlot) -> Mapping[str, grpc.RpcMethodHandler]:
        return {}

    def close(self) -> None:
        self._agent = None  # which ends it, and its connections
