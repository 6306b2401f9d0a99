"""The results that the service's threads pass to the engine's step loop, each exactly once.

`TransferService` is the only user: its event loop records results here, and the step loop takes them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.contracts.handoff import TransferResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Completed:
    """The results since the last poll; every id appears in one poll only."""

    sent: set[str] = field(default_factory=set)
    """Prefill requests whose blocks may be freed."""
    received: set[str] = field(default_factory=set)
    """Decode requests whose target blocks are no longer written to, whether the fetch succeeded or not."""
    failed: set[str] = field(default_factory=set)
    """The subset of `received` whose targets hold garbage."""
    results: dict[str, TransferResult] = field(default_factory=dict)
    """The result of each request in `received`."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counts of leases, fetches and bytes; the `_total` ones only grow."""

    open_leases: int
    pinned_blocks: int
    expired_leases_total: int
    active_fetches: int
    watched_handoffs: int
    bytes_sent_total: int
    """Bytes as they travelled: encoded, if a peer asked for that."""
    bytes_received_total: int
    """Bytes as they were written to the pool."""
    fetches_total: Mapping[str, int]
    """Fetches by result: "ok", or the result's reason ("cancelled", "lease_expired", ...)."""

    def since(self, before: TransferStats) -> TransferStats:
        """Return what is open now and what was counted after `before`; results with no new fetch are left out."""
        gained = {name: count - before.fetches_total.get(name, 0) for name, count in self.fetches_total.items()}
        return replace(
            self,
            expired_leases_total=self.expired_leases_total - before.expired_leases_total,
            bytes_sent_total=self.bytes_sent_total - before.bytes_sent_total,
            bytes_received_total=self.bytes_received_total - before.bytes_received_total,
            fetches_total={name: count for name, count in gained.items() if count},
        )


class CompletionBoard:
    """Results on their way to the step loop. Its methods may be called from any thread."""

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        """`on_news` is called, on any thread, whenever there is something to poll for."""
        self._on_news = on_news
        self._changed = threading.Condition()
        self._active: set[str] = set()
        self._results: dict[str, TransferResult] = {}
        self._totals: Counter[str] = Counter()
        self._bytes_received_total = 0
        self._news = False

    def begin(self, request_id: str) -> None:
        """Register a fetch. Raises ValueError if an earlier one for this request has not been taken yet."""
        with self._changed:
            if request_id in self._active or request_id in self._results:
                raise ValueError(f"{request_id} already has a fetch")
            self._active.add(request_id)

    def finish(self, request_id: str, result: TransferResult) -> None:
        """Record the completion of a fetch; only the first one counts."""
        with self._changed:
            if request_id not in self._active:
                return
            self._active.discard(request_id)
            self._results[request_id] = result
            self._totals[result.reason or result.outcome] += 1
            self._bytes_received_total += result.num_bytes
        how = {"bytes": result.num_bytes, "transport": result.transport}
        log.debug("KV fetch: %s", result.reason or result.outcome, extra={"request": request_id, **how})
        self.wake()

    def finish_all(self, result: TransferResult) -> None:
        """End every fetch that is still active."""
        with self._changed:
            active = tuple(self._active)
        for request_id in active:
            self.finish(request_id, result)

    def wake(self) -> None:
        """Wake `wait`: there is something to poll for."""
        with self._changed:
            self._news = True
            self._changed.notify_all()
        self._on_news()

    def clear_news(self) -> None:
        """Reset the wake-up flag before collecting, so that a result that arrives meanwhile sets it again."""
        with self._changed:
            self._news = False

    def take(self, sent: set[str]) -> Completed:
        """Return everything that has finished and was not taken before."""
        with self._changed:
            results, self._results = self._results, {}
        failed = {request_id for request_id, result in results.items() if result.outcome != "ok"}
        return Completed(sent=sent, received=set(results), failed=failed, results=results)

    def take_arrived(self) -> dict[str, TransferResult]:
        """Return the results of the fetches that succeeded and were not taken before; leave the failed ones."""
        with self._changed:
            arrived = {request_id: result for request_id, result in self._results.items() if result.outcome == "ok"}
            for request_id in arrived:
                del self._results[request_id]
        return arrived

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to poll for, at most `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, timeout=timeout_s)

    def totals(self) -> tuple[int, int, dict[str, int]]:
        """Return (active fetches, bytes received, fetches by result)."""
        with self._changed:
            return len(self._active), self._bytes_received_total, dict(self._totals)
