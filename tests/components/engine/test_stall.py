"""Idle, working and standing still are three things."""

from engine.stall import StallWatch
from tests.support.clock import FakeClock


def test_only_time_without_a_step_while_there_is_work_counts():
    clock = FakeClock()
    watch = StallWatch(clock)
    clock.now_s += 100.0
    assert watch.stalled_s(has_work=False) == 0.0
    watch.work_begins()
    clock.now_s += 7.0
    assert watch.stalled_s(has_work=True) == 7.0
    watch.moved()
    assert watch.stalled_s(has_work=True) == 0.0


def test_time_with_work_adds_up_over_rests_until_a_step():
    clock = FakeClock()
    watch = StallWatch(clock)
    for _ in range(3):
        clock.now_s += 1000.0
        watch.work_begins()
        clock.now_s += 10.0
        watch.work_ends()
    assert watch.stalled_s(has_work=False) == 30.0
    clock.now_s += 1000.0
    watch.work_begins()
    clock.now_s += 5.0
    assert watch.stalled_s(has_work=True) == 35.0
    watch.moved()
    clock.now_s += 1.0
    watch.work_ends()
    assert watch.stalled_s(has_work=False) == 1.0


def test_a_step_reported_after_the_work_has_gone_counts():
    clock = FakeClock()
    watch = StallWatch(clock)
    watch.work_begins()
    clock.now_s += 10.0
    watch.work_ends()
    watch.moved()
    clock.now_s += 1000.0
    watch.work_begins()
    assert watch.stalled_s(has_work=True) == 0.0
