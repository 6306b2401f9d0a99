"""What one client asked for, where its request is, what it has got so far, and what an attempt asks workers for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from contracts.handoff import KvHandoff
from contracts.tasks import GenerateTask, TokenDelta
from contracts.vocabulary import FirstToken, Leg, Pool
from router.client_identity import ANONYMOUS
from router.fleet.policy import Demand
from router.observe.metrics import RequestMetrics
from router.observe.timeline import RequestTimeline, State

Emit = Callable[[TokenDelta], bool]
"""Gives a delta to the client; its answer True means nothing more is wanted (a stop string was found)."""


@dataclass(frozen=True)
class Sampling:
    """How a client wants its tokens sampled. The front makes it; from here to the workers nobody looks inside."""

    encoded: bytes
    """What `GenerateTask.sampling` carries."""
    max_tokens: int
    """Tokens the answer may have; 0 if nobody said."""
    resample_reason: str | None
    """Why decode must sample the first token itself; None: it goes on from the one that prefill sampled."""

    @property
    def first_token(self) -> FirstToken:
        """The mode in which a hand-over of such a request goes."""
        return "continue" if self.resample_reason is None else "resample"


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate; a request with n > 1 is n of these."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    """Prefix caches are shared only with requests that have the same one."""
    client: str = ANONYMOUS
    """Whom its prompt tokens count against while others wait too."""
    canary: bool = False
    """It is one of /ready's: it goes before all that wait and through prefill however short it is, and is in no series
    about requests."""
    timeout_s: float | None = None
    """How long its client gives it, if that is less than router.request_deadline_s."""
    head_read_s: float | None = None
    """When the router had read the head of its HTTP request, on the monotonic clock; None for a canary."""

    @property
    def demand(self) -> Demand:
        """What policies see of it before it has begun."""
        return Demand(len(self.prompt_token_ids), self.sampling.max_tokens, self.client)


TRANSITIONS: Mapping[State, frozenset[State]] = {
    "queued": frozenset({"queued", "prefilling"}),
    "prefilling": frozenset({"queued", "handoff", "decoding"}),
    "handoff": frozenset({"queued", "decoding"}),
    "decoding": frozenset({"queued", "decoding"}),
}
"""What may come after what. Back to `queued`: a worker was lost, or none could be had. From `prefilling` to `decoding`:
one worker does both."""


class IllegalTransition(RuntimeError):
    """The router took a request somewhere it cannot go from where it is; a fault of the router, not of the request."""


class RequestProgress:
    """Where one sequence is, and what its client has got: tokens that no worker may send again.

    Positions are contiguous: every worker is told `token_ids` and goes on after them. What is decided, is decided on
    this; timeline and metrics
    listen.
    """

    def __init__(self, emit: Emit, timeline: RequestTimeline, metrics: RequestMetrics) -> None:
        self.timeline = timeline
        self.metrics = metrics
        """Where what happens to it is counted."""
        self.token_ids: list[int] = []
        self.ended = False
        self._emit = emit
        self._state: State = "queued"

    @property
    def state(self) -> State:
        """Where it is now."""
        return self._state

    def advance(self, to: State) -> None:
        """Go to this state; raises IllegalTransition where `TRANSITIONS` has no way there."""
        if to not in TRANSITIONS[self._state]:
            raise IllegalTransition(f"a request that is {self._state!r} cannot become {to!r}")
        self._state = to

    def migrate(self) -> None:
        """Queue it again, to go on elsewhere after the tokens its client has: it was taken from its worker
        (request migration)."""
        self.timeline.interrupted(self._state)
        self.advance("queued")

    def send(self, delta: TokenDelta, pool: Pool) -> bool:
        """Send on a delta that a worker of `pool` made; True means nothing more is wanted."""
        self.token_ids += delta.token_ids
        self.timeline.tokens(len(delta.token_ids), pool)
        enough = self._emit(delta)
        self.ended = self.ended or enough or delta.finished
        return enough


class Attempt:
    """One way of a request through the workers, from the last token its client has: what each leg is asked for."""

    def __init__(self, request: SequenceRequest, progress: RequestProgress, number: int) -> None:
        self.request = request
        self.progress = progress
        self.urgent = request.canary or number > 0
        """A client that has waited once, and perhaps has half of its answer, does not wait again behind others."""
        self.demand = replace(request.demand, prompt_tokens=len(request.prompt_token_ids) + len(progress.token_ids))
        """Its prompt is what the client has too."""
        self._suffix = f"-again{number}" if number else ""

    def whole_task(self, recompute_reason: str) -> GenerateTask:
        """Ask one worker for all of it."""
        return self._task("decode", recompute_reason=recompute_reason)

    def prefill_task(self) -> GenerateTask:
        """Ask for the prompt, and what the client has already."""
        return self._task("prefill")

    def decode_task(self, handoff: KvHandoff) -> GenerateTask:
        """Ask for what comes after the hand-off's tokens."""
        name = "decode" if handoff.complete else "decode-overlaps"
        return self._task("decode", name, handoff=handoff)

    def _task(
        self, leg: Leg, name: str | None = None, *, handoff: KvHandoff | None = None, recompute_reason: str = ""
    ) -> GenerateTask:
        request = self.request
        return GenerateTask(
            request_id=f"{request.request_id}-{name or leg}{self._suffix}",
            leg=leg,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling.encoded,
            emitted_token_ids=list(self.progress.token_ids),
            first_token=request.sampling.first_token,
            handoff=handoff,
            recompute_reason=recompute_reason,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            cache_salt=request.cache_salt,
        )
