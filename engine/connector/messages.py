"""What the connector's two sides tell each other, one object a step in each direction.

With tensor parallelism the worker side is another process, so these are plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from contracts.handoff import FetchReceipt, KvHandoff

FIRST_TOKEN_FOLLOWS = "first_token_follows"
"""Key of a decode leg's instructions: the last token of its prompt is a placeholder, which the one that comes with the
KV replaces."""
PREFIX_CACHE_SKIPPED = "prefix_cache_skipped"
"""Why a prompt is computed whose KV was there: vLLM reads neither its cache nor ours for this request."""


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
    last_step: dict[str, list[int]] = field(default_factory=dict)
    """Hand-offs that are whole after this step, with all their blocks."""
    publish: list[Publish] = field(default_factory=list)
    watch: list[KvHandoff] = field(default_factory=list)
    unwatch: list[KvHandoff] = field(default_factory=list)
    """Renew these no more, without releasing: whoever fetches them next renews them again."""
    fetch: list[Fetch] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    release: list[KvHandoff] = field(default_factory=list)
    applied: bool = False
    """Set by the worker side: two hooks see the same object, the first one acts."""


def join_receipts(first: FetchReceipt | None, second: FetchReceipt) -> FetchReceipt:
    """One request's receipts from two ranks, which may come in different steps.

    One failure fails the request; else the slowest rank is what it waited for. The bytes are those of both.
    """
    if first is None:
        return second
    if first.outcome != second.outcome:
        shown = second if first.outcome == "ok" else first
    else:
        shown = max(first, second, key=lambda receipt: receipt.wait_s + receipt.wire_s)
    return msgspec.structs.replace(shown, num_bytes=first.num_bytes + second.num_bytes)


@dataclass
class FetchReceipts(KVConnectorWorkerMetadata):
    """Worker side to scheduler side: how each fetch that ended went, and which step this is the output of."""

    by_request: dict[str, FetchReceipt] = field(default_factory=dict)
    step: int | None = None
    """None for a step that computed nothing."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the ranks' receipts of one step."""
        assert isinstance(other, FetchReceipts)
        joined = dict(self.by_request)
        for request_id, receipt in other.by_request.items():
            joined[request_id] = join_receipts(joined.get(request_id), receipt)
        # All ranks run the same step, but one that has nothing to say after an idle one says nothing.
        return FetchReceipts(joined, other.step if self.step is None else self.step)


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """Where this rank's blocks can be fetched."""

    address: str
    layout_hash: str
    num_blocks: int
    block_bytes_all_layers: int


NOTICES = "notices"
"""Not a number: a list of `engine.connector.events.Notice` as plain data, from the scheduler side only."""
LINGERING = "lingering"
"""Not a number: sentences about hand-offs that nobody has released for long, from the worker side only."""


BYTES = "kv_bytes_total."
"""Prefix of what the worker side counts in bytes."""


@dataclass
class CounterStats(KVConnectorStats):
    """Flat counters and gauges, cumulative since the engine's start; the two sides use different names.

    Of several ranks each holds a part of every block. Bytes are summed; whatever is counted in hand-offs, fetches or
    blocks is the highest rank's, so that one hand-off counts once however many ranks carry it, and nothing is left
    exactly when nothing is left on any rank.
    """

    def reset(self) -> None:
        """Cumulative: there is nothing to reset."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Join two ranks' values, or the two sides' names."""
        for name, value in other.data.items():
            if name not in self.data:
                self.data[name] = value
            elif name.startswith(BYTES) or name == LINGERING:
                self.data[name] += value
            else:
                self.data[name] = max(self.data[name], value)
        return self

    def reduce(self) -> dict[str, Any]:
        """As they are."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """True when there is nothing to report."""
        return not self.data
