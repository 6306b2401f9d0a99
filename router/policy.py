"""Which worker gets a request: filter, score, pick. Pure functions on snapshots; called by the orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


class NoWorker(Exception):
    """No worker of the pool can take the request now."""


@dataclass(frozen=True)
class WorkerLoad:
    """One worker as the router sees it: what it has sent there itself, and what the worker last reported."""

    worker_id: str
    connected: bool
    draining: bool
    outstanding_prompt_tokens: int
    """Prompt tokens sent there for prefill and not yet answered."""
    running: int
    """Sequences sent there and not yet finished."""
    kv_blocks_free: int
    kv_blocks_total: int
    max_running: int
    """Sequences its engine runs at a time; more wait there."""
    kv_blocks_promised: int = 0
    """For sequences sent there that it has produced nothing for, so that they may not be in what it reported."""
    kv_blocks_held: int = 0
    """For the prompts of all sequences sent there and not yet finished."""
    healthy: bool = True
    """Its engine runs, as far as it last said."""
    in_doubt: bool = False
    """It has failed or refused a request since, and is being asked: known in a moment."""

    @property
    def usable(self) -> bool:
        """Serves, as far as is known."""
        return self.connected and self.healthy and not self.draining

    @property
    def takes_work(self) -> bool:
        """May be given new work now."""
        return self.usable and not self.in_doubt


SPARE_FRACTION = 0.25
"""Of a decode worker's KV blocks, what prompts that are not prefilled yet must leave free."""

Score = Callable[[WorkerLoad], tuple[float, ...]]


def least_prompt_tokens(load: WorkerLoad) -> tuple[float, ...]:
    """Prefill is compute-bound: its queue is measured in prompt tokens."""
    return (load.outstanding_prompt_tokens, load.running)


def fewest_running_then_most_free(load: WorkerLoad) -> tuple[float, ...]:
    """A decode step costs about the same for one sequence more; free KV blocks break the tie."""
    return (load.running, -load.kv_blocks_free)


def room_then_fewest_running(needed_blocks: int) -> Score:
    """For a sequence that will need so many blocks: where they are free and not promised, and a place in the batch is.
    A worker without room would let it wait, or take blocks from sequences that it then computes again."""

    def score(load: WorkerLoad) -> tuple[float, ...]:
        left = load.kv_blocks_free - load.kv_blocks_promised - needed_blocks
        room = left >= 0 and load.running < load.max_running
        return (0, load.running, -left) if room else (1, -left, load.running)

    return score


def blocks_needed(prompt_tokens: int, output_tokens: int, block_size_tokens: int) -> int:
    """Of a sequence, with half of the answer that it may have: most end before."""
    return -(-(prompt_tokens + output_tokens // 2) // block_size_tokens)


def least_work(load: WorkerLoad) -> tuple[float, ...]:
    """A whole replica does both: prompt tokens first, since one prompt stalls every sequence there."""
    return (load.outstanding_prompt_tokens, load.running, -load.kv_blocks_free)


def pick(loads: Sequence[WorkerLoad], score: Score, needed_blocks: int = 0) -> str:
    """The id of the usable worker with the lowest score; ties go to the first. Raises NoWorker."""
    candidates = [load for load in loads if load.takes_work and load.kv_blocks_total >= needed_blocks]
    if not candidates:
        raise NoWorker("no worker is connected and accepting work")
    return min(candidates, key=score).worker_id


def room_to_follow(load: WorkerLoad, needed_blocks: int) -> bool:
    """May a prompt hold blocks on the decode worker while it is still prefilled? Not if decoding might miss them."""
    return load.kv_blocks_free - needed_blocks >= SPARE_FRACTION * load.kv_blocks_total


def local_prefill_reason(num_prompt_tokens: int, min_remote_prefill_tokens: int) -> str | None:
    """Why this prompt should be computed on the decode worker itself, or None for a remote prefill."""
    return "short_prompt" if num_prompt_tokens < min_remote_prefill_tokens else None
