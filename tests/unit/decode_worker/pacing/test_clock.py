"""From when to when a step lasts."""

from __future__ import annotations

import pytest

from ridgeline.decode_worker.pacing.model import StepClock, StepLoad

ONE, TWO = StepLoad(0, 1, 10, 0.0), StepLoad(0, 2, 20, 0.0)


def test_a_step_after_a_pause_lasts_from_when_it_was_scheduled():
    clock = StepClock()
    clock.begin(5.0, ONE, 0.0)
    assert clock.end(5.25) == (ONE, 0.25)
    clock.then(more_to_run=False)
    clock.begin(9.0, TWO, 0.0)
    assert clock.end(9.5) == (TWO, 0.5)


def test_a_step_that_follows_another_lasts_from_output_to_output():
    clock = StepClock()
    clock.begin(5.0, ONE, 0.0)
    clock.end(5.25)
    clock.then(more_to_run=True)
    clock.begin(5.375, TWO, 0.0)  # the engine has sent outputs meanwhile: a stream waits for that as well
    assert clock.end(5.75) == (TWO, 0.5)


def test_of_two_steps_in_flight_no_time_counts_twice():
    clock = StepClock()
    clock.begin(1.0, ONE, 0.5)
    clock.begin(1.125, TWO, 0.25)
    assert clock.remaining_s(1.25) == pytest.approx(0.5)
    assert clock.end(1.5) == (ONE, 0.5)
    clock.then(more_to_run=False)
    assert clock.remaining_s(1.5) == pytest.approx(0.25)
    assert clock.end(1.75) == (TWO, 0.25)
    assert clock.remaining_s(2.0) == 0.0
    assert clock.end(2.0) is None
