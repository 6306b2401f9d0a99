"""A request: what its client asked for, its state and tokens so far, and the tasks that an attempt sends to workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.tasks import Adapter, GenerateTask, LegTiming, TokenDelta
from ridgeline.contracts.vocabulary import FirstToken, Leg, Pool
from ridgeline.router.client_identity import ANONYMOUS
from ridgeline.router.fleet.prefixes import BlockHashes, block_hashes
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.observe.metrics import RequestMetrics
from ridgeline.router.observe.timeline import RequestState, RequestTimeline
from ridgeline.router.placement.placement_events import Answer, Reuse, Reused
from ridgeline.router.scheduler.features import Assignment

logger = logging.getLogger(__name__)
Emit = Callable[[TokenDelta], bool]
"""Sends a delta to the client; returns True if no more is wanted, because a stop string was found."""


@dataclass(frozen=True)
class Sampling:
    """How a client wants its tokens sampled. The front end encodes it; only workers decode it."""

    encoded: bytes
    """The content of `GenerateTask.sampling`."""
    max_tokens: int
    """Largest number of tokens in the answer; 0 if not given."""
    resample_reason: str | None
    """Why decode must sample the first token itself; None: it continues from the one that prefill sampled."""
    reads_cache: bool = True
    """Whether what a cache has of the prompt is used; not if the client wants the log-probabilities of the prompt."""

    @property
    def first_token(self) -> FirstToken:
        """The first-token mode of a hand-off for this request."""
        return "continue" if self.resample_reason is None else "resample"


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate; a request with n > 1 becomes n of these."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    """Only requests with the same salt share prefix caches."""
    adapter: Adapter | None = None
    """Its LoRA adapter; None: the model alone."""
    client_request_id: str = ""
    """The id that its client knows; of n sequences each has its number appended."""
    http_request_id: str = ""
    """The header x-request-id of its answer; empty for a health probe."""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """The headers by which its client named its own span (W3C trace context), for the spans of this one."""
    client: str = ANONYMOUS
    """The client whose share its prompt tokens count against."""
    probe: bool = False
    """Whether it is a health probe of /ready. It goes before all waiting requests and always through prefill, and
    no request series counts it."""
    timeout_s: float | None = None
    """Seconds that the client allows, if less than router.request_timeout_s."""
    ttft_limit_s: float | None = None
    """Seconds from `head_read_s` to the first token that are wanted at most; None: no limit, as for a health probe."""
    tpot_limit_s: float | None = None
    """Mean seconds from one token to the next that are wanted at most; None: no limit."""
    head_read_s: float | None = None
    """When the router had read the head of its HTTP request, on the monotonic clock; None for a health probe."""

    @property
    def demand(self) -> Demand:
        """What it asks for before it has begun."""
        return Demand(
            len(self.prompt_token_ids),
            self.sampling.max_tokens,
            self.client,
            ttft_limit_s=math.inf if self.ttft_limit_s is None else self.ttft_limit_s,
            tpot_limit_s=math.inf if self.tpot_limit_s is None else self.tpot_limit_s,
            urgent=self.probe,
            probe=self.probe,
            adapter=self.adapter.key if self.adapter else "",
        )

    @property
    def prefix_salt(self) -> str | None:
        """What keeps its prefix apart from others of the same tokens: KV depends on the adapter too."""
        return f"{self.adapter.key} {self.cache_salt or ''}" if self.adapter else self.cache_salt


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    "queued": frozenset({"queued", "prefilling"}),
    "prefilling": frozenset({"queued", "handoff", "decoding"}),
    "handoff": frozenset({"queued", "decoding"}),
    "decoding": frozenset({"queued", "decoding"}),
}
"""The allowed next states. Back to `queued`: a worker was lost, or none was available. From `prefilling` to `decoding`:
one worker does both."""


class IllegalTransition(RuntimeError):
    """The router moved a request to a state that cannot follow; an error of the router, not of the request."""


class RequestProgress:
    """A sequence that is served: its state, and the tokens that its client has and that no worker may send again.

    Positions are contiguous: every worker gets `token_ids` and continues after them. Decisions are based on this;
    timeline and metrics only record it. Each pass through the workers is an attempt, which has tasks for its legs.
    """

    def __init__(
        self,
        request: SequenceRequest,
        emit: Emit,
        timeline: RequestTimeline,
        metrics: RequestMetrics,
        hashed_block_tokens: int = 0,
    ) -> None:
        """`hashed_block_tokens`: see `Orchestrator`; 0: nobody asks who has the beginning of the prompt."""
        self.request = request
        self.timeline = timeline
        self.metrics = metrics
        """The metrics that count this request."""
        self.token_ids: list[int] = []
        self.ended = False
        self.assignment: Assignment | None = None
        """Why the attempt goes where it goes, if a policy chose that."""
        self.reused: Reused | None = None
        """What another worker had of the prompt, if one was asked and has answered."""
        self._emit = emit
        self._hashed_block_tokens = hashed_block_tokens
        self._state: RequestState = "queued"
        self._attempt = 0

    @property
    def state(self) -> RequestState:
        """The current state."""
        return self._state

    def advance(self, to: RequestState, **facts: str | None) -> None:
        """Enter this state, which the log tells with these facts; one that takes it back to the queue is rare.

        Raises IllegalTransition if `TRANSITIONS` does not allow it.
        """
        if to not in TRANSITIONS[self._state]:
            raise IllegalTransition(f"a request that is {self._state!r} cannot become {to!r}")
        self._state = to
        level = logging.INFO if to == "queued" else logging.DEBUG
        logger.log(level, to, extra={**self.timeline.ids, **facts})

    def migrate(self, why: str = "") -> None:
        """Queue the request again, to continue elsewhere after the tokens that its client has (request migration)."""
        self.timeline.interrupted(self._state)
        self.advance("queued", why=why)
        self.assignment = self.reused = None
        self._attempt += 1

    def send(self, delta: TokenDelta, pool: Pool) -> bool:
        """Send on a delta made by a worker of `pool`; return True if no more is wanted."""
        self.token_ids += delta.token_ids
        self.timeline.tokens(len(delta.token_ids), pool)
        enough = self._emit(delta)
        self.ended = self.ended or enough or delta.finished
        return enough

    def demand(self) -> Demand:
        """Return what the attempt that begins now asks for."""
        first = self.request.demand
        return replace(
            first,
            prompt_tokens=first.prompt_tokens + len(self.token_ids),  # what the client already has counts as prompt
            ttft_limit_s=math.inf if self.token_ids else first.ttft_limit_s,
            prefix=self._prefix() if self.request.sampling.reads_cache or self.token_ids else (),
            waited_s=self.timeline.clock() - self.timeline.arrived_s,
            urgent=first.urgent or self._attempt > 0,  # its client has waited once, and may have half of its answer
        )

    def answer(self) -> Answer:
        """Return what can be learned from the complete answer."""
        timeline = self.timeline
        resamples = timeline.prefill_timing is not None and self.request.sampling.first_token == "resample"
        return Answer(
            timeline.num_output_tokens,
            *timeline.moved,
            prefix=self._prefix(),
            overhead_s=None if resamples else timeline.overhead_s,  # decode made the first token, after the hand-off
            ttft_s=timeline.ttft_s,
            tpot_s=timeline.tpot_s,
            reused=self.reused,
        )

    def _prefix(self) -> BlockHashes:
        """Return the hashes of the blocks of the prompt and of the tokens that the client has."""
        if not self._hashed_block_tokens:
            return ()
        request = self.request
        tokens = [*request.prompt_token_ids, *self.token_ids]
        return block_hashes(tokens, self._hashed_block_tokens, request.prefix_salt)

    def reuse_began(self, wanted: Reuse, offer: KvHandoff | None, asked_s: float) -> None:
        """Note what a worker has offered of the prompt after a question that took so long."""
        self.reused = Reused(wanted, 0 if offer is None else offer.num_tokens, waited_s=asked_s)
        if offer is None:
            self.metrics.reuse.labels("not_cached").inc()

    def reuse_ended(self, timing: LegTiming | None) -> None:
        """Note what came of the offer, if there was one, once the prompt is computed."""
        offered = self.reused
        if offered is None or not offered.cached_tokens:
            return
        result = None if timing is None else timing.transfer_result
        if result is None:
            self.metrics.reuse.labels("already_cached").inc()
            return
        self.metrics.reuse.labels(result.reason or "ok").inc()
        if result.outcome == "ok":
            self.metrics.reused_tokens.labels("prefill").inc(result.num_tokens)
            self.reused = replace(
                offered, kv_bytes=result.num_bytes, wire_s=result.wire_s, waited_s=offered.waited_s + result.wait_s
            )

    def whole_task(self, recompute_reason: str) -> GenerateTask:
        """Return the task for one worker that computes everything."""
        return self._task("decode", recompute_reason=recompute_reason)

    def prefill_task(self, cached: KvHandoff | None = None) -> GenerateTask:
        """Return the task for prefill: the prompt and the tokens that the client already has.

        `cached` has the beginning of these.
        """
        return self._task("prefill", handoff=cached)

    def decode_task(self, handoff: KvHandoff) -> GenerateTask:
        """Return the task for what follows the hand-off's tokens."""
        name = "decode" if handoff.complete else "decode-overlaps"
        return self._task("decode", name, handoff=handoff)

    def _task(
        self, leg: Leg, name: str | None = None, *, handoff: KvHandoff | None = None, recompute_reason: str = ""
    ) -> GenerateTask:
        request, again = self.request, f"-again{self._attempt}" if self._attempt else ""
        return GenerateTask(
            request_id=f"{request.request_id}-{name or leg}{again}",
            leg=leg,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling.encoded,
            emitted_token_ids=list(self.token_ids),
            first_token=request.sampling.first_token,
            handoff=handoff,
            recompute_reason=recompute_reason,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            **self._limits(),
        )

    def _limits(self) -> dict[str, float]:
        limit_s, assignment = self.request.demand.tpot_limit_s, self.assignment
        if assignment is None or assignment.request is None or not assignment.paced or not math.isfinite(limit_s):
            return {}
        return {"tpot_limit_s": limit_s, "sure_output_tokens": assignment.request.sure_tokens}
