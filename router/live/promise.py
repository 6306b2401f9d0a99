"""What clients got lately: exact latencies of the sequences that ended, who met its SLOs, and each one for the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ridgeline.router.live.state import HandoffNow, Quantiles, RequestNow, StageNow
from ridgeline.router.observe.ended_requests import EndedRequest, Handoff, Slo
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
    """Sequences that ended within so many seconds."""

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

    @cached_property
    def _met(self) -> list[dict[Slo, bool]]:
        return [one.slos_met() for one in self.ended]

    def attainment(self, slo: Slo) -> float | None:
        """Return the share that met it, of those that it judges; None without any."""
        known = [met[slo] for met in self._met if slo in met]
        return sum(known) / len(known) if known else None

    @property
    def goodput_per_s(self) -> float | None:
        """Sequences a second that met all their SLOs; None if none has one."""
        return sum(met.get("all", False) for met in self._met) / self.seconds if any(self._met) else None


def quantiles_of(values: list[float]) -> Quantiles | None:
    """Return the smallest values that so large parts of them do not exceed; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Quantiles(*(ordered[max(0, math.ceil(part * len(ordered)) - 1)] for part in (0.5, 0.9, 0.99)))


def shown(one: EndedRequest) -> RequestNow:
    """Return it for the page."""
    met = one.slos_met()
    prefill = next((stage.worker for stage in one.stages if stage.name == "prefill"), "")
    decode = next((stage.worker for stage in reversed(one.stages) if stage.worker), prefill)
    return RequestNow(
        id=one.request_id,
        outcome=one.outcome,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        prefill_worker=prefill or decode,
        decode_worker=decode,
        arrived_s_ago=one.ended_s_ago + one.latency_s,
        ended_s_ago=one.ended_s_ago,
        ttft_s=one.ttft_s,
        tpot_s=one.tpot_s,
        ttft_ok=met.get("ttft"),
        tpot_ok=met.get("tpot"),
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
