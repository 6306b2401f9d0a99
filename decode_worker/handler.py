"""Runs the decode leg of a request on an engine. Given to `worker_runtime.host`, which calls it for each task.

A task without a hand-off is computed here from its first token: that is what a colocated replica does, and what a
decode worker does when the router decided so. The router gives the reason and the engine counts it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from ridgeline.contracts.errors import HandoffLost
from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.tasks import GenerateTask, TokenDelta
from ridgeline.engine.connector.events import TransferEvent, with_event
from ridgeline.engine.connector.messages import FIRST_TOKEN_FOLLOWS, PREFIX_CACHE_SKIPPED
from ridgeline.engine.request import sampling
from ridgeline.engine.vllm_engine import VllmEngine


class DecodeHandler:
    """Runs the decode leg of a task; yields one delta per engine step."""

    def run(self, engine: VllmEngine, task: GenerateTask) -> AsyncGenerator[TokenDelta, None]:
        """Return the rest of the answer after `task.emitted_token_ids`.

        Raises InvalidTask at once; the deltas raise EngineFailed, and HandoffLost if the prefill that a transfer
        overlapped came to nothing.
        """
        task.require_own_kv()
        if task.handoff is not None and not task.handoff.complete:
            return self._overlap(engine, task, task.handoff)
        return self._rest(engine, task, task.emitted_token_ids, _transfer(task))

    async def _overlap(
        self, engine: VllmEngine, task: GenerateTask, handoff: KvHandoff
    ) -> AsyncGenerator[TokenDelta, None]:
        """Admit the request while its prompt is still being computed elsewhere, so that the transfer overlaps it.

        In mode `continue` the engine gets a placeholder for the first token, which is not known yet.
        """
        transfer: dict[str, object] = {"do_remote_prefill": True, "handoff": handoff.to_params()}
        emitted = task.emitted_token_ids
        if task.first_token == "continue":
            transfer[FIRST_TOKEN_FOLLOWS] = True
            emitted = [*emitted, task.prompt_token_ids[-1]]
        stream = self._rest(engine, task, emitted, transfer)
        with engine.transfer_events.expect(handoff.handoff_id) as event:
            async with aclosing(stream), aclosing(with_event(stream, event)) as deltas:
                async for delta in deltas:
                    if isinstance(delta, TransferEvent):
                        raise HandoffLost(delta.failed)
                    yield delta

    def _rest(
        self, engine: VllmEngine, task: GenerateTask, emitted: list[int], transfer: dict[str, object] | None
    ) -> AsyncGenerator[TokenDelta, None]:
        """Return what comes after `emitted`, which the engine gets as part of the prompt, or is made to repeat."""
        repeats = task.first_token == "resample"
        leg = sampling.decode_leg(
            sampling.decode(task.sampling),
            emitted_token_ids=emitted,
            has_handoff=task.handoff is not None,
            repeats=repeats,
        )
        repeated, emitted = (emitted, []) if repeats else ([], emitted)
        if transfer is not None and FIRST_TOKEN_FOLLOWS in transfer and leg.skip_reading_prefix_cache:
            raise HandoffLost(PREFIX_CACHE_SKIPPED)  # vLLM would run it on its placeholder
        if transfer is not None:
            leg = sampling.with_transfer(leg, transfer)
        if repeated:
            leg = sampling.with_forced_tokens(leg, repeated)
        if task.tpot_limit_s > 0.0:
            sure_tokens = max(0.0, task.sure_output_tokens - len(emitted))
            leg = sampling.with_tpot_limit(leg, task.tpot_limit_s, sure_tokens)
        stream = engine.generate(
            task.request_id,
            task.prompt_token_ids + emitted,
            leg,
            reasoning_ended=task.reasoning_ended,
            reasoning_parser_kwargs=task.reasoning_parser_kwargs,
            cache_salt=task.cache_salt,
            adapter=task.adapter,
        )
        return _without_first(stream, len(repeated)) if repeated else stream


async def _without_first(stream: AsyncGenerator[TokenDelta, None], count: int) -> AsyncGenerator[TokenDelta, None]:
    """Drop the first `count` tokens, which the client already has."""
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            dropped = min(count, len(delta.token_ids))
            count -= dropped
            if dropped:
                logprobs = delta.logprobs[dropped:] if delta.logprobs else None
                delta = msgspec.structs.replace(
                    delta, token_ids=delta.token_ids[dropped:], logprobs=logprobs, prompt_logprobs=None
                )
            if delta.token_ids or delta.finished or not dropped:
                yield delta


def _transfer(task: GenerateTask) -> dict[str, object] | None:
    if task.handoff is not None:
        return {"do_remote_prefill": True, "handoff": task.handoff.to_params()}
    return {"recompute_reason": task.recompute_reason} if task.recompute_reason else None
