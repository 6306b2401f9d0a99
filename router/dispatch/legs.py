"""The legs of an attempt: decode is chosen when prefill begins; the first token goes out before the KV moves.

The transfer of a prompt that prefill computes in several steps overlaps with its computation: its decode leg begins
after the first step, with blocks of its own, and fetches what is final while the rest is computed; the first token
reaches it with the last blocks. If that fails, the leg begins again after prefill, as for a short prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager

import msgspec

from contracts.errors import HandoffLost, WorkerDraining, WorkerLost
from contracts.handoff import KvHandoff
from contracts.tasks import TokenDelta
from contracts.vocabulary import Pool
from router.dispatch.request import Attempt
from router.fleet.fleet import Fleet, Worker
from router.fleet.policy import DECODE_SCORER, blocks_needed, pick, prompt_blocks, room_to_overlap
from router.fleet.worker import PromptReservation
from router.flow.prompt_queue import PromptQueue, Turn

ReleaseHandoff = Callable[[KvHandoff, float], None]
"""Tells the prefill worker, in the background and after so many seconds, that nobody will fetch this."""
ABORT_FIRST_S = 0.5
"""How long a release waits behind an abort. A decode leg that is aborted gives its hand-off back by itself; were it
taken away before the abort has come there, the leg would begin to compute the prompt."""


class Legs:
    """Takes attempts through workers; which way one goes is decided by who calls this.

    Cancelling either method aborts what runs on workers. Both raise WorkerLost, WorkerDraining, EngineFailed,
    InvalidTask, TaskRejected, or NoWorker, if the pool that computes the prompt stays without a worker.
    """

    def __init__(
        self,
        fleet: Fleet,
        queues: Mapping[Pool, PromptQueue],
        release_handoff: ReleaseHandoff,
        *,
        overlap: bool,
    ) -> None:
        self._fleet = fleet
        self._queues = queues
        self._release_handoff = release_handoff
        self._overlap = overlap

    async def whole(self, attempt: Attempt, pool: Pool, recompute_reason: str) -> None:
        """Run all of it on one worker of a pool, and tell that worker why prefill did not compute the prompt."""
        async with self._turn(pool, attempt) as turn:
            leg = turn.worker.client.generate(attempt.whole_task(recompute_reason))
            await self._stream(leg, pool, attempt, turn)

    async def split(self, attempt: Attempt) -> None:
        """Compute the prompt on a prefill worker, send its first token on, and the rest from a decode worker."""
        with ExitStack() as counted:
            await self._prefill_then_decode(_Decode(self._fleet, attempt, counted), attempt)

    @asynccontextmanager
    async def _turn(self, pool: Pool, attempt: Attempt) -> AsyncIterator[Turn]:
        """Wait for a worker that computes the prompt, until it is this prompt's turn."""
        timeline = attempt.progress.timeline
        began_s = timeline.clock()
        async with self._queues[pool].turn(attempt.demand, urgent=attempt.urgent) as turn:
            timeline.router_queue_s += timeline.clock() - began_s
            attempt.progress.advance("prefilling")
            yield turn

    async def _prefill_then_decode(self, decode: _Decode, attempt: Attempt) -> None:
        progress, early = attempt.progress, None

        def begin_early(growing: KvHandoff) -> None:
            nonlocal early
            if not self._overlap or not room_to_overlap(decode.worker.load(), growing.num_blocks):
                progress.metrics.overlapped.labels("no_room" if self._overlap else "off").inc()
                return
            early = OverlappedLeg(decode.worker.client.generate(attempt.decode_task(growing)))

        try:
            first = await self._prefill(decode, attempt, begin_early)
            handoff = first.handoff
            if handoff is None:
                progress.send(first, "prefill")  # the whole answer was one token
                return
            progress.advance("handoff")
            wanted = attempt.request.sampling
            progress.metrics.first_token.labels(wanted.first_token, wanted.resample_reason or "").inc()
            fetched, release_after_s = False, 0.0
            try:
                if progress.send(msgspec.structs.replace(first, finished=False, handoff=None), "prefill"):
                    return
                release_after_s = ABORT_FIRST_S
                fetched = await self._hand_over(decode, attempt, handoff, early)
            finally:
                if not fetched:
                    self._release_handoff(handoff, release_after_s)
        finally:
            if early is not None:
                await early.close()

    async def _prefill(self, decode: _Decode, attempt: Attempt, begin_early: Callable[[KvHandoff], None]) -> TokenDelta:
        """Return the leg's last delta; call `begin_early` before, once the hand-off can be fetched while it grows."""
        progress = attempt.progress
        async with self._turn("prefill", attempt) as turn:
            try:
                decode.choose(turn)
            except (WorkerLost, WorkerDraining):
                progress.advance("queued")
                raise
            async with aclosing(turn.worker.client.generate(attempt.prefill_task())) as deltas:
                async for delta in deltas:
                    if delta.handoff is not None and not delta.handoff.complete:
                        begin_early(delta.handoff)
                        continue
                    progress.timeline.prefill_timing = delta.timing
                    turn.prompt_done()
                    return delta
        raise AssertionError("a prefill leg ends with one delta or an error")

    async def _hand_over(
        self, decode: _Decode, attempt: Attempt, handoff: KvHandoff, early: OverlappedLeg | None
    ) -> bool:
        """Stream the leg that overlapped with prefill; if that came to nothing, or there is none, begin one now."""
        progress, task = attempt.progress, attempt.decode_task(handoff)
        if early is not None:
            try:
                progress.timeline.overlapped = True
                fetched = await self._stream(early.deltas(), "decode", attempt, decode.counted)
                progress.metrics.overlapped.labels("ok").inc()
                return fetched
            except HandoffLost as lost:
                progress.timeline.overlapped = False
                progress.metrics.overlapped.labels(lost.reason).inc()
        return await self._stream(decode.worker.client.generate(task), "decode", attempt, decode.counted)

    async def _stream(
        self,
        leg: AsyncGenerator[TokenDelta, None],
        pool: Pool,
        attempt: Attempt,
        counted: Turn | PromptReservation,
    ) -> bool:
        """Stream one decode leg on a worker of `pool`; True once it made a token, that is, has the KV."""
        progress, produced = attempt.progress, False
        async with aclosing(leg) as deltas:
            async for delta in deltas:
                produced = True
                progress.advance("decoding")
                counted.prompt_done()
                progress.timeline.decode_reported(delta.timing)
                if progress.send(delta, pool):
                    break
        return produced


