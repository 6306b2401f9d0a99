"""The TPOT slack of sequences: how long the next step may take under their limits. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ridgeline.contracts.workers import DECODE_STEP_MARGIN, FUTURE_SLACK_USED, LOST_LIMITS, MOST_LIMITS, TPOT_LIMIT_USED

CATCH_UP: Final = 0.75
"""A sequence without slack asks for steps that are down to this part of what its limit leaves. Steps take longer than
predicted now and then; without this, each such step would stay in the mean for good."""


@dataclass(frozen=True)
class DecodeSteps:
    """The time of steps without prompts."""

    alone_s: float = 0.0
    """One of the sequence alone."""
    together_s: float = 0.0
    """One of all that decode."""
    tokens: float = 1.0
    """What a sequence gets of one: above 1 with speculation."""


@dataclass
class _Sequence:
    limit_s: float
    repeated_tokens: int
    sure_tokens: float
    begun_s: float = math.inf
    """When its first token here was due to be there, or its first step began; infinity before."""
    begun_with_tokens: float = 0
    waited_s: float = 0.0
    """What its reader had waited for it before its first step here."""


class TpotSlack:
    """The sequences that have a limit on their time per output token, and the slack of each."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Sequence] = {}

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def expect(self, request_id: str, limit_s: float, repeated_tokens: int = 0, sure_tokens: float = 0.0) -> None:
        """Register a sequence that will most likely make at least `sure_tokens`.

        Its first `repeated_tokens` its client has already, so they give it no slack.
        """
        self._sequences[request_id] = _Sequence(limit_s, repeated_tokens, sure_tokens)

    def joins(self, request_id: str, waited_s: float) -> None:
        """Note how long a sequence has waited for its first step since its KV came; unknown ids are ignored."""
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.waited_s = waited_s

    def forget(self, request_id: str) -> None:
        """Forget a sequence that has ended; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def allowance_s(self, request_id: str, tokens: float, left_tokens: float, now_s: float, bare: DecodeSteps) -> float:
        """Return how long the step that makes its next token may take from `now_s`; infinity without a limit.

        `tokens` will be made by `now_s`, from when nothing else is computed. The mean counts, so a sequence with
        slack lets a longer chunk through, and so does one that will have it, by `FUTURE_SLACK_USED` of what it can
        save in its P25 output length: up to `MOST_LIMITS` limits. One that is late asks for less than the limit, down
        to `CATCH_UP` of it.

        One that would miss its limit even if each of the `left_tokens` that it may still make took only a step of
        itself alone lets steps take `LOST_LIMITS` limits, or as many bare steps if these take longer. So does one that
        would miss it beside those that decode now, if `DECODE_STEP_MARGIN` bare steps of all take more than is used of
        its limit. To ask for less would only make everybody's prompts late, and steps of a whole prompt would delay
        the sequences that join meanwhile.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return math.inf
        if sequence.begun_s == math.inf or tokens <= sequence.repeated_tokens:
            sequence.begun_s, sequence.begun_with_tokens = now_s - sequence.waited_s, tokens
        spent_s, limit_s = now_s - sequence.begun_s, sequence.limit_s * bare.tokens  # from here on all is by steps
        made, left = (tokens - sequence.begun_with_tokens) / bare.tokens, left_tokens / bare.tokens
        allowed_s = TPOT_LIMIT_USED * limit_s
        bare_s = DECODE_STEP_MARGIN * bare.together_s
        least_s, may_s = (bare.alone_s, limit_s) if bare_s <= allowed_s else (bare_s, allowed_s)
        if spent_s + left * least_s > may_s * (made + left):
            return LOST_LIMITS * max(limit_s, bare.together_s)
        after_next = max(0.0, min(left, (sequence.sure_tokens - tokens) / bare.tokens) - 1.0)
        saves_s = after_next * max(0.0, allowed_s - bare_s)
        may_take_s = allowed_s * (made + 1) - spent_s + FUTURE_SLACK_USED * saves_s
        return min(MOST_LIMITS * allowed_s, max(CATCH_UP * allowed_s, may_take_s))

    def arrival_s(self, request_id: str, bare: DecodeSteps = DecodeSteps()) -> float:
        """Return how long a step may take while the sequence's KV is on its way; infinity without a limit.

        Its next token waits for the end of that step, and of the one after it. Still it is allowed more than a token's
        time, since prompts that are computed in many small steps beside nothing that decodes take longer. A limit
        that a bare step of all that decode exceeds counts as much as that step.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return math.inf
        return MOST_LIMITS * max(TPOT_LIMIT_USED * sequence.limit_s * bare.tokens, bare.together_s)
