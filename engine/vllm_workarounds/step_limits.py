"""Lets the front end change the limits of an engine's steps while the engine runs.

vLLM's scheduler reads both limits at every step, but no call of vLLM sets them. Installed in the engine process; what
it adds is called by name, between two steps.
"""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.engine.core import EngineCore

LIMIT_STEPS: Final = "ridgeline_limit_steps"


def add_limit_steps() -> None:
    """Add the method to vLLM's engine core; calling it again changes nothing."""
    setattr(EngineCore, LIMIT_STEPS, _limit_steps)


def _limit_steps(core: Any, max_num_seqs: int, max_num_batched_tokens: int, step_target_s: float) -> None:
    """Set what a step may hold, within what the model runner's buffers were made for, and how long it may take."""
    scheduler, made_for = core.scheduler, core.vllm_config.scheduler_config
    scheduler.max_num_active_reqs = min(max_num_seqs, made_for.max_num_seqs)
    scheduler.max_num_scheduled_tokens = min(max_num_batched_tokens, made_for.max_num_batched_tokens)
    scheduler.step_target_s = step_target_s  # read by `ridgeline.engine.step_scheduler`