class _Decode:
    """The decode worker of one attempt: chosen when its prompt has its turn, and not before it waited for that; counted
    there from then on."""

    worker: Worker
    counted: PromptReservation

    def __init__(self, fleet: Fleet, attempt: Attempt, counted: ExitStack) -> None:
        self._fleet = fleet
        self._attempt = attempt
        self._stack = counted

    def choose(self, turn: Turn) -> None:
        """Pick one by the blocks that the sequence will need, half of its answer included, and count it there; the
        place in a batch has come with the turn.

        Raises WorkerLost or WorkerDraining: none is left.
        """
        pool = self._fleet.usable("decode")
        if not pool:
            leaves = any(worker.load().draining for worker in self._fleet.pool("decode"))
            gone = WorkerDraining if leaves else WorkerLost
            raise gone("the decode workers were lost while the prompt waited for its turn")
        demand = self._attempt.demand
        self.worker = self._fleet.get(pick(demand, [worker.load() for worker in pool], DECODE_SCORER))
        slot = turn.take_slot()
        self._stack.callback(slot.release)
        slot.on(self.worker)
        block_size_tokens = self.worker.description.block_size_tokens
        reserved = self.worker.reserve(
            promised_blocks=blocks_needed(demand, block_size_tokens),
            held_blocks=prompt_blocks(demand, block_size_tokens),
        )
        self.counted = self._stack.enter_context(reserved)


class OverlappedLeg:
    """A decode leg begun while its prompt is still prefilled: its first delta is awaited in the background."""

    def __init__(self, leg: AsyncGenerator[TokenDelta, None]) -> None:
        self._leg = leg
        self._first = asyncio.ensure_future(anext(leg))

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """Yield all of the leg's deltas; raises HandoffLost before the first one if the overlap came to nothing."""
        yield await asyncio.shield(self._first)
        async for delta in self._leg:
            yield delta

    async def close(self) -> None:
        """End it, which aborts it on the worker unless it has finished."""
        if not self._first.done():  # else this must not yield: the answer is out, and its consumer may cancel us now
            self._first.cancel()
            await asyncio.wait((self._first,))
        if not self._first.cancelled():
            self._first.exception()  # reported already, or of no interest any more
        await self._leg.aclose()
