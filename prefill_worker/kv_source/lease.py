"""Which of this engine's blocks are leased to readers, and until when.

vLLM cannot reclaim the blocks of a finished prefill by itself: somebody must tell it "sent". This table does. The
engine's step loop extends, publishes, revokes and collects (`take_finished`); server threads read, renew and release;
the service's thread expires. It is pure logic under one lock with an injected clock and never touches a block.

A hand-off's life: announced (its id is out, nothing is here yet) > partial (prefill still computes; the blocks so
far are final, and during its last step the others become final layer by layer) > complete > released or expired. A
partial one has no owner waiting to free blocks, and no time limit, because its request still runs. It ends early if
revoked, which fails its readers. A complete one closes when every reader has released it or its time is up, but never
during a read: then it closes when the last read ends.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import shown_id

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Ending = Literal["released", "expired", "revoked"]

REMEMBERED_ENDINGS: Final = 4096
"""Closed ids that are remembered, to give a late caller the reason and to honour a release that came first."""
STALE_AFTER_S: Final = 2.0
"""A complete hand-off that is not released for this long is reported as stale."""
MOST_STALE: Final = 4
"""Largest number of stale hand-offs reported, the oldest first."""


@dataclass(frozen=True, slots=True)
class LeaseStats:
    """Counts at one moment; `expired_leases_total` only grows."""

    open_leases: int
    pinned_blocks: int
    expired_leases_total: int


@dataclass(frozen=True, slots=True)
class PublishedBlocks:
    """The blocks that a reader may read. If it is not `complete`, more may follow."""

    block_ids: tuple[int, ...]
    num_tokens: int
    complete: bool = True
    first_token: int | None = None
    """The token that prefill sampled; known only when complete, if at all."""


@dataclass(slots=True)
class Lease:
    """One hand-off's blocks and who reads them; only its table changes it."""

    owner: str
    blocks: PublishedBlocks
    lease_s: float
    expires_at_s: float
    active_reads: int = 0
    readers_done: set[int] = field(default_factory=set)
    released: bool = False
    revoked: bool = False
    all_block_ids: tuple[int, ...] = ()
    """All blocks of the prompt, including those that the owner's last step computes; empty before that step."""
    final_layers: int = 0
    """How many layers of `all_block_ids` that step has computed."""
    complete_since_s: float = math.inf


REMEMBERED_LIVES: Final = 512
LONGEST_LIFE_EVENTS: Final = 24
"""Events kept for one hand-off; later ones replace the last entry."""


class HandoffJournal:
    """The history of recent hand-offs, so that a report about one that was never released shows how it got there.

    Such a hand-off costs its blocks for a lease and shows nowhere else. Each event is one entry in a short list, and
    the lists of the newest hand-offs are kept. Stale ones are reported in a worker's status, those that expire are
    logged. It has no lock: `LeaseTable` calls it under its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, list[tuple[float, str]]] = OrderedDict()

    def note(self, handoff_id: str, event: str) -> None:
        """Record an event of this hand-off, with the time."""
        log.debug("hand-off: %s", event, extra={"handoff": shown_id(handoff_id)})
        life = self._lives.setdefault(handoff_id, [])
        if len(life) >= LONGEST_LIFE_EVENTS:
            life.pop()
        life.append((self._clock(), event))
        if len(self._lives) > REMEMBERED_LIVES:
            self._lives.popitem(last=False)

    def life(self, handoff_id: str) -> str:
        """Describe the hand-off's events in one sentence, each with its seconds since the first."""
        events = self._lives.get(handoff_id, [])
        began_s = events[0][0] if events else self._clock()
        entries = [f"{event} at {at_s - began_s:.3f} s" for at_s, event in events]
        return f"hand-off {shown_id(handoff_id)}: {', '.join([*entries, f'now {self._clock() - began_s:.3f} s'])}"


