"""Exact latencies and attainment of the last minute, and a sequence as the page shows it."""

import math

import pytest

from ridgeline.router.live.promise import Recent, shown
from ridgeline.router.observe.ended_requests import EndedRequests
from tests.support.clock import FakeClock
from tests.support.ended_requests import ended, handed_over

LIMITS = (0.2, 0.02)


def recent_of(*sequences):
    """(TTFT, TPOT, outcome, limits) of each."""
    kept = EndedRequests(clock := FakeClock())
    for ttft_s, tpot_s, outcome, limits in sequences:
        gaps_s = () if ttft_s is None else (ttft_s, *[tpot_s] * 4)
        kept.add(ended(None, *gaps_s, limits=limits), outcome)
    clock.now_s += 10.0
    return Recent(*kept.within(60.0))


def test_quantiles_are_values_that_were_seen():
    recent = recent_of(*((tenths / 10, tenths / 100, "finished", LIMITS) for tenths in range(1, 11)))
    for quantiles, scale in ((recent.ttft_s, 1.0), (recent.tpot_s, 0.1)):
        assert (quantiles.p50, quantiles.p90, quantiles.p99) == pytest.approx((0.5 * scale, 0.9 * scale, scale))


def test_attainment_is_of_those_that_are_judged():
    late, slow = (0.3, 0.01, "finished", LIMITS), (0.1, 0.03, "finished", (math.inf, 0.02))
    recent = recent_of(late, slow, (0.1, 0.01, "finished", LIMITS), (None, None, "cancelled", LIMITS))
    assert [recent.attainment(slo) for slo in ("ttft", "tpot", "all")] == pytest.approx([1 / 2, 2 / 3, 1 / 3])
    assert recent_of((0.1, 0.01, "finished", (math.inf, math.inf))).attainment("all") is None


def test_goodput_counts_what_met_its_limits_in_the_time_that_was_watched():
    in_time, late = (0.1, 0.01, "finished", LIMITS), (0.3, 0.01, "finished", LIMITS)
    assert recent_of(in_time, in_time, late).goodput_per_s == pytest.approx(0.2)
    assert recent_of((0.1, 0.01, "finished", (math.inf, math.inf))).goodput_per_s is None


def test_a_sequence_is_shown_with_its_legs():
    kept = EndedRequests(FakeClock())
    kept.add(handed_over(), "finished")
    one = shown(kept.latest(1)[0])
    legs = {stage.stage: stage.leg for stage in one.stages}
    assert (legs["preprocess"], legs["prefill"], legs["wire"], legs["decode"]) == (
        "router",
        "prefill",
        "decode",
        "decode",
    )
    assert (one.prefill_worker, one.decode_worker) == ("worker-0", "worker-1")
    assert sum(stage.seconds for stage in one.stages) == pytest.approx(one.arrived_s_ago - one.ended_s_ago)
    assert (one.handoff.bytes, one.handoff.bytes_per_s) == (4096, 4096 / 0.25)
