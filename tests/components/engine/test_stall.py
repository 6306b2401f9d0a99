"""Idle, working and standing still are three things."""

import math

import pytest

from ridgeline.engine.stall import StallWatch
from tests.support.clock import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def watch(clock):
    return StallWatch(clock)


def test_only_time_without_a_step_while_there_is_work_counts(watch, clock):
    clock.now_s += 100.0
    assert watch.stalled_s(has_work=False) == 0.0
    watch.work_begins()
    clock.now_s += 7.0
    assert watch.stalled_s(has_work=True) == 7.0
    watch.moved()
    assert watch.stalled_s(has_work=True) == 0.0


def test_time_with_work_adds_up_over_rests_until_a_step(watch, clock):
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


def test_a_step_reported_after_the_work_has_gone_counts(watch, clock):
    watch.work_begins()
    clock.now_s += 10.0
    watch.work_ends()
    watch.moved()
    clock.now_s += 1000.0
    watch.work_begins()
    assert watch.stalled_s(has_work=True) == 0.0


def looks(watch, clock, seconds, doing):
    for _ in range(round(seconds / 0.5)):
        clock.now_s += 0.5
        watch.looked(0.5, doing)


def seconds_until_stalled(watch, clock, doing, timeout_s=60.0):
    """How long it takes in looks of half a second, each of which the engine spends in the same way."""
    seconds = 0.0
    while not watch.is_stalled(timeout_s, has_work=True):
        looks(watch, clock, 0.5, doing)
        seconds += 0.5
    return seconds


@pytest.mark.parametrize(
    ("doing", "seen_s", "foretold_s", "timeout_s", "found_after_s"),
    [
        pytest.param("nothing", 4.0, None, 60.0, 12.0, id="three of the longest step"),
        pytest.param("nothing", 0.1, None, 60.0, 5.0, id="five seconds at the least"),
        pytest.param("nothing", 30.0, None, 60.0, 60.0, id="the timeout at the most"),
        pytest.param("computes", 0.1, None, 60.0, 60.0, id="computes, and has foretold nothing"),
        pytest.param("computes", 0.1, 0.1, 60.0, 20.0, id="short steps: as long as routers trust it"),
        pytest.param("computes", 9.0, 0.1, 60.0, 27.0, id="three of the longest that was seen"),
        pytest.param("computes", 0.1, 8.0, 60.0, 24.0, id="or of the one that runs"),
        pytest.param("computes", 0.1, 25.0, 60.0, 60.0, id="the timeout is the most"),
        pytest.param("computes", 0.1, math.inf, 60.0, 60.0, id="one that it has hardly met"),
        pytest.param("computes", 0.1, 0.1, 6.0, 5.0, id="a short timeout"),
        pytest.param("computes", 0.1, 0.1, 4.0, 4.0, id="a shorter one"),
        pytest.param("waits", 0.1, 0.1, 60.0, 60.0, id="waits for a core, a disk or a compiler"),
    ],
)
def test_an_engine_with_work_and_without_steps_is_found(
    watch, clock, doing, seen_s, foretold_s, timeout_s, found_after_s
):
    watch.work_begins()
    clock.now_s += seen_s
    watch.moved()
    if foretold_s is not None:
        watch.foretold(foretold_s)
    assert seconds_until_stalled(watch, clock, doing, timeout_s) == found_after_s
    watch.moved()
    assert not watch.is_stalled(timeout_s, has_work=True)


def test_what_it_computes_adds_up_over_rests_until_a_step(watch, clock):
    watch.foretold(0.1)
    for _ in range(2):
        watch.work_begins()
        looks(watch, clock, 9.0, "computes")
        watch.work_ends()
        looks(watch, clock, 100.0, "waits")
    watch.work_begins()
    assert seconds_until_stalled(watch, clock, "computes") == 2.0
    watch.moved()
    assert not watch.is_stalled(60.0, has_work=True)


def test_one_that_rests_and_computes_in_turn_is_not_one_that_does_nothing(watch, clock):
    watch.work_begins()
    for _ in range(5):
        looks(watch, clock, 4.5, "nothing")
        looks(watch, clock, 0.5, "computes")
    assert not watch.is_stalled(60.0, has_work=True)


def test_a_long_step_of_long_ago_does_not_make_it_patient_for_ever(watch, clock):
    watch.work_begins()
    clock.now_s += 15.0
    watch.moved()
    for _ in range(3000):
        clock.now_s += 0.1
        watch.moved()
    looks(watch, clock, 5.0, "nothing")
    assert watch.is_stalled(60.0, has_work=True)


def test_time_in_which_who_watches_stood_still_is_no_evidence(watch, clock):
    watch.work_begins()
    clock.now_s += 100.0
    watch.stood_still(99.0)
    assert watch.stalled_s(has_work=True) == 1.0
    watch.stood_still(99.0)
    assert watch.stalled_s(has_work=True) == 0.0


def test_a_rest_of_who_watches_is_no_long_step_also_if_the_step_is_read_before_the_rest_is_noticed(watch, clock):
    watch.work_begins()
    clock.now_s += 25.1
    watch.moved()
    clock.now_s += 0.1
    watch.moved()
    watch.stood_still(25.0)
    looks(watch, clock, 5.0, "nothing")
    assert watch.is_stalled(60.0, has_work=True)


def test_a_rest_of_who_watches_is_no_waiting_also_if_the_work_left_before_the_rest_was_noticed(watch, clock):
    watch.work_begins()
    clock.now_s += 26.0
    watch.work_ends()
    clock.now_s += 0.1
    watch.stood_still(25.0)
    assert watch.stalled_s(has_work=False) == pytest.approx(1.0, abs=0.2)


def test_a_long_step_before_a_rest_of_who_watches_is_still_one(watch, clock):
    watch.work_begins()
    clock.now_s += 10.0
    watch.moved()
    clock.now_s += 25.0
    watch.stood_still(25.0)
    looks(watch, clock, 29.5, "nothing")
    assert not watch.is_stalled(60.0, has_work=True)
    looks(watch, clock, 0.5, "nothing")
    assert watch.is_stalled(60.0, has_work=True)
