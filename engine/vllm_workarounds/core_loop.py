"""Reaches into the loop of vLLM's engine core: sends statistics before a step, and waits for news after an idle one.

vLLM sends when a step has its outputs. A prompt of one step would then be announced when it is computed, and decode
could admit it no sooner. And after a step that computed nothing vLLM sleeps for a millisecond. While requests wait for
KV, or finished ones keep theirs for a reader, all steps are such, and whatever comes meanwhile waits, at every stage of
a hand-off. Called on the engine's step loop; `wake` on any thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any, Final

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request

_cores: Final[list[Any]] = []
"""This process's engine core, once its loop runs."""
_FRONT_END: Final = 0
"""The number of the only front end: the worker's."""
_run: Final = EngineCoreProc.run_busy_loop


def join_loop(idle_wait_s: Callable[[int], float]) -> None:
    """Have the engine core's loop say which one it is when it begins, and wait for news instead of sleeping.

    After a step that computed nothing it waits `idle_wait_s(number of vLLM's requests)` at most, for a message of the
    front end or `wake`. Calling this again replaces the function.
    """

    def step(core: Any) -> bool:
        """Do as vLLM's own method, but for the sleep."""
        outputs, model_executed = core.step_fn()
        for output in outputs.items() if outputs else ():
            core.output_queue.put_nowait(output)
        core.post_step(model_executed)
        if not model_executed and core.scheduler.has_requests():
            _take_next(core, idle_wait_s(len(core.scheduler.requests)))
        return bool(model_executed)

    setattr(EngineCoreProc, "run_busy_loop", _note_core_and_run)  # noqa: B010 - mypy forbids to assign to a method
    setattr(EngineCoreProc, "_process_engine_step", step)  # noqa: B010


def send_at_once(connector_stats: dict[str, Any]) -> bool:
    """Send these statistics of the connector, and no others; False before the loop runs."""
    if not _cores:
        return False
    stats = SchedulerStats(kv_connector_stats=connector_stats)
    _cores[0].output_queue.put_nowait((_FRONT_END, EngineCoreOutputs(scheduler_stats=stats)))
    return True


def wake() -> None:
    """Have the loop run its next step now. What it shall find must be there before this is called."""
    for core in _cores:
        if core.input_queue.empty():  # else it is about to take what is there, and runs a step after that
            core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _note_core_and_run(core: Any) -> None:
    _cores[:] = [core]
    _run(core)


def _take_next(core: Any, within_s: float) -> None:
    try:
        message = core.input_queue.get(timeout=within_s)
    except queue.Empty:
        return
    core._handle_client_request(*message)


LIMIT_STEPS: Final = "ridgeline_limit_steps"
OFFER: Final = "ridgeline_offer"


def add_calls() -> None:
    """Let the front end call LIMIT_STEPS and OFFER between two steps; calling this again changes nothing.

    vLLM's scheduler reads both limits at every step, but no call of vLLM sets them. Nor does any tell what the prefix
    cache has of a prompt.
    """
    setattr(EngineCore, LIMIT_STEPS, _limit_steps)
    setattr(EngineCore, OFFER, _offer)


def _offer(
    core: Any, handoff_id: str, token_ids: list[int], cache_salt: str | None, lora: Sequence[Any] | None = None
) -> dict[str, Any] | None:
    """Have the connector offer what is cached of a prompt, by the hashes that vLLM would give its request.

    `lora` is name, number and path of the request's adapter, as in vLLM's LoRARequest.
    """
    asked = Request(
        handoff_id,
        token_ids,
        SamplingParams(max_tokens=1),
        None,
        lora_request=None if lora is None else LoRARequest(*lora),
        cache_salt=cache_salt,
        block_hasher=core.request_block_hasher,
    )
    found = core.scheduler.connector.scheduler.offer(handoff_id, asked.block_hashes, len(token_ids))
    return None if found is None else found.to_params()


def _limit_steps(core: Any, max_num_seqs: int, max_num_batched_tokens: int, step_target_s: float) -> None:
    """Set what a step may hold, within what the model runner's buffers were made for, and how long it may take."""
    scheduler, made_for = core.scheduler, core.vllm_config.scheduler_config
    scheduler.max_num_active_reqs = min(max_num_seqs, made_for.max_num_seqs)
    scheduler.max_num_scheduled_tokens = min(max_num_batched_tokens, made_for.max_num_batched_tokens)
    scheduler.step_target_s = step_target_s  # read by `ridgeline.engine.step_scheduler`
