"""Which of this engine's blocks are promised to somebody, and until when.

vLLM cannot take back the blocks of a finished prefill by itself: somebody must say "sent". That is this table. The
engine's step loop publishes and collects (`take_finished`); server threads read, renew and release; the service's
thread expires. Pure logic under one lock with an injected clock; it never touches a block.

A hand-off's life: announced (its id travels, nothing is here yet) > open > released or expired. It closes when it is
released or its time is up, but never under a read: then it closes when the last read ends.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from kv_transfer import errors

Clock = Callable[[], float]
Ending = Literal["released", "expired"]

REMEMBERED_ENDINGS: Final = 4096
"""How many closed ids are remembered, to name the reason to a late caller and to honour a release that came first."""


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Counts at one moment; `expired_leases_total` only grows."""

    open_leases: int
    pinned_blocks: int
    expired_leases_total: int


@dataclass(frozen=True, slots=True)
class PublishedBlocks:
    """What a reader may read."""

    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass(slots=True)
class _Lease:
    owner: str
    blocks: PublishedBlocks
    lease_s: float
    expires_at_s: float
    active_reads: int = 0
    released: bool = False


class LeaseTable:
    """All methods are safe from any thread and never block, but for `wait_published`."""

    def __init__(self, clock: Clock = time.monotonic, on_finished: Callable[[], None] = lambda: None) -> None:
        """`on_finished` is called, without the lock, whenever `take_finished` has something new."""
        self._clock = clock
        self._on_finished = on_finished
        self._changed = threading.Condition()
        self._open: dict[str, _Lease] = {}
        self._endings: OrderedDict[str, Ending] = OrderedDict()
        self._finished_owners: set[str] = set()
        self._expired_total = 0

    def publish(self, handoff_id: str, owner: str, block_ids: Sequence[int], num_tokens: int, lease_s: float) -> None:
        """Open a lease. If its release came first, the owner is finished at once. An id is published only once."""
        if lease_s <= 0:
            raise ValueError(f"lease_s must be positive, not {lease_s}")
        with self._changed:
            if handoff_id in self._open or self._endings.get(handoff_id) == "expired":
                raise ValueError(f"hand-off {handoff_id} of {owner} is already published")
            if any(lease.owner == owner for lease in self._open.values()):
                raise ValueError(
                    f"{owner} already has an open hand-off: its blocks would be freed under the other's lease"
                )
            blocks = PublishedBlocks(tuple(block_ids), num_tokens)
            lease = _Lease(owner, blocks, lease_s, self._clock() + lease_s)
            self._open[handoff_id] = lease
            if handoff_id in self._endings:
                self._close(handoff_id, "released")
            self._changed.notify_all()
        self._tell_if_finished()

    def renew(self, handoff_id: str) -> bool:
        """Extend to a full lease from now, never shorten. False if it is not open."""
        with self._changed:
            lease = self._live(handoff_id)
            if lease is not None and not lease.released:
                lease.expires_at_s = max(lease.expires_at_s, self._clock() + lease.lease_s)
        self._tell_if_finished()
        return lease is not None and not lease.released

    def release(self, handoff_id: str) -> bool:
        """Close now, or when the last read ends. True the first time; an id not yet published is remembered."""
        with self._changed:
            lease = self._open.get(handoff_id)
            if lease is None:
                first = handoff_id not in self._endings
                if first:
                    self._remember(handoff_id, "released")
                return first
            first = not lease.released
            lease.released = True
            if lease.active_reads == 0:
                self._close(handoff_id, "released")
        self._tell_if_finished()
        return first

    def begin_read(self, handoff_id: str) -> PublishedBlocks:
        """Pin against expiry and release until `end_read`; raises LeaseExpired or UnknownHandoff."""
        with self._changed:
            lease = self._live(handoff_id)
            if lease is not None and not lease.released:
                lease.active_reads += 1
                return lease.blocks
        self._tell_if_finished()
        raise self.refusal(handoff_id)

    def end_read(self, handoff_id: str) -> None:
        """Undo one `begin_read`."""
        with self._changed:
            lease = self._open[handoff_id]
            lease.active_reads -= 1
            assert lease.active_reads >= 0, "end_read without begin_read"
            if lease.active_reads == 0 and lease.released:
                self._close(handoff_id, "released")
        self._tell_if_finished()

    @contextmanager
    def reading(self, handoff_id: str) -> Iterator[PublishedBlocks]:
        """`begin_read` and `end_read` around a block of code."""
        blocks = self.begin_read(handoff_id)
        try:
            yield blocks
        finally:
            self.end_read(handoff_id)

    def expire(self, now_s: float | None = None) -> int:
        """Close every lease whose time is up and which nobody reads; returns how many."""
        with self._changed:
            moment_s = self._clock() if now_s is None else now_s
            due = [
                handoff_id
                for handoff_id, lease in self._open.items()
                if lease.active_reads == 0 and lease.expires_at_s <= moment_s
            ]
            for handoff_id in due:
                self._close(handoff_id, "expired")
        self._tell_if_finished()
        return len(due)

    def take_finished(self) -> set[str]:
        """Owners whose blocks may be freed now; each is returned exactly once per publication."""
        with self._changed:
            finished, self._finished_owners = self._finished_owners, set()
            return finished

    def wait_published(self, handoff_id: str, timeout_s: float) -> bool:
        """Wait for an announced hand-off. False if it is still unknown; a closed one counts as known."""
        with self._changed:
            return self._changed.wait_for(
                lambda: handoff_id in self._open or handoff_id in self._endings, timeout=timeout_s
            )

    def stats(self) -> LeaseStats:
        """Counts at this moment."""
        with self._changed:
            pinned = sum(len(lease.blocks.block_ids) for lease in self._open.values())
            return LeaseStats(len(self._open), pinned, self._expired_total)

    def refusal(self, handoff_id: str) -> errors.HandoffError:
        """The error for a hand-off that is not open."""
        if self._endings.get(handoff_id) == "expired":
            return errors.LeaseExpired(errors.LEASE_EXPIRED, f"the lease of hand-off {handoff_id} ran out")
        return errors.UnknownHandoff(errors.UNKNOWN_HANDOFF, f"no hand-off {handoff_id} is open here")

    def _live(self, handoff_id: str) -> _Lease | None:
        """The open lease, after closing it if its time is up."""
        lease = self._open.get(handoff_id)
        if lease is not None and lease.active_reads == 0 and lease.expires_at_s <= self._clock():
            self._close(handoff_id, "expired")
            return None
        return lease

    def _close(self, handoff_id: str, ending: Ending) -> None:
        self._finished_owners.add(self._open.pop(handoff_id).owner)
        self._expired_total += ending == "expired"
        self._remember(handoff_id, ending)
        self._changed.notify_all()

    def _remember(self, handoff_id: str, ending: Ending) -> None:
        self._endings[handoff_id] = ending
        self._endings.move_to_end(handoff_id)
        while len(self._endings) > REMEMBERED_ENDINGS:
            self._endings.popitem(last=False)

    def _tell_if_finished(self) -> None:
        if self._finished_owners:
            self._on_finished()
