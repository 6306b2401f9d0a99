"""One leg of one request and what comes back for it: msgpack structs, no engine types, no pickle.

The router sends tasks and reads deltas, `worker_runtime/` runs them. Every new field needs a default; fields are never
renamed, so that a router and a worker one version apart still talk.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from ridgeline.contracts.errors import InvalidTask
from ridgeline.contracts.handoff import KvHandoff, TransferResult
from ridgeline.contracts.vocabulary import ErrorKind, FirstToken, Leg


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A LoRA adapter: the `model` by which requests choose it, and the files that it is."""

    name: str
    digest: str
    """Of the content of its files: with other files it is another adapter."""
    path: str
    """The folder with its files, on every node with workers."""

    @property
    def key(self) -> str:
        """What tells it from every other one, in caches, hand-offs and engines."""
        return f"{self.name}@{self.digest}"

    @property
    def number(self) -> int:
        """The number by which engines know it: derived, so that all routers have the same one, and not used again."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "big") >> 2 or 1


class GenerateTask(msgspec.Struct, frozen=True, kw_only=True):
    """One leg of one request, sent to one worker.

    `sampling` holds all that the client asked for (`ridgeline.engine.request.sampling.encode`): each worker derives its
    own leg from it. `emitted_token_ids` are output tokens the client already has; the worker goes on after them and
    sends none again. `first_token` says how: `continue` computes them as part of the prompt, `resample` has decode
    produce every token itself, also those once more (`ridgeline.engine.request.forced_tokens`), so that its sampling
    state is right. `handoff` tells a decode worker where the KV of `prompt_token_ids` lies; without it the worker
    computes it. If the hand-off is not complete, its transfer overlaps the prefill and brings the first token along.
    A prefill worker's `handoff` has the beginning of the prompt only, as another worker has cached it.
    `cache_salt` keeps the request's blocks apart in the prefix caches, on every worker: only requests with the same
    salt find them. `tpot_limit_s` is the time per output token that the sequence may take; its engine then bounds the
    prompt tokens in its steps so that it does not take longer. 0: no limit. `sure_output_tokens`: how long the answer
    will most likely become at least, emitted tokens included; 0: not known. `adapter` is the LoRA adapter that computes
    every token of it, on every worker; None: the model alone.
    """

    request_id: str
    leg: Leg
    prompt_token_ids: list[int]
    sampling: bytes
    emitted_token_ids: list[int] = msgspec.field(default_factory=list)
    first_token: FirstToken = "continue"
    handoff: KvHandoff | None = None
    recompute_reason: str = ""
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    adapter: Adapter | None = None
    tpot_limit_s: float = 0.0
    sure_output_tokens: float = 0.0

    @property
    def adapter_key(self) -> str:
        """What marks a hand-off of it; empty for the model alone."""
        return self.adapter.key if self.adapter else ""

    def require_own_kv(self) -> None:
        """Raise InvalidTask if the KV of its hand-off was computed with another adapter."""
        if self.handoff is not None and self.handoff.adapter != self.adapter_key:
            theirs, ours = self.handoff.adapter or "none", self.adapter_key or "none"
            raise InvalidTask(f"KV of adapter {theirs} for a task of {ours}")


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top tokens, or those asked for, in order."""

    token_ids: list[int]
    logprobs: list[float]
    chosen_rank: int


class LegTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one leg on its worker, in seconds. Never clock readings: clocks differ between hosts."""

    queue_s: float
    """Seconds from the engine's queue to the leg's first step; on decode this includes the wait for KV."""
    first_token_s: float
    """Seconds from the first step to the leg's first token."""
    compute_s: float
    """Seconds from the first step to the leg's last token, which on prefill is its only one."""
    transfer_result: TransferResult | None = None


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step produced for one request. Exactly one delta of a leg has `finished` set."""

    request_id: str
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    finish_reason: str | None = None
    """vLLM's reason (stop, length, abort, error); None with `finished` when the request goes on elsewhere."""
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    handoff: KvHandoff | None = None
    """The hand-off of a prefill leg.

    If it is not complete, decode can begin to fetch, and the leg's token is still to come.
    """
    timing: LegTiming | None = None
    error: str | None = None
    error_kind: ErrorKind = ""


class StepBatch(msgspec.Struct, frozen=True):
    """All deltas of one engine step for one router."""

    deltas: list[TokenDelta]
