"""Runs the prefill leg of a request on an engine. Given to `worker_runtime.host`, which calls it for each task."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.contracts.tasks import GenerateTask, TokenDelta
from ridgeline.engine.connector.events import TransferEvent, with_event
from ridgeline.engine.connector.messages import REUSE
from ridgeline.engine.request import sampling
from ridgeline.engine.vllm_engine import VllmEngine


class PrefillHandler:
    """Runs the prefill leg of a task: one engine step, or a few chunks, and at most one token."""

    async def run(self, engine: VllmEngine, task: GenerateTask) -> AsyncGenerator[TokenDelta, None]:
        """Yield one finished delta: the first token and the hand-off, or the whole answer if it is that short.

        A prompt of several engine steps yields a delta without tokens first. Its hand-off is not complete yet: with it
        the transfer can overlap the prefill.

        A prompt whose beginning another worker has cached is fetched so far, and computed from there; whatever becomes
        of the fetch is in the delta's timing.

        With a hand-off `finish_reason` is None: the request goes on elsewhere. Raises InvalidTask, EngineFailed.
        """
        task.require_own_kv()
        params = sampling.decode(task.sampling)
        resample = task.first_token == "resample"
        emitted = [] if resample else task.emitted_token_ids
        goes_on = resample or params.max_tokens is None or params.max_tokens - len(emitted) > 1
        leg = sampling.prefill_leg(params, emitted_token_ids=task.emitted_token_ids, resample=resample)
        # Decode computes the last prompt token again, to sample from it: a window or a state must be from before it.
        less = resample and not engine.keeps_every_token and params.prompt_logprobs is None
        prompt = task.prompt_token_ids[:-1] if less and len(task.prompt_token_ids) > 1 else task.prompt_token_ids
        handoff_id = new_handoff_id()
        transfer: dict[str, object] = {}
        if goes_on:
            transfer |= {"do_remote_decode": True, "handoff_id": handoff_id}
        if task.handoff is not None:
            transfer |= {"do_remote_prefill": True, "handoff": task.handoff.to_params(), REUSE: True}
        if transfer:
            leg = sampling.with_transfer(leg, transfer)
        stream = engine.generate(
            task.request_id, prompt + emitted, leg, cache_salt=task.cache_salt, adapter=task.adapter
        )
        passed_on = not goes_on
        try:
            async with aclosing(self._deltas(engine, task, stream, handoff_id, resample=resample)) as deltas:
                async for delta in deltas:
                    passed_on = passed_on or delta.finished
                    if delta.handoff is not None:
                        handoff = msgspec.structs.replace(delta.handoff, adapter=task.adapter_key)
                        delta = msgspec.structs.replace(delta, handoff=handoff)
                    yield delta
        finally:
            if not passed_on:
                # The engine may have finished and kept the blocks while its answer was on the way here. An abort comes
                # too late then, and nobody else knows the hand-off's id.
                engine.release_own(handoff_id)

    async def _deltas(
        self,
        engine: VllmEngine,
        task: GenerateTask,
        stream: AsyncGenerator[TokenDelta, None],
        handoff_id: str,
        *,
        resample: bool,
    ) -> AsyncGenerator[TokenDelta, None]:
        with engine.transfer_events.expect(handoff_id) as event:
            async with aclosing(stream), aclosing(with_event(stream, event)) as deltas:
                async for delta in deltas:
                    if isinstance(delta, TransferEvent):
                        yield TokenDelta(request_id=task.request_id, handoff=delta.handoff)
                        continue
                    if delta.handoff is None:
                        yield delta
                    elif resample:
                        yield msgspec.structs.replace(delta, token_ids=[], logprobs=None, finish_reason=None)
                    else:
                        yield msgspec.structs.replace(delta, finish_reason=None)
