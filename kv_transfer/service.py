"""The hand-off machinery of one engine, as its worker-side connector uses it.

No method blocks, except `start`, `wait` and `close`, and errors of transfers become results rather than exceptions.
There is one instance per engine process. The engine's step loop calls the public methods; one background thread runs an
event loop with the fetches, heartbeats and releases; the transport adds threads of its own for serving. Every fetch
that is started ends in exactly one completion in any case, because an engine that is never told would leak its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, KvLayout, TransferResult
from ridgeline.decode_worker.kv_fetch.fetcher import Heartbeats
from ridgeline.decode_worker.kv_fetch.results import Completed, CompletionBoard, TransferStats
from ridgeline.kv_transfer.control import release_with_retries
from ridgeline.kv_transfer.interfaces import Targets
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.memory.device import OnLost, pool_of
from ridgeline.kv_transfer.memory.shared import SharedOffer
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import exports, make_transport
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from ridgeline.prefill_worker.kv_source.lease import LeaseTable

log = logging.getLogger(__name__)

EXPIRY_CHECK_S: Final = 1.0
"""Interval at which the service's thread looks for expired leases; `poll` finds them sooner."""
CLOSE_S: Final = 10.0
LAST_RELEASES_S: Final = 1.0
"""Time for releases in progress when the service closes; other hand-offs are freed when their leases end."""
CANCELLED_RESULT: Final = TransferResult(outcome="cancelled", reason=errors.CANCELLED)


@dataclass(frozen=True, slots=True)
class PairedTransport:
    """The transport for one source, and why no better one was picked."""

    transport: str
    why: str


@dataclass(frozen=True, slots=True)
class RankLayers:
    """The KV cache of one tensor-parallel rank, as the engine has allocated it."""

    layers: Mapping[str, torch.Tensor]
    """In forward order, the same on every engine: peers know a layer by its position."""
    layout: KvLayout
    shared: SharedOffer | None = None
    """Where peers on this host can map these layers, if they can."""
    rank: int = 0
    on_lost: OnLost = lambda _error: None
    """Called, in any thread, with an error after which the GPU does nothing more for this process."""


