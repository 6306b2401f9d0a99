"""Sends statistics of the connector to the front end before a step instead of after it.

vLLM's engine core sends when a step has its outputs. A prompt of one step would then be announced when it is computed,
and decode could admit it no sooner. Called by `engine.connector.facade` in the engine process, on its step loop.
"""

from __future__ import annotations

import queue
from typing import Any, Final

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats

_queues: Final[list[queue.Queue[Any]]] = []
"""The output queue of this process's engine core, once its loop runs."""
_FRONT_END: Final = 0
"""The number of the only front end: the worker's."""
_run: Final = EngineCoreProc.run_busy_loop


def find_output_queue() -> None:
    """Have the engine core's loop say which queue it sends from when it begins; calling it again changes nothing."""
    setattr(EngineCoreProc, "run_busy_loop", _note_queue_and_run)  # noqa: B010 - mypy forbids to assign to a method


def send_at_once(connector_stats: dict[str, Any]) -> bool:
    """Send these statistics of the connector, and no others; False before the loop runs."""
    if not _queues:
        return False
    stats = SchedulerStats(kv_connector_stats=connector_stats)
    _queues[0].put_nowait((_FRONT_END, EngineCoreOutputs(scheduler_stats=stats)))
    return True


def _note_queue_and_run(core: Any) -> None:
    _queues[:] = [core.output_queue]
    _run(core)
