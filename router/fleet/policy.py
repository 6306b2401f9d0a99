"""The routing policy: which path a request takes, which worker gets it, and how much of a worker it may use.

Pure functions of a `Demand` and of snapshots of workers. `pick` makes both choices: who computes a prompt, when
`ridgeline.router.placement.pool_queue` has found which one is next, and who decodes it, when it is that prompt's turn.

To change a choice, write a `Scorer` and enter it in `PROMPT_SCORERS` or as `DECODE_SCORER`. If it needs more data, add
a field to `Demand`, which `ridgeline.router.dispatch.request` fills in, or to `WorkerLoad`, which
`ridgeline.router.fleet.worker` fills in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal

import msgspec

from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.router.client_identity import ANONYMOUS
from ridgeline.router.fleet.prefixes import BlockHashes

Path = Literal["disaggregated", "fallback", "decode_only", "colocated"]
"""The path of a request. `disaggregated`: prefill on one worker, decode on another. `decode_only`: decode computes the
prompt too, because it is too short for a remote prefill. `fallback`: one worker does both, because the transfer of its
KV failed, or the workers of one pool were not available. `colocated`: a whole replica does both."""


class NoWorker(Exception):
    """No worker of the pool can take the request now."""


class WorkerLoad(msgspec.Struct, frozen=True):
    """One worker as the router sees it: what this router has sent there, and what the worker last reported."""

    worker_id: str
    connected: bool
    draining: bool
    outstanding_prompt_tokens: int
    """Prompt tokens sent there for prefill whose first token has not come back."""
    running: int
    """Sequences sent there that have not finished."""
    kv_blocks_free: int
    kv_blocks_total: int
    max_running: int
    """Sequences that its engine runs at the same time; more wait there."""
    block_size_tokens: int
    kv_blocks_promised: int = 0
    """Blocks for sequences that have produced nothing yet, and so may not be in its last report."""
    kv_blocks_held: int = 0
    """Blocks for the prompts of all sequences sent there that have not finished."""
    healthy: bool = True
    """Whether its engine runs, by its last report."""
    distance: int = 0
    """How far it is from the worker that computes the prompt: 0 on its node, 1 in its rack, 2 farther or not known."""
    in_doubt: bool = False
    """Whether it has failed or refused a request since its last report; its status is being asked for."""

    @property
    def usable(self) -> bool:
        """Whether it serves, as far as is known."""
        return self.connected and self.healthy and not self.draining

    @property
    def takes_work(self) -> bool:
        """Whether it may get new work now."""
        return self.usable and not self.in_doubt


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """What a request asks for, as far as its path or its worker may depend on it."""

    prompt_tokens: int
    """Tokens to compute before its next token, if no cache has any of them."""
    output_tokens: int = 0
    """Largest number of tokens in the answer; 0 if not given."""
    client: str = ANONYMOUS
    avoided: frozenset[str] = frozenset()
    """Workers that the router of the request does not reach."""
    ttft_limit_s: float = math.inf
    """The time to first token that its client allows, from its arrival."""
    tpot_limit_s: float = math.inf
    """The time per output token that its client allows."""
    waited_s: float = 0.0
    """Time from its arrival until it wished to start."""
    prefix: BlockHashes = ()
    """The hashes of its prompt's blocks."""


Scorer = Callable[[Demand, WorkerLoad], tuple[float, ...]]
"""Scores a worker for a request; the lowest score wins."""


# Which way


class Route(msgspec.Struct, frozen=True, array_like=True):
    """Which way a request goes: its path, the pool whose worker computes its prompt, and why that one if it decodes."""

    path: Path
    prompt_pool: Pool
    recompute_reason: str = ""
    """Why the worker that gets the whole request computes the prompt, which prefill could have computed."""

    @property
    def splits(self) -> bool:
        """Whether one worker computes the prompt and another one decodes."""
        return self.path == "disaggregated"


WHOLE_REPLICA = Route("colocated", "colocated")
SPLIT = Route("disaggregated", "prefill")
SHORT_PROMPT = Route("decode_only", "decode", "short_prompt")
WITHOUT_PREFILL = Route("fallback", "decode", "no_prefill_worker")
WITHOUT_DECODE = Route("fallback", "prefill", "no_decode_worker")
ADAPTIVE_WHOLE = Route("colocated", "adaptive")
ADAPTIVE_SPLIT = Route("disaggregated", "adaptive")
"""In mode `adaptive` it is decided when the prompt has its turn which of the two a request takes."""


def pools_of(mode: Mode) -> tuple[Pool, ...]:
    """Return the pools of a deployment; the last one decodes."""
    return ("prefill", "decode") if mode == "disaggregated" else (mode,)


def exchanging_pools(mode: Mode) -> tuple[Pool, Pool] | None:
    """Return the pool whose workers hand KV off and the one whose workers take it; None if nothing is handed off."""
    if mode == "colocated":
        return None
    return ("prefill", "decode") if mode == "disaggregated" else ("adaptive", "adaptive")


