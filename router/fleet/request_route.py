"""What a request asks for, its way through the pools of a mode, and the room that it needs. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import msgspec

from ridgeline.contracts.handoff import KvLayout
from ridgeline.contracts.vocabulary import Mode, Pool
from ridgeline.router.client_identity import ANONYMOUS
from ridgeline.router.fleet.prefixes import BlockHashes

Path = Literal["disaggregated", "fallback", "decode_only", "colocated"]
"""The path of a request. `disaggregated`: prefill on one worker, decode on another. `decode_only`: decode computes the
prompt too, because it is too short for a remote prefill. `fallback`: one worker does both, because the transfer of its
KV failed, or the workers of one pool were not available. `colocated`: a whole replica does both."""


class NoWorker(Exception):
    """No worker of the pool can take the request now."""


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
    urgent: bool = False
    """Whether it goes before all others."""
    probe: bool = False
    """Whether it goes through prefill however short it is."""
    adapter: str = ""
    """The key of its LoRA adapter; empty: the model alone."""


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
    if demand.prompt_tokens < min_remote_prefill_tokens and not demand.probe:
        return SHORT_PROMPT
    return SPLIT if "prefill" in usable else WITHOUT_PREFILL


def blocks_needed(demand: Demand, layout: KvLayout) -> int:
    """Return the KV blocks of a sequence with half of its longest answer, since most answers end earlier."""
    return layout.blocks_of(context_tokens(demand))


def context_tokens(demand: Demand) -> int:
    """Return the mean context of the sequence while it decodes, if its answer is as long as it may be."""
    return demand.prompt_tokens + demand.output_tokens // 2
