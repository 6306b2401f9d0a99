"""When workers come to favour a phase, and what keeps the loop from changing its mind."""

import math
import random

import pytest

from ridgeline.router.fleet.adaptive import Wanted
from ridgeline.router.fleet.rebalance import (
    INTERVAL_S,
    LEAST_COUNTED,
    QUICK_AGAIN_S,
    TURNED_PROMPTS,
    TURNED_S,
    Rebalancer,
)
from ridgeline.router.fleet.shape import held_per_s
from tests.unit.router.fleet.test_shape import PROMPT_S, STEP_S, fleet, traffic

NAMES = [f"worker-{number}" for number in range(8)]
TIGHT = (5 * PROMPT_S, 1.3 * STEP_S)
LOOSE = (5 * PROMPT_S, 10 * STEP_S)
NONE = (math.inf, math.inf)
BUSY, IDLE = 3.0, 0.9
"""Requests/s: more than eight workers hold within `TIGHT` that all do both, and less than half."""


def asked(limits=TIGHT, prompt_tokens=512, output_tokens=64, **values):
    return Wanted(prompt_tokens, output_tokens, *limits, **values)


class Loop:
    """A rebalancer under traffic, on a clock that only moves here."""

    def __init__(self, mode="act", workers=8):
        self.it = Rebalancer(mode)
        self.workers = workers
        self.now_s = 1000.0
        self.changes = []

    def serve(self, readings, *kinds, rate=BUSY, within=1.0):
        """Serve for so many readings of the loop, requests of these kinds by turns; by default those of `asked`."""
        number, kinds = math.ceil(rate * INTERVAL_S * readings), kinds or (asked(),)
        for served in range(number):
            self.now_s += 1 / rate
            self.it.placed(kinds[served % len(kinds)], self.now_s)
            if self.it.due(self.now_s):
                self.changes.append(self.it.read(self.now_s, fleet(self.workers)))
            self.it.answered(within_limits=served / number < within)
        return self

    @property
    def shapes(self):
        return [change.prefill_workers for change in self.changes if change is not None]

    @property
    def sentences(self):
        return [change.sentence for change in self.changes if change is not None]


def phases(loop, workers=8):
    return sorted(loop.it.favours(NAMES[:workers]).values())


def test_at_first_no_worker_favours_anything():
    assert Rebalancer("act").favours(NAMES) == {}


def test_under_load_that_another_shape_holds_better_the_workers_are_divided_once_and_the_reason_has_the_figures():
    loop = Loop().serve(10)
    assert loop.shapes == [4]
    assert phases(loop) == ["decode"] * 4 + ["prefill"] * 4
    assert loop.sentences[0].startswith("4 of 8 workers favour prefill, 4 decode: 3")
    assert "512 tokens in and 64 out" in loop.sentences[0]
    assert "TPOT 42.9 ms" in loop.sentences[0]


def test_when_nothing_is_known_a_few_prompts_are_enough():
    loop = Loop().serve(0.9 * TURNED_S / INTERVAL_S)
    assert loop.shapes == []
    assert loop.serve(0.4 * TURNED_S / INTERVAL_S).shapes == [4]


def test_few_prompts_in_a_long_time_are_not_enough():
    assert Loop().serve(0.9, rate=(TURNED_PROMPTS - 1) / INTERVAL_S, within=0.0).shapes == []


@pytest.mark.parametrize("before", [LOOSE, NONE])
def test_limits_that_turn_tight_count_alone_and_at_once_and_so_do_those_that_are_gone_again(before):
    loop = Loop(workers=2).serve(20, asked(before), rate=2.2)
    assert loop.serve(1.3 * TURNED_S / INTERVAL_S, asked(TIGHT), rate=2.2).shapes == [1]
    assert "TPOT 42.9 ms" in loop.sentences[0]
    loop.serve(QUICK_AGAIN_S / INTERVAL_S, asked(TIGHT), rate=2.2)
    loop.serve(1.3 * TURNED_S / INTERVAL_S, asked(NONE), rate=2.2)
    assert loop.shapes == [1, 0]
    assert loop.sentences[-1].endswith("without limits fewer than 3 workers are not divided")


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("other", [LOOSE, NONE])
def test_two_kinds_of_limits_in_random_order_are_no_turn_of_the_traffic(share, other):
    draw, loop = random.Random(1), Loop().serve(0.25)
    loop.serve(60, *draw.choices((asked(TIGHT), asked(other)), weights=(share, 1 - share), k=60 * 30))
    assert len(loop.changes) <= 62, "a reading in 10 s, but for the first and perhaps one more"