def answer_pool(mode: Mode, usable: Collection[Pool]) -> Pool:
    """Return the pool that decodes; `usable` are those with a usable worker.

    Prefill workers decode while no decode worker is usable and one of theirs is.
    """
    decodes = pools_of(mode)[-1]
    return "prefill" if decodes == "decode" and "decode" not in usable and "prefill" in usable else decodes


def route_for(demand: Demand, mode: Mode, min_remote_prefill_tokens: int, usable: Collection[Pool]) -> Route:
    """Return which way a request goes, before a worker is chosen for any part of it."""
    if mode == "colocated":
        return WHOLE_REPLICA
    if mode == "adaptive":
        return ADAPTIVE_WHOLE
    if answer_pool(mode, usable) == "prefill":
        return WITHOUT_DECODE
    if demand.prompt_tokens < min_remote_prefill_tokens:
        return SHORT_PROMPT
    return SPLIT if "prefill" in usable else WITHOUT_PREFILL


# Which worker


def least_prompt_tokens(_demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Score by outstanding prompt tokens, because prefill is compute-bound."""
    return (load.outstanding_prompt_tokens, load.running)


def fewest_running_then_most_free(_demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Score by running sequences, since each costs a decode step about the same; free KV blocks break ties."""
    return (load.running, -load.kv_blocks_free)


def least_work(_demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Score a whole replica: prompt tokens first, since one prompt delays every sequence there."""
    return (load.outstanding_prompt_tokens, load.running, -load.kv_blocks_free)


def room_then_fewest_running(demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Prefer workers whose free, unpromised blocks hold the sequence, and that have a place in the batch.

    A worker without room would make it wait, or take blocks from sequences that it must then compute again. Of those
    with room, the one with the fewest running sequences; a nearer one may have `NEARER_MAY_RUN` more.
    """
    left = load.kv_blocks_free - load.kv_blocks_promised - blocks_needed(demand, load.block_size_tokens)
    room = left >= 0 and load.running < load.max_running
    running = load.running * (1 + NEARER_MAY_RUN * load.distance) + load.distance / 4
    return (0, running, -left) if room else (1, -left, load.running)


NEARER_MAY_RUN = 0.1
"""A nearer decode worker is preferred while it runs at most this fraction more sequences than a farther one, for each
step of distance: KV travels through memory or one switch, and each further sequence slows a decode step by less."""


def distance(one: WorkerDescription, other: WorkerDescription) -> int:
    """Return 0 for workers on one node, 1 in one rack, 2 for what is farther or not known."""
    if one.node and one.node == other.node:
        return 0
    return 1 if one.rack and one.rack == other.rack else 2


PROMPT_SCORERS: Mapping[Pool, Scorer] = {
    "prefill": least_prompt_tokens,
    "decode": fewest_running_then_most_free,
    "colocated": least_work,
    "adaptive": least_work,
}
"""The scorer for the worker that computes a prompt, for each pool that may; in pool `adaptive` while no model of a
worker's steps is known."""
DECODE_SCORER: Scorer = room_then_fewest_running
"""The scorer for the worker that decodes after a hand-off."""


def pick(demand: Demand, loads: Iterable[WorkerLoad], scorer: Scorer) -> str:
    """Return the id of the worker with the lowest score of those that take work; the first of equals. Raises NoWorker.

    It is called only for a request that goes to the worker it returns, so a scorer may keep track of its choices.
    """
    candidates = [load for load in loads if load.takes_work]
    if demand.avoided:  # they are reached from elsewhere; if there is no other, the router finds out itself
        candidates = [load for load in candidates if load.worker_id not in demand.avoided] or candidates
    if not candidates:
        raise NoWorker("no worker is connected and accepting work")
    return min(candidates, key=lambda load: scorer(demand, load)).worker_id


# How much of a worker


SPARE_FRACTION = 0.25
"""The fraction of a decode worker's KV blocks that prompts must leave free before they are prefilled."""


def blocks_needed(demand: Demand, block_size_tokens: int) -> int:
    """Return the KV blocks of a sequence with half of its longest answer, since most answers end earlier."""
    return -(-(demand.prompt_tokens + demand.output_tokens // 2) // block_size_tokens)


def context_tokens(demand: Demand) -> int:
    """Return the mean context of the sequence while it decodes, if its answer is as long as it may be."""
    return demand.prompt_tokens + demand.output_tokens // 2


def prompt_blocks(demand: Demand, block_size_tokens: int) -> int:
    """Return the KV blocks of its prompt alone."""
    return -(-demand.prompt_tokens // block_size_tokens)


def room_to_overlap(load: WorkerLoad, needed_blocks: int) -> bool:
    """Return whether a prompt may hold blocks on the decode worker during its prefill without starving decode.

    Many prompts can begin between two reports of a worker, so what was promised there counts as held.
    """
    held = max(needed_blocks, load.kv_blocks_promised)
    return load.kv_blocks_free - held >= SPARE_FRACTION * load.kv_blocks_total
