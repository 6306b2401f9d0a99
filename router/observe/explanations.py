"""The latest decisions of mode `adaptive`, each with what was predicted and what came of it.

`ridgeline.router.observe.metrics` records them; `GET /ridgeline/decisions` (`ridgeline.router.front.admin`) shows them
to operators, for whom `ridgeline.cluster.commands.decisions` puts them into sentences.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec

from ridgeline.router.observe.timeline import Outcome, RequestTimeline

KEPT: Final = 256
"""Decisions that are kept, about 1.5 KB each."""
SHOWN_BY_DEFAULT: Final = 10
MOST_ID_CHARACTERS: Final = 80
"""A request's id may be its client's own."""


class Explanation(msgspec.Struct, frozen=True):
    """A sequence that has ended, and the decision by which it got its workers at last. Times are in seconds."""

    request_id: str
    """The id that its client knows; `[0]`, `[1]` and so on are appended for a request with n > 1."""
    outcome: Outcome
    path: str
    prompt_tokens: int
    output_tokens: int
    ttft_limit_s: float | None
    tpot_limit_s: float | None
    ttft_s: float | None
    """What its client saw; None without any token."""
    tpot_s: float | None
    """None with less than two tokens."""
    placements: int
    """More than 1 if it was taken from a worker that was lost or drained, and placed again. What is predicted is then
    for the rest of it."""
    policy: str
    """The policy that mode adaptive served by."""
    reason: str
    expected_output_tokens: float
    placed_after_s: float
    """Time from its arrival to the decision."""
    held_s: float
    """See `ridgeline.router.scheduler.features.Assignment`."""
    prompt_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    cached_tokens: int
    """Tokens of the prompt that its worker was expected to have."""
    ended_s_ago: float = 0.0


class Explanations:
    """The latest decisions of this router. `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: deque[tuple[float, Explanation]] = deque(maxlen=KEPT)
        """With the times at which they ended, newest first."""

    def add(self, timeline: RequestTimeline, outcome: Outcome) -> None:
        """Keep the decision of a sequence that has ended, if its workers were chosen by one."""
        assignment = timeline.assignment
        if assignment is None or assignment.request is None:
            return
        explanation = Explanation(
            request_id=_cut(timeline.client_request_id or timeline.request_id),
            outcome=outcome,
            path=timeline.path,
            prompt_tokens=timeline.num_prompt_tokens,
            output_tokens=timeline.num_output_tokens,
            ttft_limit_s=_finite(timeline.ttft_limit_s),
            tpot_limit_s=_finite(timeline.tpot_limit_s),
            ttft_s=timeline.ttft_s,
            tpot_s=timeline.tpot_s,
            placements=1 + timeline.interruptions,
            policy=assignment.policy,
            reason=assignment.reason,
            expected_output_tokens=assignment.request.output_tokens,
            placed_after_s=assignment.request.waited_s,
            held_s=assignment.held_s,
            prompt_worker=assignment.prompt_worker,
            decode_worker=assignment.decode_worker,
            predicted_ttft_s=assignment.ttft_s,
            predicted_tpot_s=assignment.tpot_s,
            cached_tokens=assignment.cached_tokens,
        )
        self._latest.appendleft((self._clock(), explanation))

    def latest(self, most: int) -> list[Explanation]:
        """Return the latest ones, newest first."""
        now_s = self._clock()
        return [
            msgspec.structs.replace(one, ended_s_ago=round(now_s - ended_s, 3))
            for ended_s, one in islice(self._latest, most)
        ]


def _finite(limit_s: float) -> float | None:
    return limit_s if math.isfinite(limit_s) else None


def _cut(request_id: str) -> str:
    """Return a long id without its middle."""
    if len(request_id) <= MOST_ID_CHARACTERS:
        return request_id
    half = MOST_ID_CHARACTERS // 2
    return f"{request_id[: half - 1]}..{request_id[1 - half :]}"
