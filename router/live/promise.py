"""What clients got lately: exact latencies of the sequences that ended, who met its SLOs, and each one for the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ridgeline.router.live.state import HandoffNow, Quantiles, RequestNow, StageNow
from ridgeline.router.observe.ended_requests import EndedRequest, Handoff
from ridgeline.router.observe.timeline import Stage

_LEGS = {
    "preprocess": "router",
    "queue": "router",
    "dispatch": "router",
    "engine_queue": "prefill",
    "prefill": "prefill",
}
"""Of stages; the others belong to the leg that decodes."""


@dataclass(frozen=True)
class Recent:
    """Sequences that ended within so many seconds. A cancelled one counts by the latencies that it had."""

    ended: Sequence[EndedRequest]
    seconds: float

    @property
    def ttft_s(self) -> Quantiles | None:
        """Of those with a token."""
        return quantiles_of([one.ttft_s for one in self.ended if one.ttft_s is not None])

    @property
    def tpot_s(self) -> Quantiles | None:
        """Of those with two tokens or more."""
        return quantiles_of([one.tpot_s for one in self.ended if one.tpot_s is not None])

    def attainment(self, met: Callable[[EndedRequest], bool | None]) -> float | None:
        """Return the share of those with a limit that have met it; None without any."""
        known = [ok for one in self.ended if (ok := met(one)) is not None]
        return sum(known) / len(known) if known else None

    @property
    def goodput_per_s(self) -> float | None:
        """Finished sequences a second that met each of their limits; None if none has a limit."""
        met = [met_all(one) for one in self.ended]
        return None if all(one is None for one in met) else sum(map(bool, met)) / self.seconds


def met_ttft(one: EndedRequest) -> bool | None:
    """Return whether it met its limit; None if it has none, or was cancelled before its first token."""
    return _met(one, one.ttft_s, one.ttft_limit_s)


def met_tpot(one: EndedRequest) -> bool | None:
    """Return whether it met its limit; None if it has none, or one token only."""
    return _met(one, one.tpot_s, one.tpot_limit_s)


def met_all(one: EndedRequest) -> bool | None:
    """Return whether it met all limits that it has; None without any."""
    known = [ok for ok in (met_ttft(one), met_tpot(one)) if ok is not None]
    return all(known) if known else None


def _met(one: EndedRequest, seconds: float | None, limit_s: float | None) -> bool | None:
    if limit_s is None or (seconds is None and one.outcome != "failed"):
        return None
    return one.outcome != "failed" and seconds is not None and seconds <= limit_s


def quantiles_of(values: list[float]) -> Quantiles | None:
    """Return the smallest values that so large parts of them do not exceed; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(*(ordered[max(0, math.ceil(part * len(ordered)) - 1)] for part in (0.5, 0.9, 0.99)))


def shown(one: EndedRequest) -> RequestNow:
    """Return it for the page."""
    prefill = next((stage.worker for stage in one.stages if stage.name == "prefill"), "")
    decode = next((stage.worker for stage in reversed(one.stages) if stage.worker), prefill)
    return RequestNow(
        id=one.request_id,
        outcome=one.outcome,
        path=one.path,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        prefill_worker=prefill or decode,
        decode_worker=decode,
        arrived_s_ago=one.ended_s_ago + one.latency_s,
        ended_s_ago=one.ended_s_ago,
        ttft_s=one.ttft_s,
        tpot_s=one.tpot_s,
        ttft_ok=met_ttft(one),
        tpot_ok=met_tpot(one),
        stages=list(map(_stage, one.stages)),
        retries=one.placements - 1,
        handoff=None if one.handoff is None else _handoff(one.handoff),
        decision=one.decision,
    )


def _stage(stage: Stage) -> StageNow:
    return StageNow(stage.name, _LEGS.get(stage.name, "decode"), stage.start_s, stage.duration_s)


def _handoff(moved: Handoff) -> HandoffNow:
    rate = moved.num_bytes / moved.wire_s if moved.wire_s and not moved.overlapped else None
    return HandoffNow(moved.transport, moved.num_bytes, moved.overlapped, moved.wait_s, moved.wire_s, rate)
