"""One way of a request through the workers: decode is chosen when prefill begins; t1 goes out before the KV moves.

`orchestrator.py` makes another attempt when a worker is lost. A prompt that prefill computes in several steps is
followed: its decode leg begins after the first step, with blocks of its own, and fetches what is final while the rest
is computed; t1 reaches it with the last blocks. If that fails, the leg begins again after prefill, as for a short one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager

import msgspec

from engine import sampling
from engine.errors import HandoffLost, WorkerDraining, WorkerLost
from engine.messages import FirstToken, GenerateTask, Leg, Pool, TokenDelta
from kv_transfer.handoff import KvHandoff
from router.answer import Answer, SequenceRequest
from router.fleet import Fleet, Worker
from router.metrics import RequestMetrics
from router.policy import (
    NoWorker,
    blocks_needed,
    fewest_running_then_most_free,
    local_prefill_reason,
    pick,
    room_then_fewest_running,
    room_to_follow,
)
from router.prefill_queue import PrefillQueue, Turn
from router.settings import RouterSettings
from router.worker import PromptReservation

ReleaseHandoff = Callable[[KvHandoff, float], None]
"""Tells the prefill worker, in the background and after so many seconds, that nobody will fetch this."""
ABORT_FIRST_S = 0.5
"""A decode leg that is aborted gives its hand-off back by itself. Were it taken away before the abort has come there,
the leg would begin to compute the prompt."""


class Attempt:
    """How every attempt goes; holds nothing of a single one."""

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

    async def run(self, request: SequenceRequest, answer: Answer, number: int) -> None:
        """Take the request through the workers, from the last token the client has; cancelling it aborts all legs.

        Raises NoWorker, WorkerLost, WorkerDraining, EngineFailed, InvalidTask or TaskRejected.
        """
        tasks = _Tasks(request, answer, number)
        answer.timeline.state = "queued"
        if self._settings.mode == "colocated":
            await self._whole("colocated", tasks, "", answer)
            return
        reason = local_prefill_reason(len(request.prompt_token_ids), self._settings.min_remote_prefill_tokens)
        if reason is not None:
            answer.timeline.path = "ineligible"
            await self._whole("decode", tasks, reason, answer)
            return
        if self._fleet.usable("prefill"):
            answer.timeline.path = "disaggregated"
            await self._fleet.available("decode", fewest_running_then_most_free, self._settings.recovery_timeout_s)
            try:
                with ExitStack() as counted:
                    await self._prefill_then_decode(_Decode(self._fleet, tasks, counted), tasks, answer)
                return
            except NoWorker:  # the prefill pool has gone while the prompt waited for it
                answer.timeline.state = "queued"
        answer.timeline.path = "local"
        await self._whole("decode", tasks, "no_prefill_worker", answer)

    @asynccontextmanager
    async def _turn(self, pool: Pool, tasks: _Tasks, answer: Answer) -> AsyncIterator[Turn]:
        """A worker that computes the prompt, once it is this prompt's turn."""
        timeline, request = answer.timeline, tasks.request
        began_s = timeline.clock()
        async with self._queues[pool].turn(request.client, tasks.num_tokens, urgent=tasks.urgent) as turn:
            timeline.router_queue_s += timeline.clock() - began_s
            timeline.state = "prefilling"
            yield turn

    async def _whole(self, pool: Pool, tasks: _Tasks, reason: str, answer: Answer) -> None:
        async with self._turn(pool, tasks, answer) as turn:
            await self._stream(turn.worker.client.generate(tasks.whole(reason)), pool, answer, turn)

    async def _prefill_then_decode(self, decode: _Decode, tasks: _Tasks, answer: Answer) -> None:
        early: _EarlyLeg | None = None

        def follow(handoff: KvHandoff) -> None:
            nonlocal early
            if not self._settings.overlap or not room_to_follow(decode.worker.load(), handoff.num_blocks):
                self._metrics.followed.labels("no_room" if self._settings.overlap else "off").inc()
                return
            early = _EarlyLeg(decode.worker.client.generate(tasks.decode(handoff, "follows")))

        try:
            first = await self._prefill(decode, tasks, answer, follow)
            handoff = first.handoff
            if handoff is None:
                answer.give(first, "prefill")  # the whole answer was one token
                return
            answer.timeline.state = "handoff"
            self._metrics.first_token.labels(tasks.mode, tasks.resample or "").inc()
            fetched, release_after_s = False, 0.0
            try:
                if answer.give(msgspec.structs.replace(first, finished=False, handoff=None), "prefill"):
                    return
                release_after_s = ABORT_FIRST_S
                fetched = await self._hand_over(decode, tasks.decode(handoff), early, answer)
                if _recomputed(answer):
                    answer.timeline.path = "local"  # not disaggregated, whatever was planned
            finally:
                if not fetched:
                    self._release_handoff(handoff, release_after_s)
        finally:
            if early is not None:
                await early.close()

    async def _prefill(
        self, decode: _Decode, tasks: _Tasks, answer: Answer, follow: Callable[[KvHandoff], None]
    ) -> TokenDelta:
        """The leg's last delta; `follow` is called before, if the hand-off can be followed while it grows."""
        async with self._turn("prefill", tasks, answer) as turn:
            try:
                decode.choose(turn)
            except (WorkerLost, WorkerDraining):
                answer.timeline.state = "queued"
                raise
            async with aclosing(turn.worker.client.generate(tasks.prefill())) as deltas:
                async for delta in deltas:
                    if delta.handoff is not None and not delta.handoff.complete:
                        follow(delta.handoff)
                        continue
                    answer.timeline.prefill_timing = delta.timing
                    turn.prompt_done()
                    return delta
        raise AssertionError("a prefill leg ends with one delta or an error")

    async def _hand_over(self, decode: _Decode, task: GenerateTask, early: _EarlyLeg | None, answer: Answer) -> bool:
        """Stream the leg that followed the prefill; if that came to nothing, or there is none, begin one now."""
        if early is not None:
            try:
                answer.timeline.followed = True
                fetched = await self._stream(early.deltas(), "decode", answer, decode.counted)
                self._metrics.followed.labels("ok").inc()
                return fetched
            except HandoffLost as lost:
                answer.timeline.followed = False
                self._metrics.followed.labels(lost.reason).inc()
        return await self._stream(decode.worker.client.generate(task), "decode", answer, decode.counted)

    async def _stream(
        self,
        leg: AsyncGenerator[TokenDelta, None],
        pool: Pool,
        answer: Answer,
        counted: Turn | PromptReservation,
    ) -> bool:
        """Stream one decode leg on a worker of `pool`; True once it made a token, that is, has the KV."""
        produced = False
        async with aclosing(leg) as deltas:
            async for delta in deltas:
                produced = True
                answer.timeline.state = "decoding"
                counted.prompt_done()
                answer.timeline.decode_timing = delta.timing
                if answer.give(delta, pool):
                    break
        return produced


