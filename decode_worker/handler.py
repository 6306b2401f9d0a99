"""Runs the decode leg of a request on an engine. Called by `engine.host` for each task.

A task without a hand-off is computed here from its first token: that is what a colocated replica does, and what a
decode worker does when the router decided so. The router gives the reason and the engine counts it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine import sampling
from engine.errors import InvalidTask
from engine.messages import GenerateTask, TokenDelta
from engine.vllm_engine import VllmEngine


class DecodeHandler:
    """Streams one delta per engine step."""

    async def run(self, engine: VllmEngine, task: GenerateTask) -> AsyncGenerator[TokenDelta, None]:
        """Yield the rest of the answer after `task.emitted_token_ids`. Raises InvalidTask, EngineFailed."""
        if task.leg != "decode":
            raise InvalidTask(f"this worker is in the {engine.config.pool} pool and cannot run a {task.leg} leg")
        leg = sampling.decode_leg(
            sampling.decode(task.sampling),
            emitted_token_ids=task.emitted_token_ids,
            has_handoff=task.handoff is not None,
        )
        if task.handoff is not None:
            leg = sampling.with_transfer(leg, {"do_remote_prefill": True, "handoff": task.handoff.to_params()})
        elif task.recompute_reason:
            leg = sampling.with_transfer(leg, {"recompute_reason": task.recompute_reason})
        stream = engine.generate(
            task.request_id,
            task.prompt_token_ids + task.emitted_token_ids,
            leg,
            reasoning_ended=task.reasoning_ended,
            priority=task.priority,
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                yield delta
