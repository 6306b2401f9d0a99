"""The latest decisions of mode `adaptive`, each with what was predicted, what else there was, and what came of it.

`router.observe.metrics` records them; `GET /ridgeline/decisions` (`router.front.admin`) shows them to operators.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import msgspec

from router.fleet.adaptive import Decision, Option
from router.observe.timeline import Outcome, RequestTimeline

KEPT: Final = 256
"""Decisions that are kept, about 1 KB each."""
MOST_ID_CHARACTERS: Final = 80
"""A request's id may be its client's own."""


class Explained(msgspec.Struct, frozen=True):
    """A sequence that has ended, with the decision by which it got its workers at last."""

    ended_s: float
    request_id: str
    outcome: Outcome
    path: str
    decision: Decision
    output_tokens: int
    ttft_s: float | None
    """None without any token."""
    tpot_s: float | None
    """None with less than two tokens."""
    lost_workers: int
    """Workers that it lost while it was served; what was seen then includes the pauses."""

    def as_row(self, now_s: float) -> dict[str, Any]:
        """Return it for JSON, where a limit that there is not is null."""
        decision, wanted = self.decision, self.decision.wanted
        options = (decision.chosen, *decision.others)
        lost = decision.lost or (None,) * len(options)
        return {
            "request_id": self.request_id,
            "ended_s_ago": round(max(0.0, now_s - self.ended_s), 3),
            "outcome": self.outcome,
            "path": self.path,
            "reason": decision.reason,
            "waited_s": wanted.waited_s,
            "held_s": decision.held_s,
            "prompt_tokens": wanted.prompt_tokens,
            "ttft_limit_s": _finite(wanted.ttft_limit_s),
            "tpot_limit_s": _finite(wanted.tpot_limit_s),
            "expected": {"output_tokens": wanted.output_tokens},
            "seen": {
                "output_tokens": self.output_tokens,
                "ttft_s": self.ttft_s,
                "tpot_s": self.tpot_s,
                "lost_workers": self.lost_workers,
            },
            "options": [_option_row(option, loses) for option, loses in zip(options, lost, strict=True)],
        }


class Explanations:
    """The latest decisions of this router. `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: deque[Explained] = deque(maxlen=KEPT)

    def add(self, timeline: RequestTimeline, outcome: Outcome) -> None:
        """Keep the decision of a sequence that has ended, if its workers were chosen by one."""
        if timeline.decision is None:
            return
        self._latest.appendleft(
            Explained(
                ended_s=self._clock(),
                request_id=timeline.request_id[:MOST_ID_CHARACTERS],
                outcome=outcome,
                path=timeline.path,
                decision=timeline.decision,
                output_tokens=timeline.num_output_tokens,
                ttft_s=timeline.ttft_s,
                tpot_s=timeline.tpot_s,
                lost_workers=len(timeline.pauses_s),
            )
        )

    def rows(self, most: int) -> list[dict[str, Any]]:
        """Return the latest ones for JSON, newest first."""
        now_s = self._clock()
        return [one.as_row(now_s) for one in islice(self._latest, most)]


def _option_row(option: Option, loses: float | None) -> dict[str, Any]:
    return {**msgspec.structs.asdict(option), "lost": loses}


def _finite(limit_s: float) -> float | None:
    return limit_s if math.isfinite(limit_s) else None