def test_limits_that_turn_again_and_again_change_the_fleet_no_faster_than_readings_do():
    loop = Loop(workers=2).serve(1, asked(NONE), rate=2.2)
    for _ in range(40):
        loop.serve(0.36, asked(TIGHT), rate=2.2).serve(0.36, asked(NONE), rate=2.2)
    assert len(loop.shapes) <= 4


def test_a_turn_that_is_seen_in_the_moment_of_a_reading_is_read_too():
    loop = Loop().serve(2.5, asked(LOOSE), rate=IDLE)
    read = len(loop.changes)
    while len(loop.changes) == read:
        loop.serve(0.01, asked(LOOSE), rate=IDLE)
    reading_s = loop.now_s + INTERVAL_S
    for before_s in (9, 8, 7, 6, 5):
        loop.it.placed(asked(LOOSE), reading_s - before_s)
    for before_s in (3.0, 2.5, 2.0, 1.0, 0.0, 0.0):
        loop.it.placed(asked(TIGHT), reading_s - before_s)
        if loop.it.due(reading_s - before_s):
            loop.changes.append(loop.it.read(reading_s - before_s, fleet(8)))
    assert loop.shapes == [4]


def test_one_reading_changes_nothing_and_one_that_says_otherwise_begins_anew():
    loop = Loop().serve(2, rate=IDLE)
    for _ in range(10):
        loop.serve(0.6, rate=BUSY).serve(2.4, rate=IDLE)
    assert len(loop.changes) >= 20
    assert loop.shapes == []


def test_two_readings_that_want_different_shapes_change_nothing():
    loop = Loop().serve(2, rate=IDLE)
    before = len(loop.changes)
    loop.serve(1.1, rate=4.0, within=0.0).serve(1.0, asked(TIGHT, 60, 200), rate=10.0, within=0.0)
    assert len(loop.changes) == before + 2
    assert loop.shapes == []


def test_little_load_changes_nothing_while_limits_are_kept_and_does_when_they_are_missed():
    assert Loop().serve(10, rate=IDLE).shapes == []
    assert Loop().serve(10, rate=IDLE, within=0.5).shapes == [4]


def test_too_few_prompts_in_a_long_time_say_nothing():
    assert Loop().serve(100, rate=(LEAST_COUNTED - 1) / (10 * INTERVAL_S), within=0.0).shapes == []


def test_loose_limits_divide_no_worker():
    assert Loop().serve(10, asked(LOOSE)).shapes == []


def test_without_limits_many_workers_are_divided_where_that_shortens_requests_and_few_or_idle_ones_are_not():
    loop = Loop().serve(10, asked(NONE))
    assert loop.shapes == [4]
    assert "without limits take about" in loop.sentences[0]
    assert Loop().serve(10, asked(NONE), rate=IDLE).shapes == []
    assert Loop(workers=2).serve(10, asked(NONE), rate=BUSY / 4).shapes == []


def test_without_limits_a_division_is_undone_once_it_saves_no_time():
    loop = Loop().serve(5, asked(NONE))
    assert loop.shapes == [4]
    loop.serve(20, asked(NONE, prompt_tokens=60, output_tokens=300), rate=3.5)
    assert loop.shapes[-1] == 0
    assert "if all do all" in loop.sentences[-1]
    assert loop.it.favours(NAMES) == {}


def test_without_limits_a_fleet_changes_from_one_division_to_another_without_being_undone_between():
    loop = Loop().serve(6, asked(NONE)).serve(14, asked(NONE, prompt_tokens=1024, output_tokens=24), rate=3.9)
    assert (loop.shapes[0], loop.shapes[-1]) == (4, 7)
    assert 0 not in loop.shapes


def test_more_requests_without_limits_than_any_shape_can_serve_change_nothing():
    loop = Loop().serve(6, asked(NONE), rate=5.5)
    before = loop.shapes[:]
    assert before
    assert before[-1] > 0
    assert loop.serve(10, asked(NONE), rate=20.0).shapes == before
    assert not any("inf" in sentence for sentence in loop.sentences)


@pytest.mark.parametrize("rate", [2.0, 4.0, 5.0, 7.0])
def test_a_steady_load_without_limits_by_chance_arrivals_changes_the_fleet_a_few_times_in_an_hour(rate):
    draw, loop = random.Random(5), Loop()
    until_s = loop.now_s + 3600
    while loop.now_s < until_s:
        loop.now_s += draw.expovariate(rate)
        loop.it.placed(asked(NONE), loop.now_s)
        if loop.it.due(loop.now_s):
            loop.changes.append(loop.it.read(loop.now_s, fleet(8)))
    assert 1 <= len(loop.shapes) <= 6