def _recomputed(answer: Answer) -> bool:
    timing = answer.timeline.decode_timing
    return timing is not None and timing.receipt is not None and timing.receipt.outcome != "ok"


class _Decode:
    """The decode worker of one attempt: chosen when its prompt has its turn, and not before it waited for that; counted
    there from then on."""

    worker: Worker
    counted: PromptReservation

    def __init__(self, fleet: Fleet, tasks: _Tasks, counted: ExitStack) -> None:
        self._fleet = fleet
        self._tasks = tasks
        self._stack = counted

    def choose(self, turn: Turn) -> None:
        """By the blocks that it will need, half of its answer included; the place that came with the turn is there.

        Raises WorkerLost or WorkerDraining: none is left.
        """
        pool = self._fleet.usable("decode")
        if not pool:
            leaves = any(worker.load().draining for worker in self._fleet.pool("decode"))
            gone = WorkerDraining if leaves else WorkerLost
            raise gone("the decode workers were lost while the prompt waited for its turn")
        block_size_tokens = pool[0].description.block_size_tokens
        output_tokens = self._tasks.request.params.max_tokens or 0
        needed = blocks_needed(self._tasks.num_tokens, output_tokens, block_size_tokens)
        chosen = pick([worker.load() for worker in pool], room_then_fewest_running(needed))
        self.worker = self._fleet.get(chosen)
        slot = turn.take_slot()
        self._stack.callback(slot.release)
        slot.on(self.worker)
        prompt = blocks_needed(self._tasks.num_tokens, 0, block_size_tokens)
        self.counted = self._stack.enter_context(self.worker.reserve(promised_blocks=needed, held_blocks=prompt))


class _Tasks:
    """The legs of one attempt, as their workers are asked for them."""

    def __init__(self, request: SequenceRequest, answer: Answer, number: int) -> None:
        self.resample = sampling.resample_reason(request.params)
        self.mode: FirstToken = "continue" if self.resample is None else "resample"
        self.request = request
        self.urgent = request.urgent or number > 0
        """A client that has waited once, and perhaps has half of its answer, does not wait again behind others."""
        self.num_tokens = len(request.prompt_token_ids) + len(answer.token_ids)
        """What this attempt has to compute before the next token, if no cache has any of it."""
        self._answer = answer
        self._attempt = f"-again{number}" if number else ""

    def whole(self, recompute_reason: str = "") -> GenerateTask:
        """All of it on one worker."""
        return self._task("decode", "", recompute_reason=recompute_reason)

    def prefill(self) -> GenerateTask:
        """The prompt, and what the client has already."""
        return self._task("prefill", "")

    def decode(self, handoff: KvHandoff, suffix: str = "") -> GenerateTask:
        """What comes after the hand-off's tokens."""
        return self._task("decode", suffix, handoff=handoff)

    def _task(
        self, leg: Leg, suffix: str, *, handoff: KvHandoff | None = None, recompute_reason: str = ""
    ) -> GenerateTask:
        request = self.request
        name = "-".join(part for part in (request.request_id, leg, suffix) if part)
        return GenerateTask(
            request_id=name + self._attempt,
            leg=leg,
            prompt_token_ids=request.prompt_token_ids,
            sampling=sampling.encode(request.params),
            emitted_token_ids=list(self._answer.token_ids),
            first_token=self.mode,
            handoff=handoff,
            recompute_reason=recompute_reason,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            cache_salt=request.cache_salt,
        )


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
