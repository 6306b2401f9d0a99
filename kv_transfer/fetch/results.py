"""What the service's threads have to tell the engine's step loop, handed over exactly once.

`TransferService` is the only user: its event loop finishes fetches here, the step loop takes and waits.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contracts.handoff import FetchReceipt


@dataclass(frozen=True, slots=True)
class Completed:
    """News since the last poll; every id appears in exactly one of these, once."""

    sent: set[str] = field(default_factory=set)
    """Publishing requests whose blocks may be freed."""
    received: set[str] = field(default_factory=set)
    """Fetching requests whose target blocks are no longer written, successful or not."""
    failed: set[str] = field(default_factory=set)
    """The part of `received` whose targets hold garbage."""
    receipts: dict[str, FetchReceipt] = field(default_factory=dict)
    """One for each of `received`."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counts; the `_total` ones only grow."""

    open_leases: int
    pinned_blocks: int
    expired_leases_total: int
    active_fetches: int
    watched_handoffs: int
    bytes_sent_total: int
    """As they travelled: encoded, if a peer asked for that."""
    bytes_received_total: int
    """As they were written to the pool."""
    fetches_total: Mapping[str, int]
    """By result: "ok", or the receipt's reason ("cancelled", "lease_expired", ...)."""

    def since(self, before: TransferStats) -> TransferStats:
        """What is open now, and what was counted after `before`; a result that has not come since is absent."""
        gained = {name: count - before.fetches_total.get(name, 0) for name, count in self.fetches_total.items()}
        return replace(
            self,
            expired_leases_total=self.expired_leases_total - before.expired_leases_total,
            bytes_sent_total=self.bytes_sent_total - before.bytes_sent_total,
            bytes_received_total=self.bytes_received_total - before.bytes_received_total,
            fetches_total={name: count for name, count in gained.items() if count},
        )


class CompletionBoard:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active: set[str] = set()
        self._receipts: dict[str, FetchReceipt] = {}
        self._totals: Counter[str] = Counter()
        self._bytes_received_total = 0
        self._news = False

    def begin(self, request_id: str) -> None:
        """Note a fetch; raises ValueError if one for this request has not been taken yet."""
        with self._changed:
            if request_id in self._active or request_id in self._receipts:
                raise ValueError(f"{request_id} already has a fetch")
            self._active.add(request_id)

    def finish(self, request_id: str, receipt: FetchReceipt) -> None:
        """Record the one completion of a fetch; a second one is ignored."""
        with self._changed:
            if request_id not in self._active:
                return
            self._active.discard(request_id)
            self._receipts[request_id] = receipt
            self._totals[receipt.reason or receipt.outcome] += 1
            self._bytes_received_total += receipt.num_bytes
        self.wake()

    def finish_all(self, receipt: FetchReceipt) -> None:
        """End every fetch that has not ended."""
        with self._changed:
            active = tuple(self._active)
        for request_id in active:
            self.finish(request_id, receipt)

    def wake(self) -> None:
        """There is something to poll for."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def clear_news(self) -> None:
        """Called before collecting, so that nothing that arrives meanwhile is slept over."""
        with self._changed:
            self._news = False

    def take(self, sent: set[str]) -> Completed:
        """Everything finished and not yet taken."""
        with self._changed:
            receipts, self._receipts = self._receipts, {}
        failed = {request_id for request_id, receipt in receipts.items() if receipt.outcome != "ok"}
        return Completed(sent=sent, received=set(receipts), failed=failed, receipts=receipts)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to poll for, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, timeout=timeout_s)

    def totals(self) -> tuple[int, int, dict[str, int]]:
        """Active fetches, bytes received, fetches by result."""
        with self._changed:
            return len(self._active), self._bytes_received_total, dict(self._totals)
