"""The messages between router and workers: msgpack structs, no engine types, no pickle.

Called by `router/` (which sends tasks and reads deltas) and by `engine/host.py` (which runs them). Every new field
needs a default; fields are never renamed, so that a router and a worker one version apart still talk.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kv_transfer.handoff import FetchReceipt, KvHandoff, KvLayout

Pool = Literal["prefill", "decode", "colocated"]
Leg = Literal["prefill", "decode"]
FirstToken = Literal["continue", "resample"]
ErrorKind = Literal["", "invalid", "engine", "handoff", "draining"]
Health = Literal["", "draining", "drained", "actor_died", "engine_died", "stalled", "unreachable", "cut_off"]
"""Why a worker must be replaced; not with "" (it is fine), while it drains, and once it has left on purpose.

`unreachable` does not answer the supervisor; `cut_off` does, and the router does not reach it.
"""


class GenerateTask(msgspec.Struct, frozen=True, kw_only=True):
    """One leg of one request, sent to one worker.

    `sampling` is the client's whole wish (`engine.sampling.encode`): each worker derives its own leg from it.
    `emitted_token_ids` are output tokens the client already has; the worker goes on after them and sends none again.
    `first_token` says how: `continue` computes them as part of the prompt, `resample` has decode produce every token
    itself, also those once more (`engine.forced_tokens`), so that its sampling state is right.
    `handoff` tells a decode worker where the KV of `prompt_token_ids` lies; without it the worker computes it. One that
    is not complete is followed while prefill computes it, and brings the first token along.
    `cache_salt` keeps its blocks out of the prefix caches of requests with another one, on every worker.
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


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the top tokens, or those asked for, in order."""

    token_ids: list[int]
    logprobs: list[float]
    chosen_rank: int


class LegTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of one leg on its worker, in seconds. Never clock readings: clocks differ between hosts."""

    queue_s: float
    """From the engine's queue to its first step; on decode this includes the wait for KV."""
    first_token_s: float
    """From the first step to the leg's first token."""
    compute_s: float
    """From the first step to the leg's last token: on prefill, its only one."""
    receipt: FetchReceipt | None = None


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
    """Of a prefill leg. Not complete: it can be followed from now on, and the leg's token is still to come."""
    timing: LegTiming | None = None
    error: str | None = None
    error_kind: ErrorKind = ""


class StepBatch(msgspec.Struct, frozen=True):
    """All deltas of one engine step for one router."""

    deltas: list[TokenDelta]


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is; read once when the router connects."""

    worker_id: str
    incarnation: str
    pool: Pool
    pid: int
    host: str
    layout: KvLayout
    transfer_addresses: list[str]
    """Where its KV blocks can be fetched, one for each tensor parallel rank."""
    num_kv_blocks: int
    block_size_tokens: int
    max_model_len_tokens: int
    max_num_seqs: int
    """Sequences that its engine runs at a time."""
    repeats_tokens: bool = True
    """Can go on after emitted tokens in `resample` mode."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is doing: gauges now, counters since its start (names ending in `_total`)."""

    worker_id: str
    running: int = 0
    waiting: int = 0
    tasks: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    """Flat names, as `accounting.StepAccountant.counters` and `connector_worker` give them."""
    draining: bool = False
    engine_failed: bool = False
    lingering_handoffs: list[str] = msgspec.field(default_factory=list)
    """The lives of hand-offs that were not released for long, a sentence each; the oldest ones."""
    stalled_s: float = 0.0
    """Since the engine's last step, while it has work; 0 without work."""
    incarnation: str = ""


class AttachRequest(msgspec.Struct, frozen=True):
    """A router opens its one stream of step batches, to this worker and to no other that has got its port."""

    router_id: str
    worker_id: str = ""
    incarnation: str = ""
    """Of `WorkerDescription`; both empty: whoever answers."""


class SubmitRequest(msgspec.Struct, frozen=True):
    """A router gives a worker one task; its deltas come on the attached stream."""

    router_id: str
    task: GenerateTask
    worker_id: str = ""
    incarnation: str = ""
    """As in `AttachRequest`."""


class AbortRequest(msgspec.Struct, frozen=True):
    """A router no longer wants these requests; unknown ids are ignored."""

    router_id: str
    request_ids: list[str]


class PairRequest(msgspec.Struct, frozen=True):
    """A router tells a decode worker which sources it will fetch from, and perhaps by what from now on."""

    addresses: list[str]
    transport: str | None = None


class PairAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """For each source: transport and what stood in the way of better, or why there can be no hand-over."""

    paired: dict[str, tuple[str, str]]
    refused: dict[str, str]


class DrainRequest(msgspec.Struct, frozen=True):
    """Leave: no new tasks, the running ones get `timeout_s`, then wait until nobody needs the KV here any more."""

    timeout_s: float


class Ack(msgspec.Struct, frozen=True):
    """The worker has taken the message."""

    accepted: bool = True
    reason: str = ""
    attached: bool = True
    """Of a task that was not accepted: whether the worker has a stream of this router."""
