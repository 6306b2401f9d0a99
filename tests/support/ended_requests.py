"""Sequences that have ended, as a router records them, on a clock that only moves as told."""

from __future__ import annotations

from ridgeline.contracts.handoff import TransferResult
from ridgeline.contracts.tasks import LegTiming
from ridgeline.router.observe.timeline import LegWorker, RequestTimeline
from ridgeline.router.scheduler.features import Assignment
from tests.support.clock import FakeClock

PREFILL, DECODE = LegWorker("prefill", "worker-0"), LegWorker("decode", "worker-1")


def ended(
    assignment: Assignment | None = None,
    *gaps_s: float,
    request_id: str = "cmpl-1",
    limits: tuple[float, float] = (2.0, 0.1),
    **fields: str,
) -> RequestTimeline:
    """Return a sequence that has had a token after each of these gaps."""
    clock = FakeClock()
    timeline = RequestTimeline(
        clock,
        "r-1",
        512,
        "disaggregated",
        client_request_id=request_id,
        ttft_limit_s=limits[0],
        tpot_limit_s=limits[1],
        **fields,  # type: ignore[arg-type]
    )
    timeline.assignment = assignment
    for gap_s in gaps_s:
        clock.now_s += gap_s
        timeline.tokens(1, "adaptive")
    return timeline


def handed_over(**fields: str) -> RequestTimeline:
    """Return a sequence of 3.375 s with both legs: its prompt was done after 1.25 s, its KV fetched by 1.625 s."""
    clock = FakeClock()
    timeline = RequestTimeline(
        clock, "r-1", 512, "disaggregated", head_read_s=clock.now_s - 0.125, client_request_id="cmpl-1", **fields
    )
    clock.now_s += 0.25
    timeline.placed(PREFILL, DECODE)
    clock.now_s += 0.875
    timeline.prompt_reported(LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=0.5))
    timeline.tokens(1, "prefill")
    timeline.link = PREFILL.worker_id, DECODE.worker_id
    for gap_s in (1.0, 1.125):
        clock.now_s += gap_s
        timeline.tokens(1, "decode")
    result = TransferResult(outcome="ok", wait_s=0.125, wire_s=0.25, num_bytes=4096, transport="shm")
    timeline.decode_reported(LegTiming(queue_s=0.75, first_token_s=0.125, compute_s=1.25, transfer_result=result))
    return timeline
