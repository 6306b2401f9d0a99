"""Exact latencies and attainment of the last minute."""

import math

import pytest

from ridgeline.router.observe.recent import WINDOW_S, RecentSequences
from ridgeline.router.observe.timeline import RequestTimeline
from tests.support.clock import FakeClock


def ended(clock, recent, ttft_s, tpot_s, outcome="finished", limits=(math.inf, math.inf)):
    timeline = RequestTimeline(clock, "r", 10, "colocated", ttft_limit_s=limits[0], tpot_limit_s=limits[1])
    if ttft_s is not None:
        clock.now_s += ttft_s
        timeline.tokens(1, "colocated")
        clock.now_s += tpot_s * 4
        timeline.tokens(4, "colocated")
    recent.add(timeline, outcome)


@pytest.fixture
def clock():
    return FakeClock()


def test_quantiles_are_values_that_were_seen(clock):
    recent = RecentSequences(clock)
    for tenths in range(1, 11):
        ended(clock, recent, tenths / 10, tenths / 100)
    now = recent.now()
    assert [now.ttft_s(q) for q in (0.5, 0.9, 0.99)] == pytest.approx([0.5, 0.9, 1.0])
    assert [now.tpot_s(q) for q in (0.5, 0.9, 0.99)] == pytest.approx([0.05, 0.09, 0.1])


LIMITS = (0.2, 0.02)


@pytest.mark.parametrize(
    ("sequences", "ttft", "tpot", "every"),
    [
        ([(0.1, 0.01, "finished", LIMITS)], 1.0, 1.0, 1.0),
        ([(0.1, 0.01, "finished", LIMITS), (0.3, 0.01, "finished", LIMITS)], 0.5, 1.0, 0.5),
        ([(0.3, 0.01, "finished", LIMITS), (0.1, 0.03, "finished", LIMITS)], 0.5, 0.5, 0.0),
        ([(None, None, "failed", LIMITS)], 0.0, 0.0, 0.0),
        ([(None, None, "cancelled", LIMITS)], None, None, None),
        ([(0.1, 0.01, "finished", (math.inf, math.inf))], None, None, None),
        ([(0.1, 0.5, "finished", (0.2, math.inf))], 1.0, None, 1.0),
    ],
)
def test_attainment_is_of_those_with_a_limit(clock, sequences, ttft, tpot, every):
    recent = RecentSequences(clock)
    for sequence in sequences:
        ended(clock, recent, *sequence)
    now = recent.now()
    assert now.attainment(lambda one: one.ttft_ok) == ttft
    assert now.attainment(lambda one: one.tpot_ok) == tpot
    assert now.attainment(lambda one: one.met) == every


def test_goodput_counts_what_met_its_limits_in_the_time_that_was_watched(clock):
    recent = RecentSequences(clock)
    for ttft_s in (0.1, 0.1, 0.3):
        ended(clock, recent, ttft_s, 0.01, "finished", LIMITS)
    clock.now_s = 110.0
    assert recent.now().goodput_per_s == pytest.approx(0.2)
    clock.now_s = 200.0
    assert recent.now().goodput_per_s is None
    assert recent.now().seconds == WINDOW_S
    assert recent.now().ended == ()
