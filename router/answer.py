"""What one client asked for, and what it has got so far: tokens that no worker may send again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.sampling_params import SamplingParams

from engine.messages import Pool, TokenDelta
from router.client_identity import ANONYMOUS
from router.timeline import RequestTimeline

Emit = Callable[[TokenDelta], bool]
"""Gives a delta to the client; True means nothing more is wanted (a stop string was found)."""


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate; a request with n > 1 is n of these."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    """Prefix caches are shared only with requests that have the same one."""
    client: str = ANONYMOUS
    """Whom its prompt tokens count against while others wait too."""
    urgent: bool = False
    """Its prompt goes before all that wait."""
    timeout_s: float | None = None
    """How long its client gives it, if that is less than router.request_deadline_s."""
    head_read_s: float | None = None
    """When the router had read the head of its HTTP request, on the monotonic clock; None for a canary."""


class Answer:
    """One sequence's output. Positions are contiguous: every worker is told `token_ids` and goes on after them."""

    def __init__(self, emit: Emit, timeline: RequestTimeline) -> None:
        self._emit = emit
        self.timeline = timeline
        self.token_ids: list[int] = []
        self.ended = False

    def give(self, delta: TokenDelta, pool: Pool) -> bool:
        """Send on a delta that a worker of `pool` made; True means nothing more is wanted."""
        self.token_ids += delta.token_ids
        self.timeline.tokens(len(delta.token_ids), pool)
        enough = self._emit(delta)
        self.ended = self.ended or enough or delta.finished
        return enough
