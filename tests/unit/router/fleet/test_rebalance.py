"""When workers come to favour a phase, and what keeps the loop from changing its mind."""

import math

import pytest

from router.fleet.rebalance import AGREEING, INTERVAL_S, LEAST_COUNTED, Rebalancer
from tests.unit.router.fleet.test_shape import PROMPT_S, STEP_S, fleet

NAMES = [f"worker-{number}" for number in range(8)]
TIGHT = (5 * PROMPT_S, 1.3 * STEP_S)
LOOSE = (5 * PROMPT_S, 10 * STEP_S)
BUSY, IDLE = 3.0, 0.9
"""Requests/s: most of what eight workers hold within `TIGHT`, and less than half."""


class Loop:
    """A rebalancer under even traffic, on a clock that only moves here."""

    def __init__(self, mode="on", workers=8):
        self.it = Rebalancer(mode)
        self.workers = workers
        self.now_s = 1000.0
        self.changes = []

    def serve(self, readings, limits=TIGHT, rate=BUSY, kept=1.0, size=(512, 64)):
        """Serve for so many readings of the loop."""
        number = math.ceil(rate * INTERVAL_S * readings)
        for served in range(number):
            self.now_s += 1 / rate
            self.it.asked(*size, *limits)
            change = self.it.read(self.now_s, fleet(self.workers))
            if change is not None:
                self.changes.append(change)
            self.it.answered(kept=served / number < kept)
        return self


def test_at_first_no_worker_favours_anything():
    assert Rebalancer("on").favours(NAMES) == {}


def test_under_load_that_another_shape_holds_better_the_workers_are_divided_once_and_the_reason_has_the_figures():
    loop = Loop().serve(10)
    assert [change.prefill_workers for change in loop.changes] == [4]
    favours = loop.it.favours(NAMES)
    assert sorted(favours.values()) == ["decode"] * 4 + ["prefill"] * 4
    sentence = loop.changes[0].sentence
    assert sentence.startswith("4 of 8 workers favour prefill, 4 decode: 3")
    assert "512 tokens in and 64 out" in sentence
    assert "TPOT 42.9 ms" in sentence


def test_a_change_takes_readings_that_agree():
    assert Loop().serve(AGREEING - 0.5).changes == []
    alternating = Loop()
    for _ in range(6):
        alternating.serve(1, TIGHT).serve(1, LOOSE, size=(512, 64))
    assert len(alternating.changes) <= 1


def test_little_load_changes_nothing_while_limits_are_kept_and_does_when_they_are_missed():
    assert Loop().serve(10, rate=IDLE).changes == []
    assert [change.prefill_workers for change in Loop().serve(10, rate=IDLE, kept=0.5).changes] == [4]


def test_too_few_prompts_in_a_long_time_say_nothing():
    assert Loop().serve(100, rate=(LEAST_COUNTED - 1) / (10 * INTERVAL_S), kept=0.0).changes == []


def test_loose_limits_and_none_divide_no_worker_and_undo_a_division():
    assert Loop().serve(10, LOOSE).changes == []
    assert Loop().serve(10, (math.inf, math.inf)).changes == []
    undone = Loop().serve(5).serve(40, (math.inf, math.inf))
    assert [change.prefill_workers for change in undone.changes] == [4, 0]
    assert undone.changes[1].sentence.startswith("no worker favours a phase: 3")
    assert undone.it.favours(NAMES) == {}


def test_a_mode_that_advises_says_it_once_and_changes_nothing():
    loop = Loop("advise").serve(20)
    assert [change.prefill_workers for change in loop.changes] == [4]
    assert loop.it.favours(NAMES) == {}


def test_switched_off_it_never_says_anything():
    assert Loop("off").serve(10).changes == []


def test_a_lost_worker_leaves_both_phases_with_workers_and_one_worker_alone_does_both():
    loop = Loop().serve(5)
    assert sorted(loop.it.favours(NAMES[:2]).values()) == ["decode", "prefill"]
    assert loop.it.favours(NAMES[:1]) == {}
    assert sorted(loop.it.favours(NAMES).values()).count("prefill") == 4, "as before, when it has come back"


def test_a_change_of_the_number_of_workers_keeps_the_shares_until_it_is_read_anew():
    loop = Loop().serve(5)
    loop.workers = 4
    loop.serve(0.1)
    assert sorted(loop.it.favours(NAMES[:4]).values()) == ["decode", "decode", "prefill", "prefill"]


def test_after_a_long_pause_it_begins_anew():
    loop = Loop()
    loop.serve(AGREEING - 0.5)
    loop.now_s += 1000
    loop.serve(0.5)
    assert loop.changes == []


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_the_same_workers_favour_the_same_phases_in_whatever_order_they_are_named(order):
    loop = Loop().serve(5)
    assert loop.it.favours([*order]) == Loop().serve(5).it.favours(NAMES)
