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
    first_token: int | None = None


@dataclass
class Grow:
    """Prefill: these blocks of a prompt that is still computed are final."""

    request_id: str
    handoff_id: str
    block_ids: list[int]


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

    step: int = 0
    idle: bool = False
    withdraw: list[str] = field(default_factory=list)
    """Ids of hand-offs whose blocks this step may overwrite."""
    grow: list[Grow] = field(default_factory=list)
    publish: list[Publish] = field(default_factory=list)
    watch: list[KvHandoff] = field(default_factory=list)
    fetch: list[Fetch] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    release: list[KvHandoff] = field(default_factory=list)
    applied: bool = False
    """Set by the worker side: two hooks see the same object, the first one acts."""


@dataclass
class FetchReceipts(KVConnectorWorkerMetadata):
    """Worker side to scheduler side: how each fetch that ended went, and which step this is the output of."""

    by_request: dict[str, FetchReceipt] = field(default_factory=dict)
    step: int | None = None
    """None for a step that computed nothing."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the ranks' receipts: one failure fails the request, else the slowest rank is what it waited for."""
        assert isinstance(other, FetchReceipts)
        joined = dict(self.by_request)
        for request_id, receipt in other.by_request.items():
            mine = joined.get(request_id)
            if mine is None or (mine.outcome == "ok" and (receipt.outcome != "ok" or mine.wire_s < receipt.wire_s)):
                joined[request_id] = receipt
        return FetchReceipts(joined, self.step)


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Where this rank's blocks can be fetched."""

    address: str
    layout_hash: str
    num_blocks: int
    block_bytes_all_layers: int


NOTICES = "notices"
"""The one entry that is no number: a list of `engine.notices.Notice` as plain data, from the scheduler side only."""


@dataclass
class CounterStats(KVConnectorStats):
    """Flat counters and gauges, cumulative since the engine's start; the two sides use different names."""

    def reset(self) -> None:
        """Cumulative: there is nothing to reset."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Join the two sides' names; the same name from several ranks is summed."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, Any]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True when there is nothing to report."""
        return not self.data
