"""Idle, working and standing still are three things."""

from fake_engine import FakeClock

from engine.stall import StallWatch


def test_only_time_without_a_step_while_there_is_work_counts():
    clock = FakeClock()
    watch = StallWatch(clock)
    clock.now_s += 100.0
    assert watch.stalled_s(has_work=False) == 0.0
    watch.moved()
    clock.now_s += 7.0
    assert watch.stalled_s(has_work=True) == 7.0
    watch.moved()
    assert watch.stalled_s(has_work=True) == 0.0