@pytest.mark.parametrize("share", [0.05, 0.08, 0.1, 0.12])
def test_a_share_of_requests_with_limits_about_the_least_that_counts_does_not_change_the_fleet_again_and_again(share):
    draw = random.Random(3)
    loop = Loop().serve(180, *draw.choices((asked(TIGHT), asked(NONE)), weights=(share, 1 - share), k=180 * 30))
    assert len(loop.shapes) <= 3


def test_a_division_is_undone_at_two_readings_once_limits_leave_steps_time_for_prompts():
    loop = Loop(workers=2).serve(5, rate=1.0)
    assert loop.shapes == [1]
    wider = asked((12 * PROMPT_S, 2.1 * STEP_S))
    assert loop.serve(0.5, wider, rate=0.9).shapes == [1]
    assert loop.serve(10, wider, rate=0.9).shapes == [1, 0]
    assert "time within TPOT" in loop.sentences[-1]


def test_requests_that_may_not_be_split_divide_no_worker():
    assert Loop().serve(10, asked(may_split=False)).shapes == []
    assert Loop().serve(10, asked(NONE, may_split=False)).shapes == []
    undone = Loop().serve(5).serve(20, asked(may_split=False))
    assert undone.shapes == [4, 0]
    assert undone.sentences[-1].endswith("fewer than half of the requests of 512 tokens in and 64 out may be split")


def test_a_shape_that_holds_nothing_is_not_changed_to_another_one_that_does_not():
    loop = Loop().serve(5).serve(20, asked((0.5 * PROMPT_S, 0.5 * STEP_S)))
    assert loop.shapes == [4]


def test_a_shape_that_holds_next_to_nothing_of_the_load_is_no_reason_for_a_change():
    loop = Loop(workers=2).serve(4, rate=0.8)
    assert loop.shapes == [1]
    beyond = asked((1.01 * PROMPT_S, 1.02 * STEP_S))
    assert 0 < held_per_s(fleet(2), traffic(1.01, 1.02), 0) < 0.2 * 0.8
    assert held_per_s(fleet(2), traffic(1.01, 1.02), 1) < held_per_s(fleet(2), traffic(1.01, 1.02), 0) / 1.15
    assert loop.serve(6, beyond, rate=0.8).shapes == [1]


def test_two_sizes_by_turns_divide_the_workers_and_do_not_do_it_again_and_again():
    small, large = asked(prompt_tokens=200), asked(prompt_tokens=2000)
    draw = random.Random(1)
    loop = Loop()
    for _ in range(120):
        loop.serve(1, *draw.choices((small, large), weights=(9, 1), k=30))
    assert 1 <= len(loop.shapes) <= 4


@pytest.mark.parametrize("absurd", [asked((PROMPT_S, STEP_S)), asked((3600.0, 3600.0))])
def test_one_request_in_twenty_with_the_least_or_the_longest_limits_changes_no_shape(absurd):
    plain = asked((5 * PROMPT_S, 2 * STEP_S))
    shape = Loop().serve(20, plain, rate=4.0).shapes
    assert Loop().serve(60, *([plain] * 19), absurd, rate=4.0).shapes == shape


def test_a_mode_that_advises_says_it_once_and_changes_nothing():
    loop = Loop("advise").serve(20)
    assert loop.shapes == [4]
    assert loop.it.favours(NAMES) == {}
    loop.serve(20, asked(LOOSE)).serve(30)
    assert len(loop.shapes) > 1, "the need had passed and has come again"


def test_switched_off_it_never_says_anything():
    assert Loop("none").serve(10).changes == []


def test_a_lost_worker_leaves_both_phases_with_workers_and_the_shape_is_as_before_when_it_is_back():
    loop = Loop().serve(5)
    for workers in (7, 2, 1, 8):
        loop.workers = workers
        loop.serve(0.5)
        expected = {7: 4, 2: 1, 1: 0, 8: 4}[workers]
        assert phases(loop, workers).count("prefill") == expected
    assert loop.shapes == [4]


def test_after_a_long_pause_it_begins_anew():
    loop = Loop().serve(2, rate=IDLE).serve(1.0)
    loop.now_s += 1000
    assert loop.serve(0.2).shapes == []


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_the_same_workers_favour_the_same_phases_in_whatever_order_they_are_named(order):
    loop = Loop().serve(5)
    assert loop.it.favours([*order]) == Loop().serve(5).it.favours(NAMES)