class LeaseTable:
    """The leases. All methods are thread-safe; only `wait_published`, `wait_blocks` and `wait_layer` block."""

    def __init__(self, clock: Clock = time.monotonic, on_finished: Callable[[], None] = lambda: None) -> None:
        """`on_finished` is called, outside the lock, whenever `take_finished` has something new."""
        self._clock = clock
        self._journal = HandoffJournal(clock)
        self._on_finished = on_finished
        self._changed = threading.Condition()
        self._open: dict[str, Lease] = {}
        self._endings: OrderedDict[str, Ending] = OrderedDict()
        self._finished_owners: set[str] = set()
        self._in_last_step: list[Lease] = []
        self._expired_total = 0

    # --- the engine's side

    def extend(self, handoff_id: str, owner: str, block_ids: Sequence[int]) -> None:
        """Offer blocks, in token order from the first, that are final while the owner computes the next ones.

        There may be none yet: the hand-off can be read from now on, and its reader waits.
        Does nothing if the hand-off was released in the meantime, because nobody reads it.
        """
        with self._changed:
            if handoff_id in self._endings:
                return
            lease = self._open.get(handoff_id)
            if lease is None:
                lease = self._open[handoff_id] = Lease(owner, PublishedBlocks((), 0, complete=False), 0.0, math.inf)
                self._journal.note(handoff_id, "partial")
            lease.blocks = PublishedBlocks(_extended(lease.blocks, block_ids, handoff_id), 0, complete=False)
            self._changed.notify_all()

    def begin_last_step(self, handoff_ids: Mapping[str, Sequence[int]]) -> None:
        """Announce that the step that begins now makes all blocks of these hand-offs final, layer by layer.

        Hand-offs that are not partial are skipped: nobody fetches them yet.
        """
        with self._changed:
            self._in_last_step = []
            for handoff_id, block_ids in handoff_ids.items():
                lease = self._open.get(handoff_id)
                if lease is not None and not lease.blocks.complete:
                    lease.all_block_ids, lease.final_layers = _extended(lease.blocks, block_ids, handoff_id), 0
                    self._in_last_step.append(lease)
            if self._in_last_step:
                self._changed.notify_all()

    def end_layer(self, final_layers: int) -> None:
        """Record that the running step has computed this many layers. Costs nothing if it is nobody's last step."""
        if not self._in_last_step:
            return
        with self._changed:
            for lease in self._in_last_step:
                lease.final_layers = final_layers
            self._changed.notify_all()

    def publish(
        self,
        handoff_id: str,
        owner: str,
        block_ids: Sequence[int],
        num_tokens: int,
        lease_s: float,
        first_token: int | None = None,
    ) -> None:
        """Open a lease, or complete a partial one. Its time starts now, and its owner waits to free the blocks.

        If the release came first, the owner is finished at once. Raises ValueError if the id was published before.
        """
        if lease_s <= 0:
            raise ValueError(f"lease_s must be positive, not {lease_s}")
        with self._changed:
            partial = self._open.get(handoff_id)
            if (partial is not None and partial.blocks.complete) or self._endings.get(handoff_id) == "expired":
                raise ValueError(f"hand-off {shown_id(handoff_id)} of {owner} is already published")
            if any(lease.owner == owner and lease is not partial for lease in self._open.values()):
                raise ValueError(
                    f"{owner} already has an open hand-off: its blocks would be freed under the other's lease"
                )
            lease = partial or Lease(owner, PublishedBlocks((), 0, complete=False), lease_s, 0.0)
            lease.blocks = PublishedBlocks(
                _extended(lease.blocks, block_ids, handoff_id), num_tokens, complete=True, first_token=first_token
            )
            lease.lease_s = lease_s
            lease.complete_since_s = self._clock()
            lease.expires_at_s = lease.complete_since_s + lease_s
            self._open[handoff_id] = lease
            self._journal.note(handoff_id, f"published with {len(lease.blocks.block_ids)} blocks for {owner}")
            if self._endings.pop(handoff_id, None) == "released":
                self._close(handoff_id, "released")
            self._changed.notify_all()
        self._tell_if_finished()

    def revoke(self, handoff_id: str) -> None:
        """Fail every reader of a partial hand-off whose owner lost its blocks or will not complete it.

        Call it before another request writes to the blocks. A complete hand-off is left alone. One that was revoked
        may still be published, whole, when its owner has computed it again.
        """
        with self._changed:
            lease = self._open.get(handoff_id)
            if lease is not None and not lease.blocks.complete:
                lease.revoked = True
                self._close(handoff_id, "released" if lease.released else "revoked")

    def take_finished(self) -> set[str]:
        """Return the owners whose blocks may be freed now; each is returned exactly once per publication."""
        with self._changed:
            finished, self._finished_owners = self._finished_owners, set()
            return finished

    # --- the readers' side

    def renew(self, handoff_id: str) -> bool:
        """Extend to a full lease from now; never shorten. Returns False if the lease is not open."""
        with self._changed:
            lease = self._live(handoff_id)
            if lease is not None and not lease.released:
                lease.expires_at_s = max(lease.expires_at_s, self._clock() + lease.lease_s)
                self._journal.note(handoff_id, "renewed")
        self._tell_if_finished()
        return lease is not None and not lease.released

    def release(self, handoff_id: str, reader: int = 0, readers: int = 1, by: str = "a peer") -> bool:
        """Close the lease when all of `readers` have released: now, or when the last read ends.

        Returns True the first time this closes it. The release of an id that is not published yet, or was revoked
        and may be published again, is remembered. `by` is for the journal.
        """
        with self._changed:
            self._journal.note(handoff_id, f"released by {by}")
            lease = self._open.get(handoff_id)
            if lease is None:
                first = self._endings.get(handoff_id, "revoked") == "revoked"
                if first:
                    self._remember(handoff_id, "released")
                return first
            lease.readers_done.add(reader)
            if len(lease.readers_done) < readers:
                return False
            first = not lease.released
            lease.released = True
            if lease.active_reads == 0:
                self._close(handoff_id, "released")
        self._tell_if_finished()
        return first

    @contextmanager
    def reading(self, handoff_id: str, *, again: bool = False) -> Iterator[Lease]:
        """Pin against expiry and release while the block runs. Raises LeaseExpired, UnknownHandoff or TransferFailed.

        This also renews the lease, so that a reader whose connection breaks unnoticed still has that long. Read `again`
        is what a read holds open already, even if it was released since.
        """
        lease = self._begin_read(handoff_id, again)
        try:
            yield lease
        finally:
            self._end_read(handoff_id, lease)

    def wait_published(self, handoff_id: str, timeout_s: float) -> bool:
        """Wait for an announced hand-off; False if it is still unknown. A partial or closed one counts as known."""
        with self._changed:
            return self._changed.wait_for(
                lambda: handoff_id in self._open or handoff_id in self._endings, timeout=timeout_s
            )

    def wait_blocks(
        self, lease: Lease, more_than: int, timeout_s: float, in_last_step: int | None = None
    ) -> PublishedBlocks:
        """Wait until there are more than this many blocks, or all of them; at most `timeout_s`.

        If `in_last_step` is given, it is also enough that the prompt's last step runs, with that many blocks in all.
        Raises TransferFailed(`revoked`) if the prefill took the blocks back: what was read of them is void.
        """

        def enough() -> bool:
            in_step = in_last_step is not None and len(lease.all_block_ids) >= in_last_step
            return in_step or len(lease.blocks.block_ids) > more_than or lease.blocks.complete

        with self._changed:
            self._changed.wait_for(lambda: enough() or lease.revoked, timeout=timeout_s)
            _require_not_revoked(lease)
            return lease.blocks

    def wait_layer(self, lease: Lease, layer: int, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for this layer of `all_block_ids`; True if final. Raises like `wait_blocks`."""

        def final() -> bool:
            return lease.final_layers > layer or lease.blocks.complete

        with self._changed:
            self._changed.wait_for(lambda: final() or lease.revoked, timeout=timeout_s)
            _require_not_revoked(lease)
            return final()

    # --- time, counts, reasons

    def expire(self, now_s: float | None = None) -> int:
        """Close every lease whose time is up and that nobody reads; return how many."""
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

    def stats(self) -> LeaseStats:
        """Return the counts at this moment."""
        with self._changed:
            pinned = sum(len(lease.blocks.block_ids) for lease in self._open.values())
            return LeaseStats(len(self._open), pinned, self._expired_total)

    def stale_handoffs(self) -> list[str]:
        """Describe complete hand-offs that have waited long for a release: at most a few, the oldest first."""
        with self._changed:
            if not self._open:
                return []
            moment_s = self._clock() - STALE_AFTER_S
            old = [
                (lease.complete_since_s, handoff_id)
                for handoff_id, lease in self._open.items()
                if lease.complete_since_s <= moment_s
            ]
            return [self._journal.life(handoff_id) for _, handoff_id in sorted(old)[:MOST_STALE]]

    def refusal(self, handoff_id: str) -> errors.HandoffError:
        """Return the error for a hand-off that is not open."""
        name = shown_id(handoff_id)
        ending = self._endings.get(handoff_id)
        if ending == "expired":
            return errors.LeaseExpired(errors.LEASE_EXPIRED, f"the lease of hand-off {name} ran out")
        if ending == "revoked":
            return errors.TransferFailed(errors.REVOKED, f"the prefill of hand-off {name} was given up")
        return errors.UnknownHandoff(errors.UNKNOWN_HANDOFF, f"no hand-off {name} is open here")

    def _begin_read(self, handoff_id: str, again: bool) -> Lease:
        with self._changed:
            lease = self._live(handoff_id)
            if lease is not None and (lease.active_reads if again else not lease.released):
                lease.active_reads += 1
                self._journal.note(handoff_id, "read")
                lease.expires_at_s = max(lease.expires_at_s, self._clock() + lease.lease_s)
                return lease
        self._tell_if_finished()
        raise self.refusal(handoff_id)

    def _end_read(self, handoff_id: str, lease: Lease) -> None:
        with self._changed:
            lease.active_reads -= 1
            self._journal.note(handoff_id, "read ended")
            if lease.active_reads == 0 and lease.released and self._open.get(handoff_id) is lease:
                self._close(handoff_id, "released")
        self._tell_if_finished()

    def _live(self, handoff_id: str) -> Lease | None:
        """Return the open lease, after closing it if its time is up."""
        lease = self._open.get(handoff_id)
        if lease is not None and lease.active_reads == 0 and lease.expires_at_s <= self._clock():
            self._close(handoff_id, "expired")
            return None
        return lease

    def _close(self, handoff_id: str, ending: Ending) -> None:
        lease = self._open.pop(handoff_id)
        if lease.blocks.complete:
            self._finished_owners.add(lease.owner)
        if ending == "expired":
            self._expired_total += 1
            log.warning("nobody released a hand-off before its lease ended: %s", self._journal.life(handoff_id))
        elif ending == "revoked":
            self._journal.note(handoff_id, "revoked")
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


def _require_not_revoked(lease: Lease) -> None:
    if lease.revoked:
        raise errors.TransferFailed(errors.REVOKED, "the prefill that computed these blocks was given up")


def _extended(before: PublishedBlocks, block_ids: Sequence[int], handoff_id: str) -> tuple[int, ...]:
    now = tuple(block_ids)
    if now[: len(before.block_ids)] != before.block_ids:
        raise ValueError(f"hand-off {shown_id(handoff_id)} changed blocks that were final")
    return now
