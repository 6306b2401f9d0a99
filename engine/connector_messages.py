"""What the connector's two sides tell each other, one object a step in each direction.

With tensor parallelism the worker side is another process, so these are plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kv_transfer.handoff import FetchReceipt, KvHandoff


@dataclass
class Publish:
    """Prefill: these blocks stay pinned until fetched, released or expired."""

    request_id: str
    handoff_id: str
    block_ids: list[int]
    num_tokens: int


@dataclass
class Fetch:
    """Decode: pull source blocks from `first_block` on into `target_block_ids`."""

    request_id: str
    handoff: KvHandoff
    first_block: int
    target_block_ids: list[int]


@dataclass
class StepInstructions(KVConnectorMetadata):
    """Scheduler side to worker side."""

    idle: bool = False
    publish: list[Publish] = field(default_factory=list)
    watch: list[KvHandoff] = field(default_factory=list)
    fetch: list[Fetch] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    release: list[KvHandoff] = field(default_factory=list)
    applied: bool = False
    """Set by the worker side: two hooks see the same object, the first one acts."""


@dataclass
class FetchReceipts(KVConnectorWorkerMetadata):
    """Worker side to scheduler side: how each fetch that ended went."""

    by_request: dict[str, FetchReceipt] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the ranks' receipts: one failure fails the request, else the slowest rank is what it waited for."""
        assert isinstance(other, FetchReceipts)
        joined = dict(self.by_request)
        for request_id, receipt in other.by_request.items():
            mine = joined.get(request_id)
            if mine is None or (mine.outcome == "ok" and (receipt.outcome != "ok" or mine.wire_s < receipt.wire_s)):
                joined[request_id] = receipt
        return FetchReceipts(joined)


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Where this rank's blocks can be fetched."""

    address: str
    layout_hash: str
    num_blocks: int
    block_bytes_all_layers: int


@dataclass
class CounterStats(KVConnectorStats):
    """Flat counters and gauges, cumulative since the engine's start; the two sides use different names."""

    def reset(self) -> None:
        """Cumulative: there is nothing to reset."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Join the two sides' names; the same name from several ranks is summed."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, Any]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True when there is nothing to report."""
        return not self.data
