"""The legs of an attempt. Decode is chosen when prefill begins, and the first token goes out before the KV moves.

If prefill computes a prompt in several steps, its transfer overlaps with its computation. The decode leg then begins
after the first step, reserves its blocks, and fetches those that are final while the rest is computed; the first token
reaches it with the last blocks. If that fails, the leg begins again after prefill, as for a short prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial

import msgspec

from contracts.errors import HandoffLost, WorkerDraining, WorkerLost
from contracts.handoff import KvHandoff
from contracts.tasks import GenerateTask, TokenDelta
from contracts.vocabulary import Pool
from router.dispatch.request import Attempt
from router.fleet.fleet import Fleet, Worker
from router.fleet.policy import DECODE_SCORER, Rerouted, blocks_needed, pick, prompt_blocks, room_to_overlap
from router.fleet.worker import PromptReservation
from router.flow.prompt_queue import PromptQueue, PromptTurn
from worker_runtime.client import OnDelta, WorkerClient

ReleaseHandoff = Callable[[KvHandoff, float], None]
"""Tells the prefill worker, in the background and after this many seconds, that a hand-off will not be fetched."""
ABORT_FIRST_S = 0.5
"""Delay of a release, so that the abort of the decode leg arrives first: an aborted leg releases its hand-off itself,
but a running leg whose hand-off vanishes would start to compute the prompt."""


class Legs:
    """Runs attempts on workers; the caller decides which way an attempt goes.

    Cancelling either method aborts what runs on workers. Both raise WorkerLost, WorkerDraining, EngineFailed,
    InvalidTask or TaskRejected, NoWorker if the pool that computes the prompt stays without a worker, and Rerouted if
    the mode has been changed while the prompt waited.
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
        """Run the whole request on one worker of a pool, with the reason why prefill did not compute the prompt."""
        async with self._turn(pool, attempt, decodes_here=True) as turn:
            leg = partial(turn.worker.client.run_task, attempt.whole_task(recompute_reason))
            await self._stream(leg, pool, attempt, turn)

    async def split(self, attempt: Attempt) -> None:
        """Compute the prompt on a prefill worker, send its first token on, and get the rest from a decode worker."""
        with ExitStack() as counted:
            await self._prefill_then_decode(_Decode(self._fleet, attempt, counted), attempt)

    @asynccontextmanager
    async def _turn(self, pool: Pool, attempt: Attempt, *, decodes_here: bool) -> AsyncIterator[PromptTurn]:
        """Wait until it is this prompt's turn on a worker that computes it."""
        timeline = attempt.progress.timeline
        began_s = timeline.clock()
        wait = self._queues[pool].turn(attempt.demand, urgent=attempt.urgent, decodes_here=decodes_here)
        async with wait as turn:
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
            early = OverlappedLeg(decode.worker.client, attempt.decode_task(growing))

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
        """Return the leg's last delta; call `begin_early` before that, once the growing hand-off can be fetched."""
        progress = attempt.progress
        made: list[TokenDelta] = []
        async with self._turn("prefill", attempt, decodes_here=False) as turn:

            def take(delta: TokenDelta) -> bool:
                if delta.handoff is not None and not delta.handoff.complete:
                    begin_early(delta.handoff)
                    return False
                made.append(delta)
                progress.timeline.prefill_timing = delta.timing
                turn.prompt_done()
                return True

            try:
                decode.choose(turn)
            except (WorkerLost, WorkerDraining, Rerouted):
                progress.advance("queued")
                raise
            await turn.worker.client.run_task(attempt.prefill_task(), take)
        return made[0]

    async def _hand_over(
        self, decode: _Decode, attempt: Attempt, handoff: KvHandoff, early: OverlappedLeg | None
    ) -> bool:
        """Stream the leg that overlapped with prefill; if there is none, or it failed, begin one now."""
        progress, task = attempt.progress, attempt.decode_task(handoff)
        if early is not None:
            try:
                progress.timeline.overlapped = True
                fetched = await self._stream(early.pass_on, "decode", attempt, decode.counted)
                progress.metrics.overlapped.labels("ok").inc()
                return fetched
            except HandoffLost as lost:
                progress.timeline.overlapped = False
                progress.metrics.overlapped.labels(lost.reason).inc()
        leg = partial(decode.worker.client.run_task, task)
        return await self._stream(leg, "decode", attempt, decode.counted)

    async def _stream(
        self,
        leg: Callable[[OnDelta], Awaitable[None]],
        pool: Pool,
        attempt: Attempt,
        counted: PromptTurn | PromptReservation,
    ) -> bool:
        """Stream one decode leg on a worker of `pool`. Returns whether it made a token, and so has the KV."""
        progress, produced = attempt.progress, False

        def send(delta: TokenDelta) -> bool:
            nonlocal produced
            if not produced:
                produced = True
                progress.advance("decoding")
                counted.prompt_done()
            if delta.timing is not None:
                progress.timeline.decode_reported(delta.timing)
            return progress.send(delta, pool)

        await leg(send)
        return produced


class _Decode:
    """The decode worker of one attempt, chosen when it is the prompt's turn.

    From then on the attempt is counted there.
    """

    worker: Worker
    counted: PromptReservation

    def __init__(self, fleet: Fleet, attempt: Attempt, counted: ExitStack) -> None:
        self._fleet = fleet
        self._attempt = attempt
        self._stack = counted

    def choose(self, turn: PromptTurn) -> None:
        """Pick a worker by the KV blocks that the sequence will need, half of its answer included, and count it there.

        The place in its batch came with the turn. Raises WorkerLost or WorkerDraining if no worker is left, and
        Rerouted if there is no such pool any more.
        """
        pool = self._fleet.usable("decode")
        if not pool and self._fleet.mode != "disaggregated":
            raise Rerouted("the mode was changed while the prompt waited for its turn")
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
    """A decode leg that begins while its prompt is still computed; what it makes until then is kept."""

    def __init__(self, client: WorkerClient, task: GenerateTask) -> None:
        self._kept: list[TokenDelta] = []
        self._on_delta: OnDelta | None = None
        self._leg = asyncio.create_task(client.run_task(task, self._take), name=task.request_id)

    def _take(self, delta: TokenDelta) -> bool:
        if self._on_delta is not None:
            return self._on_delta(delta)
        self._kept.append(delta)
        return False

    async def pass_on(self, on_delta: OnDelta) -> None:
        """Pass on what was kept and all that follows. Raises HandoffLost before any delta if the overlap failed."""
        for delta in self._kept:
            if on_delta(delta):
                return
        self._on_delta = on_delta
        await asyncio.shield(self._leg)

    async def close(self) -> None:
        """End the leg, which aborts it on the worker unless it has finished."""
        if not self._leg.done():
            self._leg.cancel()
            await asyncio.wait((self._leg,))
        if not self._leg.cancelled():
            self._leg.exception()  # already reported, or no longer of interest
