"""Which way a request goes, which worker gets it, and how much of it: a routing policy is written here.

Pure functions on a `Demand` and on snapshots of workers. Used by `router.dispatch` and `router.flow`, which know no
rule of their own. Two choices are made, both by `pick`: who computes a prompt, when `router.flow.prompt_queue` has seen
which one is next, and who decodes it, when it has its turn.

To change a choice, write a `Scorer` and enter it in `PROMPT_SCORERS` or as `DECODE_SCORER`. What a scorer needs beyond
that is a field of `Demand`, which `router.dispatch.request` fills in, or of `WorkerLoad`, which `router.fleet.worker`
fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from contracts.vocabulary import Pool
from router.client_identity import ANONYMOUS

Path = Literal["disaggregated", "fallback", "decode_only", "colocated"]
"""The way of a request. `disaggregated`: prefill on one worker, decode on another. `decode_only`: decode computes the
prompt too, which is too short for a remote prefill. `fallback`: decode computes it because prefill, or the transfer of
its KV, failed or was not to be had. `colocated`: a whole replica does both."""


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
    block_size_tokens: int
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


@dataclass(frozen=True)
class Demand:
    """What a request asks for, as far as its way or its worker may depend on that."""

    prompt_tokens: int
    """To be computed before its next token, if no cache has any of it."""
    output_tokens: int = 0
    """Tokens the answer may have; 0 if nobody said."""
    client: str = ANONYMOUS


Scorer = Callable[[Demand, WorkerLoad], tuple[float, ...]]
"""How bad a worker is for a request: the lowest gets it."""


# Which way


def pools_of(mode: str) -> tuple[Pool, ...]:
    """Name the pools of a deployment; the last one decodes."""
    return ("colocated",) if mode == "colocated" else ("prefill", "decode")


def path_for(demand: Demand, mode: str, min_remote_prefill_tokens: int, prefill_usable: bool) -> Path:
    """Decide which way a request goes, before a worker is chosen for any part of it."""
    if mode == "colocated":
        return "colocated"
    if demand.prompt_tokens < min_remote_prefill_tokens:
        return "decode_only"
    return "disaggregated" if prefill_usable else "fallback"


def prompt_pool(path: Path) -> Pool:
    """Name the pool that computes the prompt on this way."""
    pools: dict[Path, Pool] = {"disaggregated": "prefill", "colocated": "colocated"}
    return pools.get(path, "decode")


# Which worker


def least_prompt_tokens(_demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Prefill is compute-bound: its queue is measured in prompt tokens."""
    return (load.outstanding_prompt_tokens, load.running)


def fewest_running_then_most_free(_demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """A decode step costs about the same for one sequence more; free KV blocks break the tie."""
    return (load.running, -load.kv_blocks_free)


def least_work(_demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """A whole replica does both: prompt tokens first, since one prompt stalls every sequence there."""
    return (load.outstanding_prompt_tokens, load.running, -load.kv_blocks_free)


def room_then_fewest_running(demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Prefer a worker where the blocks it will need are free and not promised, and a place in the batch is.

    One without room would let the sequence wait, or take blocks from sequences that it then computes again.
    """
    left = load.kv_blocks_free - load.kv_blocks_promised - blocks_needed(demand, load.block_size_tokens)
    room = left >= 0 and load.running < load.max_running
    return (0, load.running, -left) if room else (1, -left, load.running)


PROMPT_SCORERS: Mapping[Pool, Scorer] = {
    "prefill": least_prompt_tokens,
    "decode": fewest_running_then_most_free,
    "colocated": least_work,
}
"""How the worker that computes a prompt is chosen, in each pool that may."""
DECODE_SCORER: Scorer = room_then_fewest_running
"""How the worker that decodes after a hand-over is chosen."""


def pick(demand: Demand, loads: Iterable[WorkerLoad], scorer: Scorer) -> str:
    """Return the id of the worker with the lowest score of those that take work; ties go to the first. Raises NoWorker.

    It is called only for a request that goes to the worker it names, so a scorer may keep account of what it chose.
    """
    candidates = [load for load in loads if load.takes_work]
    if not candidates:
        raise NoWorker("no worker is connected and accepting work")
    return min(candidates, key=lambda load: scorer(demand, load)).worker_id


# How much of it


SPARE_FRACTION = 0.25
"""Of a decode worker's KV blocks, what prompts that are not prefilled yet must leave free."""


def blocks_needed(demand: Demand, block_size_tokens: int) -> int:
    """Count the KV blocks of a sequence, with half of the answer that it may have: most end before."""
    return -(-(demand.prompt_tokens + demand.output_tokens // 2) // block_size_tokens)


def prompt_blocks(demand: Demand, block_size_tokens: int) -> int:
    """Count the KV blocks of its prompt alone."""
    return -(-demand.prompt_tokens // block_size_tokens)


def room_to_overlap(load: WorkerLoad, needed_blocks: int) -> bool:
    """May a prompt hold blocks on the decode worker while it is still prefilled? Not if decoding might miss them."""
    return load.kv_blocks_free - needed_blocks >= SPARE_FRACTION * load.kv_blocks_total
