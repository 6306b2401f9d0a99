"""What is learned from complete answers."""

import pytest

from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.placement.learned import REMEMBERED, UNKNOWN_OUTPUT_TOKENS, UNKNOWN_PART, WEIGHT, Learned


def test_before_any_answer_half_of_the_longest_is_expected_or_a_guess():
    learned = Learned()
    assert learned.output_tokens(100) == 100 * UNKNOWN_PART
    assert learned.output_tokens(0) == UNKNOWN_OUTPUT_TOKENS


def test_the_first_answer_replaces_the_guess():
    learned = Learned()
    learned.answered(Demand(1, 100), 20)
    assert learned.output_tokens(200) == pytest.approx(40)
    assert learned.output_tokens(0) == 20


def test_the_first_answers_count_alike_and_later_ones_by_a_fixed_weight():
    learned = Learned()
    for tokens in (10, 20, 30):
        learned.answered(Demand(1, 0), tokens)
    assert learned.output_tokens(0) == pytest.approx(20)
    for _ in range(1000):
        learned.answered(Demand(1, 0), 20)
    learned.answered(Demand(1, 0), 120)
    assert learned.output_tokens(0) == pytest.approx(20 + 100 * WEIGHT)


def test_answers_without_a_longest_length_say_nothing_of_the_part():
    learned = Learned()
    learned.answered(Demand(1, 0), 1000)
    assert learned.output_tokens(100) == 100 * UNKNOWN_PART


def test_what_three_of_four_answers_reach_is_sure_and_nothing_before_there_is_one():
    learned = Learned()
    assert learned.sure_tokens(100) == learned.sure_tokens(0) == 0
    for tokens in (80, 20, 100, 60):
        learned.answered(Demand(1, 100), tokens)
    assert (learned.sure_tokens(50), learned.sure_tokens(0)) == (pytest.approx(30), 60)
    for _ in range(REMEMBERED):
        learned.answered(Demand(1, 100), 100)
    assert learned.sure_tokens(200) == 100


def test_a_long_answer_that_is_allowed_is_not_sure_because_short_ones_were_as_long_as_they_might_be():
    learned = Learned()
    for longest, tokens in [(16, 16)] * 48 + [(30_000, 300)] * 16:
        learned.answered(Demand(1, longest), tokens)
    assert learned.sure_tokens(30_000) == 16
    assert learned.sure_tokens(8) == 8


def test_the_mean_of_all_links_has_none_of_workers_that_have_left():
    learned = Learned()
    learned.moved("a", "b", 10**9, 1.0)
    learned.moved("a", "gone", 10**6, 1.0)
    learned.forget_all_but(["a", "b"])
    assert learned.mean_bytes_per_s == 1e9
