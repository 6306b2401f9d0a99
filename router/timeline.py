"""One record per request that joins both legs; the orchestrator fills it, `metrics.py` reads it when it closes.

All times are durations, taken on one clock each: the router's for what a client sees, the worker's for its stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.messages import LegTiming, Pool

Outcome = Literal["finished", "failed", "cancelled"]
Path = Literal["disaggregated", "local", "ineligible"]
"""`local`: whole on one worker. `ineligible`: so by configuration, in a disaggregated deployment."""
State = Literal["queued", "prefilling", "handoff", "decoding"]
"""Where a request is. `handoff`: its first token is out, decode has not produced one yet."""


@dataclass
class RequestTimeline:
    """What happened to one request, as it happens."""

    clock: Callable[[], float]
    request_id: str
    num_prompt_tokens: int
    path: Path = "local"
    arrived_s: float = 0.0
    router_queue_s: float = 0.0
    """The prompt waited so long in the router for a worker."""
    token_times_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    prefill_timing: LegTiming | None = None
    decode_timing: LegTiming | None = None
    followed: bool = False
    """The KV was fetched while prefill went on: waiting for it cost nothing but the last segment."""
    state: State = "queued"
    pauses_s: list[tuple[State, float]] = field(default_factory=list)
    """What each loss of a worker cost the client, and where the request was: from the token before the loss, or the
    arrival, to the token after it."""
    _interrupted: State | None = None

    def __post_init__(self) -> None:
        self.arrived_s = self.clock()

    def tokens(self, count: int) -> None:
        """`count` tokens went to the client now."""
        if not count:
            return
        now_s = self.clock()
        if self._interrupted is not None:
            before_s = self.token_times_s[-1] if self.token_times_s else self.arrived_s
            self.pauses_s.append((self._interrupted, now_s - before_s))
            self._interrupted = None
        self.num_output_tokens += count
        self.token_times_s.append(now_s)

    def interrupted(self) -> None:
        """Its worker is lost; it begins again where it was."""
        self._interrupted = self.state
        self.followed = False
        self.prefill_timing = self.decode_timing = None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return self.token_times_s[0] - self.arrived_s if self.token_times_s else None

    @property
    def second_token_s(self) -> float | None:
        """First token to the next one: where a hand-over would show."""
        return self.token_times_s[1] - self.token_times_s[0] if len(self.token_times_s) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """(latency - TTFT) / (output tokens - 1), vLLM's definition."""
        if self.num_output_tokens < 2 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Gaps between successive deltas."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    def stages_s(self) -> dict[str, float]:
        """Seconds in each stage; a stage that did not happen is absent, not zero."""
        if self.path != "disaggregated":
            return self._local_stages_s()
        stages: dict[str, float] = {}
        if self.prefill_timing is not None:
            stages["queue"] = self.router_queue_s + self.prefill_timing.queue_s
            stages["prefill"] = self.prefill_timing.compute_s
        if self.decode_timing is not None:
            receipt = self.decode_timing.receipt
            wait_s, wire_s = (receipt.wait_s, receipt.wire_s) if receipt else (0.0, 0.0)
            stages["handoff_wait"] = 0.0 if self.followed else wait_s
            stages["wire"] = wire_s
            stages["decode_queue"] = max(0.0, self.decode_timing.queue_s - wait_s - wire_s)
            stages["decode"] = self.decode_timing.compute_s
        return stages

    def _local_stages_s(self) -> dict[str, float]:
        timing = self.decode_timing
        if timing is None:
            return {}
        return {
            "queue": self.router_queue_s + timing.queue_s,
            "prefill": timing.first_token_s,
            "decode": timing.compute_s - timing.first_token_s,
        }


def token_pool(path: Path, mode: str) -> tuple[Pool, Pool]:
    """(pool that makes the first token, pool that makes the others)."""
    if path == "disaggregated":
        return "prefill", "decode"
    return ("colocated", "colocated") if mode == "colocated" else ("decode", "decode")
