"""The way of one request through the workers: decode is chosen first, then prefill; t1 goes out before the KV moves.

`engine_client.py` calls `run` for every sequence. A prompt that prefill computes in several steps is followed: its
decode leg begins after the first step, with blocks of its own, and fetches what is final while the rest is computed; t1
reaches it with the last blocks. If that fails, the leg begins again after prefill, as it does for a short prompt.

What happens in each state on each kind of end:

    state       worker fails                            client leaves / deadline / stop string
    PREFILLING  the request fails                       prefill is aborted
    HANDOFF     -                                       the hand-off is released on the prefill worker
    DECODING    the request fails after what was sent   decode is aborted, its fetch cancelled, the hand-off released
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import msgspec
from vllm.sampling_params import SamplingParams

from engine import sampling
from engine.errors import HandoffLost
from engine.messages import FirstToken, GenerateTask, Leg, Pool, TokenDelta
from kv_transfer.handoff import KvHandoff
from router.client_identity import ANONYMOUS
from router.fleet import Fleet, Worker
from router.metrics import RequestMetrics
from router.policy import (
    fewest_running_then_most_free,
    local_prefill_reason,
    pick,
    room_to_follow,
)
from router.prefill_queue import PrefillQueue, Turn
from router.settings import RouterSettings
from router.timeline import Outcome, RequestTimeline

Emit = Callable[[TokenDelta], bool]
"""Gives a delta to the client; True means nothing more is wanted (a stop string was found)."""
ReleaseHandoff = Callable[[KvHandoff, float], None]
"""Tells the prefill worker, in the background and after so many seconds, that nobody will fetch this."""
ABORT_FIRST_S = 0.5
"""A decode leg that is aborted gives its hand-off back by itself. Were it taken away before the abort has come there,
the leg would begin to compute the prompt."""


class DeadlineExceeded(Exception):
    """The request lived longer than router.request_deadline_s."""


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate; a request with n > 1 is n of these."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning_ended: bool | None = None
    priority: int = 0
    client: str = ANONYMOUS
    """Whom its prompt tokens count against while others wait too."""
    urgent: bool = False
    """Its prompt goes before all that wait."""


class Orchestrator:
    """Stateless between requests; the fleet holds what is outstanding, the queues what waits for it."""

    def __init__(
        self,
        fleet: Fleet,
        queues: Mapping[Pool, PrefillQueue],
        settings: RouterSettings,
        metrics: RequestMetrics,
        release_handoff: ReleaseHandoff,
    ) -> None:
        self._fleet = fleet
        self._queues = queues
        self._settings = settings
        self._metrics = metrics
        self._release_handoff = release_handoff
        self.in_flight = 0

    async def run(self, request: SequenceRequest, emit: Emit) -> None:
        """Serve one sequence; returns after its last delta. Cancelling it aborts both legs.

        Raises NoWorker, WorkerLost, EngineFailed, InvalidTask, TaskRejected or DeadlineExceeded.
        """
        timeline = RequestTimeline(time.monotonic, request.request_id, len(request.prompt_token_ids))
        outcome: Outcome = "failed"
        self.in_flight += 1
        try:
            async with asyncio.timeout(self._settings.request_deadline_s):
                await self._serve(request, emit, timeline)
            outcome = "finished"
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"request {request.request_id} took longer than router.request_deadline_s "
                f"({self._settings.request_deadline_s:.0f} s)"
            ) from error
        finally:
            self.in_flight -= 1
            self._metrics.close(timeline, outcome)

    async def _serve(self, request: SequenceRequest, emit: Emit, timeline: RequestTimeline) -> None:
        if self._settings.mode == "colocated":
            await self._whole(request, emit, timeline)
            return
        reason = local_prefill_reason(len(request.prompt_token_ids), self._settings.min_remote_prefill_tokens)
        if reason is not None:
            timeline.path = "ineligible"
            async with self._turn("decode", request, timeline) as turn:
                leg = turn.worker.client.generate(_task(request, "decode", recompute_reason=reason))
                await self._stream(leg, emit, timeline, turn)
            return
        decode = self._fleet.get(pick([w.load() for w in self._fleet.pool("decode")], fewest_running_then_most_free))
        timeline.path = "disaggregated"
        with decode.reserve():
            await self._prefill_then_decode(request, decode, emit, timeline)

    async def _whole(self, request: SequenceRequest, emit: Emit, timeline: RequestTimeline) -> None:
        async with self._turn("colocated", request, timeline) as turn:
            await self._stream(turn.worker.client.generate(_task(request, "decode")), emit, timeline, turn)

    @asynccontextmanager
    async def _turn(self, pool: Pool, request: SequenceRequest, timeline: RequestTimeline) -> AsyncIterator[Turn]:
        """A worker that computes the prompt, once it is this prompt's turn."""
        began_s = timeline.clock()
        queue, num_tokens = self._queues[pool], len(request.prompt_token_ids)
        async with queue.turn(request.client, num_tokens, urgent=request.urgent) as turn:
            timeline.router_queue_s += timeline.clock() - began_s
            yield turn

    async def _prefill_then_decode(
        self, request: SequenceRequest, decode: Worker, emit: Emit, timeline: RequestTimeline
    ) -> None:
        resample = sampling.resample_reason(request.params)
        mode: FirstToken = "continue" if resample is None else "resample"
        early: _EarlyLeg | None = None

        def follow(handoff: KvHandoff) -> None:
            nonlocal early
            if not self._settings.overlap or not room_to_follow(decode.load(), handoff.num_blocks):
                self._metrics.followed.labels("no_room" if self._settings.overlap else "off").inc()
                return
            task = _task(request, "decode", first_token=mode, handoff=handoff)
            early = _EarlyLeg(decode.client.generate(task))

        try:
            first = await self._prefill(request, mode, timeline, follow)
            handoff = first.handoff
            if handoff is None:
                emit(first)  # the whole answer was one token
                return
            self._metrics.first_token.labels(mode, resample or "").inc()
            fetched, release_after_s = False, 0.0
            try:
                if emit(msgspec.structs.replace(first, finished=False, handoff=None)):
                    return
                task = _task(request, "decode", emitted_token_ids=first.token_ids, first_token=mode, handoff=handoff)
                release_after_s = ABORT_FIRST_S
                fetched = await self._hand_over(decode, task, early, emit, timeline)
                receipt = timeline.decode_timing.receipt if timeline.decode_timing else None
                if receipt is not None and receipt.outcome != "ok":
                    timeline.path = (
                        "local"  # decode computed the prompt itself: not disaggregated, whatever was planned
                    )
            finally:
                if not fetched:
                    self._release_handoff(handoff, release_after_s)
        finally:
            if early is not None:
                await early.close()

    async def _prefill(
        self,
        request: SequenceRequest,
        mode: FirstToken,
        timeline: RequestTimeline,
        follow: Callable[[KvHandoff], None],
    ) -> TokenDelta:
        """The leg's last delta; `follow` is called before, if the hand-off can be followed while it grows."""
        task = _task(request, "prefill", first_token=mode)
        async with (
            self._turn("prefill", request, timeline) as turn,
            aclosing(turn.worker.client.generate(task)) as deltas,
        ):
            async for delta in deltas:
                if delta.handoff is not None and not delta.handoff.complete:
                    follow(delta.handoff)
                    continue
                timeline.tokens(len(delta.token_ids))
                timeline.prefill_timing = delta.timing
                turn.prompt_done()
                return delta
        raise AssertionError("a prefill leg ends with one delta or an error")

    async def _hand_over(
        self, decode: Worker, task: GenerateTask, early: _EarlyLeg | None, emit: Emit, timeline: RequestTimeline
    ) -> bool:
        """Stream the leg that followed the prefill; if that came to nothing, or there is none, begin one now."""
        if early is not None:
            try:
                timeline.followed = True
                fetched = await self._stream(early.deltas(), emit, timeline)
                self._metrics.followed.labels("ok").inc()
                return fetched
            except HandoffLost as lost:
                timeline.followed = False
                self._metrics.followed.labels(lost.reason).inc()
                task = msgspec.structs.replace(task, request_id=f"{task.request_id}-again")
        return await self._stream(decode.client.generate(task), emit, timeline)

    async def _stream(
        self,
        leg: AsyncGenerator[TokenDelta, None],
        emit: Emit,
        timeline: RequestTimeline,
        turn: Turn | None = None,
    ) -> bool:
        """Stream one decode leg; True once the worker has produced a token, that is, has fetched the KV."""
        produced = False
        async with aclosing(leg) as deltas:
            async for delta in deltas:
                produced = True
                if turn is not None:
                    turn.prompt_done()
                timeline.tokens(len(delta.token_ids))
                timeline.decode_timing = delta.timing
                if emit(delta):
                    break
        return produced


class _EarlyLeg:
    """A decode leg begun while its prompt is still prefilled: its first delta is awaited in the background."""

    def __init__(self, leg: AsyncGenerator[TokenDelta, None]) -> None:
        self._leg = leg
        self._first = asyncio.ensure_future(anext(leg))

    async def deltas(self) -> AsyncGenerator[TokenDelta, None]:
        """All of the leg's deltas; raises HandoffLost before the first one if following failed."""
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


def _task(
    request: SequenceRequest,
    leg: Leg,
    *,
    emitted_token_ids: list[int] | None = None,
    first_token: FirstToken = "continue",
    handoff: KvHandoff | None = None,
    recompute_reason: str = "",
) -> GenerateTask:
    return GenerateTask(
        request_id=f"{request.request_id}-{leg}",
        leg=leg,
        prompt_token_ids=request.prompt_token_ids,
        sampling=sampling.encode(request.params),
        emitted_token_ids=emitted_token_ids or [],
        first_token=first_token,
        handoff=handoff,
        recompute_reason=recompute_reason,
        reasoning_ended=request.reasoning_ended,
        priority=request.priority,
    )
