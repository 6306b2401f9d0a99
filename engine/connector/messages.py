"""The messages between the connector's two sides, one object a step in each direction.

With tensor parallelism the worker side is another process, so they are plain data.
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

from ridgeline.contracts.handoff import KvHandoff, TransferResult

FIRST_TOKEN_FOLLOWS = "first_token_follows"
"""Key in a decode leg's instructions: the last token of its prompt is a placeholder for the first token, which comes
with the KV."""
REUSE = "reuses_cached_kv"
"""Key in a prefill leg's instructions: the hand-off is the beginning of its prompt, from another engine's cache."""
PREFIX_CACHE_SKIPPED = "prefix_cache_skipped"
"""Why a prompt is computed although its KV was there: vLLM reads neither its cache nor ours for this request."""
NO_ROOM = "no_room"
"""The same: this engine is full of hand-offs that wait for others, which may wait for this one."""


@dataclass
class Publish:
    """The source: keep these blocks pinned until they are fetched, released or expired."""

    request_id: str
    handoff_id: str
    block_ids: list[int]
    num_tokens: int
    first_token: int | None = None
    lease_s: float | None = None
    """None: as long as the engine's hand-offs are kept."""


@dataclass
class Extend:
    """Prefill: these blocks are final while the rest of the prompt is still computed."""

    request_id: str
    handoff_id: str
    block_ids: list[int]


@dataclass
class Fetch:
    """Decode: pull blocks of the source into these, by the first position of each run."""

    request_id: str
    handoff: KvHandoff
    targets: dict[int, list[int]]


@dataclass
class StepInstructions(KVConnectorMetadata):
    """What the scheduler side tells the worker side in one step."""

    step: int = 0
    idle: bool = False
    """Whether this step computes nothing."""
    quiet: bool = False
    """Whether no other step runs beside this idle one, so that to wait for a transfer holds no token back."""
    revoke: list[str] = field(default_factory=list)
    """Hand-offs whose blocks this step may overwrite."""
    extend: list[Extend] = field(default_factory=list)
    last_step: dict[str, list[int]] = field(default_factory=dict)
    """Hand-offs that this step completes, with all their blocks."""
    publish: list[Publish] = field(default_factory=list)
    watch: list[KvHandoff] = field(default_factory=list)
    unwatch: list[KvHandoff] = field(default_factory=list)
    """Hand-offs to stop renewing without releasing them; whoever fetches them next renews them again."""
    fetch: list[Fetch] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    release: list[KvHandoff] = field(default_factory=list)
    applied: bool = False
    """Set by the worker side: two hooks see the same object, and the first one acts."""


def join_results(first: TransferResult | None, second: TransferResult) -> TransferResult:
    """Join one request's results from two ranks, which may come in different steps.

    A failure of either rank fails the request; otherwise the slower rank's times count. The bytes are added up.
    """
    if first is None:
        return second
    if first.outcome != second.outcome:
        shown = second if first.outcome == "ok" else first
    else:
        shown = max(first, second, key=lambda result: result.wait_s + result.wire_s)
    return msgspec.structs.replace(shown, num_bytes=first.num_bytes + second.num_bytes)


@dataclass
class TransferResults(KVConnectorWorkerMetadata):
    """What the worker side tells the scheduler side: the results of fetches that ended, and the step of the report."""

    by_request: dict[str, TransferResult] = field(default_factory=dict)
    step: int | None = None
    """The step's number; None for a step that computed nothing."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the results of all ranks for one step."""
        assert isinstance(other, TransferResults)
        joined = dict(self.by_request)
        for request_id, result in other.by_request.items():
            joined[request_id] = join_results(joined.get(request_id), result)
        # All ranks run the same step, but a rank with no results after an idle step reports nothing.
        return TransferResults(joined, other.step if self.step is None else self.step)


@dataclass
class Endpoint(KVConnectorHandshakeMetadata):
    """The address where this rank's blocks can be fetched, and their sizes."""

    address: str
    layout_hash: str
    num_blocks: int
    block_bytes_all_layers: int


TRANSFER_EVENTS = "transfer_events"
"""Key of a list of `ridgeline.engine.connector.events.TransferEvent` as plain data; from the scheduler side only."""
STALE_HANDOFFS = "stale_handoffs"
"""Key of a list of sentences about hand-offs that were not released for long; from the worker side only."""
FORETOLD = "foretold_s"
"""Key of the seconds that the running steps are expected to take at the most: infinite if that is not known."""
STEP_MODEL = "step_model"
"""Key of a `ridgeline.contracts.workers.StepModel` as plain data; only after it has changed."""


BYTES = "kv_bytes_total."
"""Prefix of the worker side's counters in bytes."""


@dataclass
class CounterStats(KVConnectorStats):
    """Flat counters and gauges, cumulative since the engine's start; the two sides use different names.

    Each rank holds a part of every block. Bytes of ranks are added up. For hand-offs, fetches and blocks the highest
    rank's value counts, so that one hand-off counts once however many ranks carry it, and a gauge is 0 exactly when it
    is 0 on every rank.
    """

    def reset(self) -> None:
        """Do nothing: the values are cumulative."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Merge another rank's values, or the other side's names, into these."""
        for name, value in other.data.items():
            if name not in self.data:
                self.data[name] = value
            elif name.startswith(BYTES) or name == STALE_HANDOFFS:
                self.data[name] += value
            else:
                self.data[name] = max(self.data[name], value)
        return self

    def reduce(self) -> dict[str, Any]:
        """Return the values unchanged."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Return whether there is nothing to report."""
        return not self.data