class TransferService:
    """Owns the source, the fetcher, the lease table and the thread that runs them."""

    def __init__(self, cache: RankLayers, options: TransferOptions, on_news: Callable[[], None] = lambda: None) -> None:
        """`on_news` is called, in any thread, whenever `poll` has something.

        Raises ValueError if the layout does not match the layers.
        """
        layers, layout = list(cache.layers.values()), cache.layout
        self._pool = pool_of(layers, cache.on_lost)
        check_layout(self._pool, layout)
        self._lease_s = options.lease_s
        self._board = CompletionBoard(on_news)
        self.leases = LeaseTable(on_finished=self._board.wake)
        """Our hand-offs: the step loop extends and revokes them here; `publish` is the service's."""
        offers, self._export = exports(layers, cache.shared, options.transport)
        rank_cache = RankCache(self._pool, self.leases, layout, cache.rank, offers)
        self._source, self._fetcher = make_transport(rank_cache, options)
        self._heartbeats = Heartbeats(self._fetcher)
        self._dropped: set[str] = set()
        """Hand-offs whose heartbeats the loop is about to stop: an engine reads `stats` in the same step."""
        self._fetches: dict[str, asyncio.Task[TransferResult]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="kv-transfer", daemon=True)
        self._closed = False

    @property
    def address(self) -> str:
        """The host:port that peers fetch from; valid after `start`."""
        return self._source.address

    def start(self) -> None:
        """Bind and start; return once peers can connect. Raises OSError if the port is taken."""
        self._pool.commit()
        self._source.start()
        self._thread.start()

    def pair(self, addresses: Sequence[str], transport: str | None = None) -> Future[dict[str, PairedTransport | str]]:
        """Start pairing with these sources, on this `transport` if given, and forget all others.

        The result has for each address the transport that was picked, or a sentence that says why KV cannot be fetched.
        """
        return asyncio.run_coroutine_threadsafe(self._pair_all(addresses, transport), self._loop)

    def publish(
        self,
        request_id: str,
        handoff_id: str,
        block_ids: Sequence[int],
        num_tokens: int,
        first_token: int | None = None,
        lease_s: float | None = None,
    ) -> None:
        """Offer finished blocks; `poll().sent` names the request when they may be freed."""
        lease_s = self._lease_s if lease_s is None else lease_s
        self.leases.publish(handoff_id, request_id, block_ids, num_tokens, lease_s, first_token)

    def watch(self, handoff: KvHandoff) -> None:
        """Keep a lease alive until its fetch ends or until `release`, for a hand-off whose load has not begun."""
        self._post(lambda: self._heartbeats.watch(handoff))

    def unwatch(self, handoff: KvHandoff) -> None:
        """Stop heartbeats without releasing: the lease runs out unless it is watched or fetched again."""
        self._dropped.add(handoff.handoff_id)
        self._post(lambda: self._stop_heartbeats(handoff))

    def start_fetch(self, request_id: str, handoff: KvHandoff, targets: Targets) -> None:
        """Start pulling blocks of the hand-off into the targets.

        `poll().received` names the request exactly once; until then nothing else may use the target blocks. Heartbeats
        run until the fetch ends. Then the source is told to release, with a few retries, unless the fetch overlapped
        its prefill and failed: such a hand-off may be fetched again when it is complete. Raises ValueError if this
        request already has a fetch whose end was not polled.
        """
        self._board.begin(request_id)
        if not self._post(lambda: self._begin_fetch(request_id, handoff, targets)):
            self._board.finish(request_id, CANCELLED_RESULT)

    def cancel(self, request_id: str) -> None:
        """Stop a fetch, which still ends in its one completion; does nothing if it has ended already."""
        self._post(lambda: self._cancel_fetch(request_id))

    def release(self, handoff: KvHandoff) -> None:
        """Stop heartbeats and tell the source that the blocks are not needed; retried in the background."""
        self._dropped.add(handoff.handoff_id)
        self._post(lambda: self._begin_release(handoff))

    def poll(self) -> Completed:
        """Return what has finished since the last call."""
        self._board.clear_news()
        self.leases.expire()
        return self._board.take(self.leases.take_finished())

    def arrived(self) -> dict[str, TransferResult]:
        """Return only the fetches that have succeeded since the last call or `poll`, which names them no more."""
        return self._board.take_arrived()

    def wait(self, timeout_s: float) -> None:
        """Wait until `poll` has something, at most `timeout_s`; for steps in which the engine has no work."""
        self._board.wait(timeout_s)

    def stats(self) -> TransferStats:
        """Return counts since the start, and what is open now."""
        leases = self.leases.stats()
        active_fetches, bytes_received_total, fetches_total = self._board.totals()
        return TransferStats(
            open_leases=leases.open_leases,
            pinned_blocks=leases.pinned_blocks,
            expired_leases_total=leases.expired_leases_total,
            active_fetches=active_fetches,
            watched_handoffs=self._heartbeats.count(besides=self._dropped),
            bytes_sent_total=self._source.bytes_sent_total,
            bytes_received_total=bytes_received_total,
            fetches_total=fetches_total,
        )

    def close(self) -> None:
        """Cancel every fetch (each is completed), stop serving and end the thread. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread.is_alive():
            try:
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(CLOSE_S)
            except TimeoutError:
                log.error("KV transfers did not stop within %.0f s", CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
        self._source.close()
        self._export = None
        self._board.finish_all(CANCELLED_RESULT)
        if not self._thread.is_alive():
            self._loop.close()

    async def _pair_all(self, addresses: Sequence[str], transport: str | None) -> dict[str, PairedTransport | str]:
        self._fetcher.forget_all_but(addresses)
        answers = await asyncio.gather(*(self._pair_one(address, transport) for address in addresses))
        return dict(zip(addresses, answers, strict=True))

    async def _pair_one(self, address: str, transport: str | None) -> PairedTransport | str:
        try:
            pairing = await self._fetcher.pair(address, transport)
        except errors.HandoffError as error:
            return error.message
        return PairedTransport(pairing.puller.name, pairing.why)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._expiry = self._loop.create_task(self._expire_forever())
        self._loop.run_forever()

    def _post(self, action: Callable[[], object]) -> bool:
        """Run an action on the service's loop, in order; return False once the service is closed."""
        if self._closed:
            return False
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # closed in the meantime
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _begin_fetch(self, request_id: str, handoff: KvHandoff, targets: Targets) -> None:
        self._heartbeats.watch(handoff)
        task = self._loop.create_task(self._fetcher.fetch(handoff, targets, self._pool))
        self._fetches[request_id] = task
        # A callback rather than code after the await, because a task cancelled before its first step never runs.
        task.add_done_callback(lambda ended: self._end_fetch(request_id, handoff, ended))

    def _end_fetch(self, request_id: str, handoff: KvHandoff, ended: asyncio.Task[TransferResult]) -> None:
        del self._fetches[request_id]
        result = _result_of(ended)
        self._board.finish(request_id, result)  # first, because a token waits for it
        if result.outcome == "failed" and not handoff.complete:
            self._stop_heartbeats(handoff)  # the caller may fetch it again when it is complete, or release it
        else:
            self._begin_release(handoff)  # even of an unreachable source, which may be back for a retry

    def _cancel_fetch(self, request_id: str) -> None:
        task = self._fetches.get(request_id)
        if task is not None:
            task.cancel()

    def _begin_release(self, handoff: KvHandoff) -> None:
        self._stop_heartbeats(handoff)
        self._spawn(release_with_retries(self._fetcher.release, handoff))

    def _stop_heartbeats(self, handoff: KvHandoff) -> None:
        self._heartbeats.stop(handoff)
        self._dropped.discard(handoff.handoff_id)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_CHECK_S)
            self.leases.expire()

    async def _shut_down(self) -> None:
        fetches = list(self._fetches.values())
        for task in fetches:
            task.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        await asyncio.sleep(0)  # lets the fetches' callbacks start their releases
        if self._background:
            await asyncio.wait(self._background, timeout=LAST_RELEASES_S)
        for release in self._background:
            release.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        await self._heartbeats.close()
        await self._fetcher.close()


def _result_of(ended: asyncio.Task[TransferResult]) -> TransferResult:
    if ended.cancelled():
        return CANCELLED_RESULT
    error = ended.exception()
    if error is None:
        return ended.result()
    log.error("a KV fetch failed in an unforeseen way", exc_info=error)
    return TransferResult(outcome="failed", reason=errors.INTERNAL, message=repr(error))


def check_layout(pool: BlockPool, layout: KvLayout) -> None:
    """Raise ValueError if the layout does not describe this cache."""
    described = (layout.num_layers, layout.block_bytes)
    found = (pool.num_layers, pool.block_bytes)
    if described != found:
        raise ValueError(f"the layout says (layers, block bytes) {described}, the KV cache has {found}")
