"""The legs of an attempt, on the workers of its place. The first token goes out before the KV moves.

The decode leg begins when prefill begins the prompt (overlap). It reserves its blocks and fetches those that are final
while the rest is computed; the first token reaches it with the last blocks. So when prefill ends, decode has admitted
the request already. If that fails, or decode has no room for it, the leg begins after prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from ridgeline.contracts.errors import EngineError, HandoffLost, WorkerLost
from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.tasks import GenerateTask, TokenDelta
from ridgeline.router.dispatch.request import RequestProgress
from ridgeline.router.fleet.fleet import Worker
from ridgeline.router.observe.timeline import LegWorker
from ridgeline.router.placement.places import Place, Placement
from ridgeline.worker_runtime.client import OnDelta, WorkerClient

ReleaseHandoff = Callable[[KvHandoff, float], None]
"""Tells the prefill worker, in the background and after this many seconds, that a hand-off will not be fetched."""
ABORT_FIRST_S = 0.5
"""Delay of a release, so that the abort of the decode leg arrives first: an aborted leg releases its hand-off itself,
but a running leg whose hand-off vanishes would start to compute the prompt."""

LEAST_FETCH_S = 1.0
"""The least time that a fetch of cached KV gets before the prompt is computed; more if to compute it takes longer."""


class CannotContinue(EngineError):
    """A stream lost its worker, and its sampling state cannot be rebuilt; the message says why."""


class Legs:
    """Runs attempts on workers."""

    def __init__(self, placement: Placement, release_handoff: ReleaseHandoff, *, overlap: bool) -> None:
        self._placement = placement
        self._release_handoff = release_handoff
        self._overlap = overlap

    async def run(self, progress: RequestProgress) -> None:
        """Wait for a place and run the attempt there. Cancelling this aborts what runs on workers.

        Raises WorkerLost, WorkerDraining, EngineFailed, InvalidTask or TaskRejected, and NoWorker if a pool that it
        needs stays without a worker. Raises CannotContinue if the worker that is to go on with an answer cannot.
        """
        async with self._place(progress) as place:
            if place.decode_worker is None:
                await self._whole(progress, place)
            else:
                await self._split(progress, place, place.decode_worker)
            place.answered(progress.answer())

    @asynccontextmanager
    async def _place(self, progress: RequestProgress) -> AsyncIterator[Place]:
        timeline = progress.timeline
        began_s = timeline.clock()
        async with self._placement.place(progress.demand()) as place:
            timeline.router_queue_s += timeline.clock() - began_s
            timeline.path, timeline.assignment = place.route.path, place.assignment
            _require_continuable(progress, place.decode_worker or place.prompt_worker)
            workers = (place.prompt_worker, place.decode_worker)
            timeline.placed(*(LegWorker(one.pool, one.worker_id) for one in workers if one is not None))
            progress.assignment = place.assignment
            decode = place.decode_worker.worker_id if place.decode_worker else None
            progress.advance("prefilling", worker=place.prompt_worker.worker_id, decode_worker=decode)
            yield place

    async def _whole(self, progress: RequestProgress, place: Place) -> None:
        """Run the whole request on one worker, with the reason why prefill did not compute the prompt."""
        task = progress.whole_task(place.route.recompute_reason)
        leg = partial(place.prompt_worker.client.run_task, task)
        await self._stream(leg, place.prompt_worker, progress, lambda delta: _prompt_done(place, progress, delta))

    async def _split(self, progress: RequestProgress, place: Place, decode: Worker) -> None:
        """Compute the prompt on a prefill worker, send its first token on, and get the rest from a decode worker."""
        early, pool = None, place.prompt_worker.pool

        def begin_early(partial: KvHandoff) -> None:
            nonlocal early
            if not self._overlap or not decode.has_room_to_overlap(partial.num_blocks):
                progress.metrics.overlapped.labels("no_room" if self._overlap else "off").inc()
                return
            progress.timeline.overlap_began_s = progress.timeline.clock()
            early = OverlappedLeg(decode.client, progress.decode_task(partial))

        try:
            first = await self._prefill(place, progress, begin_early)
            handoff = first.handoff
            if handoff is None:
                progress.send(first, pool)  # the whole answer was one token
                return
            progress.advance("handoff", worker=decode.worker_id)
            wanted = progress.request.sampling
            progress.metrics.first_token.labels(wanted.first_token, wanted.resample_reason or "").inc()
            fetched, release_after_s = False, 0.0
            try:
                if progress.send(msgspec.structs.replace(first, finished=False, handoff=None), pool):
                    return
                release_after_s = ABORT_FIRST_S
                fetched = await self._hand_over(place, decode, progress, handoff, early)
            finally:
                if not fetched:
                    self._release_handoff(handoff, release_after_s)
        finally:
            if early is not None:
                await early.close()

    async def _prefill(
        self, place: Place, progress: RequestProgress, begin_early: Callable[[KvHandoff], None]
    ) -> TokenDelta:
        """Return the leg's last delta; call `begin_early` before that, once the partial hand-off can be fetched."""
        made: list[TokenDelta] = []

        def take(delta: TokenDelta) -> bool:
            if delta.handoff is not None and not delta.handoff.complete:
                begin_early(delta.handoff)
                return False
            made.append(delta)
            progress.timeline.prompt_reported(delta.timing)
            _prompt_done(place, progress, delta)
            return True

        try:
            async with self._cached(place, progress) as cached:
                await place.prompt_worker.client.run_task(progress.prefill_task(cached), take)
                progress.reuse_ended(made[0].timing)
        finally:
            place.prompt_left()
        return made[0]

    @asynccontextmanager
    async def _cached(self, place: Place, progress: RequestProgress) -> AsyncIterator[KvHandoff | None]:
        """Provide what another worker has cached of the prompt, if it should be fetched and is still there."""
        wanted, source = place.reuse, place.kv_source
        if wanted is None or source is None:
            yield None
            return
        began_s = progress.timeline.clock()
        try:
            offer = await source.client.offer(progress.prefill_task(), wanted.compute_s)
        except WorkerLost:
            progress.metrics.reuse.labels("no_answer").inc()
            yield None
            return
        progress.reuse_began(wanted, offer, progress.timeline.clock() - began_s)
        if offer is None:
            yield None
            return
        fetched = False
        try:
            yield msgspec.structs.replace(offer, fetch_within_s=max(wanted.compute_s, LEAST_FETCH_S))
            fetched = True
        finally:
            if not fetched:
                self._release_handoff(offer, ABORT_FIRST_S)

    async def _hand_over(
        self, place: Place, decode: Worker, progress: RequestProgress, handoff: KvHandoff, early: OverlappedLeg | None
    ) -> bool:
        """Stream the leg that overlapped with prefill; if there is none, or it failed, begin one now."""
        task = progress.decode_task(handoff)
        progress.timeline.link = (place.prompt_worker.worker_id, decode.worker_id)
        if early is not None:
            try:
                progress.timeline.overlapped = True
                fetched = await self._stream(early.pass_on, decode, progress, lambda _: place.decode_began())
                progress.metrics.overlapped.labels("ok").inc()
                return fetched
            except HandoffLost as lost:
                progress.timeline.overlapped = False
                progress.metrics.overlapped.labels(lost.reason).inc()
        leg = partial(decode.client.run_task, task)
        return await self._stream(leg, decode, progress, lambda _: place.decode_began())

    async def _stream(
        self,
        leg: Callable[[OnDelta], Awaitable[None]],
        worker: Worker,
        progress: RequestProgress,
        on_first: Callable[[TokenDelta], None],
    ) -> bool:
        """Stream one decode leg on this worker. Returns whether it made a token, and so has the KV."""
        produced = False

        def send(delta: TokenDelta) -> bool:
            nonlocal produced
            if not produced:
                produced = True
                progress.advance("decoding", worker=worker.worker_id)
                on_first(delta)
            if delta.timing is not None:
                progress.timeline.decode_reported(delta.timing)
            return progress.send(delta, worker.pool)

        await leg(send)
        return produced


def _require_continuable(progress: RequestProgress, worker: Worker) -> None:
    """Raise CannotContinue if this worker should repeat an answer's tokens and cannot."""
    reason = progress.request.sampling.resample_reason
    if progress.token_ids and reason is not None and not worker.description.repeats_tokens:
        raise CannotContinue(
            f"the worker was lost during the stream, and {reason} needs sampling state that {worker.worker_id} cannot "
            "rebuild: send the request again"
        )


def _prompt_done(place: Place, progress: RequestProgress, delta: TokenDelta) -> None:
    """Note what the engine had of the prompt in its prefix cache; None if it did not look there."""
    cached_tokens = delta.num_cached_tokens if delta.prompt_logprobs is None else None
    result = None if delta.timing is None else delta.timing.transfer_result
    if cached_tokens is not None and result is not None and result.outcome == "ok":
        cached_tokens -= result.num_tokens  # vLLM counts what was fetched as cached
    place.prompt_done(cached_tokens)
    if cached_tokens is not None:
        prompt_tokens = progress.timeline.num_prompt_tokens + len(progress.token_ids)
        progress.metrics.looked_up(place.prompt_worker.pool, prompt_tokens, cached_tokens)


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
