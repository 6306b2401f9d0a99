"""Fetches hand-offs: pairs with each source once, picks its transport, and pulls each rank's part.

`TransferService` runs it on its own event loop, beside the engine's step loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Final

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, KvLayout, TransferResult, explain_mismatch, shown_id
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import (
    FetchProgress,
    FetchRequest,
    Pull,
    Puller,
    SourceDescription,
    Targets,
    are_runs,
)
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.names import AUTO, LONGEST_FETCH_DEADLINE_S
from ridgeline.kv_transfer.options import TransferOptions

log = logging.getLogger(__name__)

FOLLOW_LIMIT_S: Final = LONGEST_FETCH_DEADLINE_S
"""Longest duration of a fetch that overlaps its prefill. A dead source is noticed much sooner, by its connection."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """Bytes [source_start, source_start + num_bytes) of each block of `source_rank` go to `target_start` of ours.

    Heads come first in a block, so the heads of a rank are one run of bytes, and splitting or joining is slicing. If
    this side has two ranks with three heads each and the other side one rank with six, our second rank reads the second
    half of each of its blocks. The other way round, our only rank reads two whole blocks and lays them side by side.
    """

    source_rank: int
    source_start: int
    target_start: int
    num_bytes: int


def parts_for_rank(rank: int, our_ranks: int, their_ranks: int, our_block_bytes: int) -> list[RankPart]:
    """Return what rank `rank` of `our_ranks` reads from `their_ranks`, in the order it lies in our block.

    Raises ValueError if neither number of ranks divides the other.
    """
    if their_ranks >= our_ranks:
        ratio, rest = divmod(their_ranks, our_ranks)
        if rest or our_block_bytes % ratio:
            raise ValueError(f"the KV heads of {their_ranks} ranks cannot be joined on {our_ranks}")
        share = our_block_bytes // ratio
        return [RankPart(rank * ratio + i, 0, i * share, share) for i in range(ratio)]
    ratio, rest = divmod(our_ranks, their_ranks)
    if rest:
        raise ValueError(f"the KV heads of {their_ranks} ranks cannot be split over {our_ranks}")
    return [RankPart(rank // ratio, (rank % ratio) * our_block_bytes, 0, our_block_bytes)]


def readers_per_source(our_ranks: int, their_ranks: int) -> int:
    """Return how many of our ranks read from one of theirs, and so must release before its blocks are free."""
    return max(1, our_ranks // their_ranks)


@dataclass(frozen=True, slots=True)
class Pairing:
    """The agreement with one source: its description and the transport for it."""

    source: SourceDescription
    puller: Puller
    why: str
    """Why no better transport was picked, for log lines; empty if nothing stood in the way."""


class KvFetcher:
    """Fetches hand-offs for one rank. Its methods run on one event loop; fetches may run concurrently."""

    def __init__(
        self,
        layout: KvLayout,
        control: GrpcControl,
        pullers: Sequence[Puller],
        options: TransferOptions,
        rank: int = 0,
    ) -> None:
        """Each source gets the first of `options.transport`, or of `AUTO`, whose puller reaches it."""
        self._layout = layout
        self._control = control
        self._pullers = {puller.name: puller for puller in pullers}
        self._allowed: tuple[str, ...] = AUTO if options.transport == "auto" else (options.transport,)
        self._options = options
        self._rank = rank
        self._pairings: dict[str, Pairing] = {}

    async def pair(self, address: str, transport: str | None = None) -> Pairing:
        """Pair with a source once. Raises LayoutMismatch, or TransferFailed if no allowed transport reaches it.

        With a `transport`, pair again and allow that one only.
        """
        pairing = self._pairings.get(address)
        if pairing is None or transport is not None:
            allowed = self._allowed if transport is None else (transport,)
            pairing = self._agree(address, await self._control.describe(address), allowed)
            self._pairings[address] = pairing
        return pairing

    def forget_all_but(self, addresses: Collection[str]) -> None:
        """Drop the state of all other sources, paired or not: their mappings hold memory, their channels reconnect.

        Running fetches keep what they use.
        """
        for address in (set(self._pairings) | self._control.known()) - set(addresses):
            self._forget(address)
            self._control.forget(address)

    def _forget(self, address: str) -> None:
        pairing = self._pairings.pop(address, None)
        if pairing is not None:
            pairing.puller.forget(pairing.source)

    def _agree(self, address: str, source: SourceDescription, allowed: Sequence[str]) -> Pairing:
        mismatch = explain_mismatch(self._layout, source.layout)
        if mismatch is not None:
            raise errors.LayoutMismatch(errors.LAYOUT_MISMATCH, mismatch)
        reasons: list[str] = []
        for puller in filter(None, map(self._pullers.get, allowed)):
            reason = puller.unsupported_reason(source)
            if reason is None:
                return Pairing(source, puller, "; ".join(reasons))
            reasons.append(f"not {puller.name}: {reason}")
        raise errors.TransferFailed(
            errors.UNREACHABLE,
            f"none of {sorted(allowed)} reaches {address}: {'; '.join(reasons) or 'there is no such transport'}",
        )

    async def fetch(self, handoff: KvHandoff, targets: Targets, pool: BlockPool) -> TransferResult:
        """Pull these runs of positions of the hand-off into the targets.

        Every failure becomes a result. Cancelling the task stops the transfer and raises CancelledError. In either
        case nothing writes to `pool` after the end; on failure the targets hold garbage.
        """
        progress = FetchProgress(started_s=time.monotonic())
        try:
            check_fetch(handoff, targets, pool)
            if any(targets.values()):
                try:
                    async with asyncio.TaskGroup() as group:
                        for part in self._parts(handoff):
                            pulling = self._pull_part(handoff, part, targets, pool, progress)
                            group.create_task(pulling)
                except* errors.HandoffError as failures:
                    raise _first(failures) from None
        except errors.HandoffError as error:
            return progress.result(error)
        return progress.result(None)

    def _parts(self, handoff: KvHandoff) -> list[RankPart]:
        try:
            return parts_for_rank(
                self._rank, self._layout.tensor_parallel_size, len(handoff.addresses), self._layout.block_bytes
            )
        except ValueError as error:
            raise errors.LayoutMismatch(errors.LAYOUT_MISMATCH, str(error)) from error

    async def _pull_part(
        self,
        handoff: KvHandoff,
        part: RankPart,
        targets: Targets,
        pool: BlockPool,
        progress: FetchProgress,
    ) -> None:
        address = handoff.addresses[part.source_rank]
        allowed_s = self._options.kv_fetch_timeout_s if handoff.complete else FOLLOW_LIMIT_S
        allowed_s = min(allowed_s, handoff.fetch_within_s or allowed_s)
        for attempt in (1, 2):
            pairing = await self.pair(address)
            progress.transport = pairing.puller.name
            pull = Pull(
                address=address,
                source=pairing.source,
                request=FetchRequest(
                    handoff_id=handoff.handoff_id,
                    runs=tuple((first, len(blocks)) for first, blocks in targets.items()),
                    layout=self._layout,
                    part_start=part.source_start,
                    part_bytes=part.num_bytes,
                ),
                target_block_ids=[block for blocks in targets.values() for block in blocks],
                pool=pool.part(part.target_start, part.num_bytes),
                progress=progress,
                lease_s=handoff.lease_s,
                overlaps=not handoff.complete,
                give_up_at_s=progress.started_s + allowed_s,
            )
            try:
                await pairing.puller.pull(pull)
                return
            except errors.TransferFailed as error:
                if error.reason in (errors.UNREACHABLE, errors.STALE_PAIRING):
                    self._forget(address)
                if error.reason != errors.STALE_PAIRING or attempt == 2:
                    raise

    async def renew(self, handoff: KvHandoff) -> None:
        """Extend the lease on every source rank that this rank reads; raises like `GrpcControl.renew`."""
        for address in self._our_sources(handoff):
            await self._control.renew(address, handoff.handoff_id)

    async def release(self, handoff: KvHandoff) -> None:
        """Tell the sources that this rank no longer needs the blocks; raises like `GrpcControl.release`."""
        readers = readers_per_source(self._layout.tensor_parallel_size, len(handoff.addresses))
        for address in self._our_sources(handoff):
            await self._control.release(address, handoff.handoff_id, self._rank % readers, readers)

    async def close(self) -> None:
        """Close all connections. Calling it again does nothing."""
        for puller in self._pullers.values():
            await puller.close()
        await self._control.close()

    def _our_sources(self, handoff: KvHandoff) -> list[str]:
        return [handoff.addresses[part.source_rank] for part in self._parts(handoff)]


def check_fetch(handoff: KvHandoff, targets: Targets, pool: BlockPool) -> None:
    """Check a fetch before anything is sent; raises TransferFailed(`bad_request`) if it cannot be right."""
    runs = [(first, len(blocks)) for first, blocks in targets.items()]
    if not are_runs(runs, handoff.num_blocks):
        raise errors.TransferFailed(
            errors.BAD_REQUEST, f"the runs {runs} (first block, number) of a hand-off of {handoff.num_blocks} blocks"
        )
    target_block_ids = [block for blocks in targets.values() for block in blocks]
    if len(set(target_block_ids)) != len(target_block_ids):
        raise errors.TransferFailed(errors.BAD_REQUEST, "the target blocks are not distinct")
    try:
        pool.check_block_ids(target_block_ids)
    except ValueError as error:
        raise errors.TransferFailed(errors.BAD_REQUEST, str(error)) from error


def _first(failures: BaseExceptionGroup[errors.HandoffError]) -> errors.HandoffError:
    """Return the failure to report, the first: failures of several ranks mostly have one cause."""
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, errors.HandoffError)
    return error


BEATS_PER_LEASE: Final = 6
"""Renewals per lease time, so that five in a row may be lost before the lease runs out."""
SHORTEST_BEAT_S: Final = 0.02


class Heartbeats:
    """One task for each watched hand-off; it ends by itself when the lease is lost. It runs on the fetcher's loop."""

    def __init__(self, fetcher: KvFetcher) -> None:
        self._fetcher = fetcher
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def count(self, besides: Set[str]) -> int:
        """How many are watched besides these; may be called in another thread."""
        return len(frozenset(self._tasks) - besides)

    def watch(self, handoff: KvHandoff) -> None:
        """Start renewing; does nothing if the hand-off is watched already."""
        if handoff.handoff_id in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._beat(handoff))
        self._tasks[handoff.handoff_id] = task
        task.add_done_callback(lambda _: self._forget(handoff.handoff_id, task))

    def stop(self, handoff: KvHandoff) -> None:
        """Stop renewing; the lease then runs until its end."""
        task = self._tasks.pop(handoff.handoff_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop renewing all leases."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, handoff_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(handoff_id) is task:
            del self._tasks[handoff_id]

    async def _beat(self, handoff: KvHandoff) -> None:
        """Renew until refused, or until a whole lease time has passed without success.

        An unpublished or unreachable source may still come.
        """
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + handoff.lease_s
        while True:
            await asyncio.sleep(max(SHORTEST_BEAT_S, handoff.lease_s / BEATS_PER_LEASE))
            try:
                await self._fetcher.renew(handoff)
                give_up_at_s = loop.time() + handoff.lease_s
            except errors.HandoffError as error:
                if error.reason == errors.LEASE_EXPIRED or loop.time() >= give_up_at_s:
                    log.warning(
                        "stopped renewing hand-off %s of %s: %s", shown_id(handoff.handoff_id), handoff.addresses, error
                    )
                    return
