"""What a sequence's limit leaves for its next step."""

from __future__ import annotations

import math

import pytest

from ridgeline.contracts.workers import DECODE_STEP_MARGIN, FUTURE_SLACK_USED, LOST_LIMITS, MOST_LIMITS, TPOT_LIMIT_USED
from ridgeline.decode_worker.pacing.slack import CATCH_UP, DecodeSteps, TpotSlack

LIMIT_S = 0.1
STEP_S = TPOT_LIMIT_USED * LIMIT_S
LEFT = 100
"""Tokens that a sequence may still make."""
BARE = DecodeSteps()
HALF = DecodeSteps(together_s=STEP_S / 2)
"""Steps without prompts that take half of what the limit allows."""


@pytest.fixture
def slack():
    """Of one sequence "a", of whose output nothing is foretold."""
    slack = TpotSlack()
    slack.expect("a", LIMIT_S)
    return slack


def test_a_sequence_without_a_limit_bounds_nothing():
    assert TpotSlack().allowance_s("a", 3, LEFT, 0.0, BARE) == math.inf


def test_a_sequence_that_is_behind_asks_for_shorter_steps_until_its_mean_is_kept_again(slack):
    assert slack.allowance_s("a", 1, LEFT, 10.0, BARE) == pytest.approx(STEP_S)
    assert slack.allowance_s("a", 2, LEFT, 10.0 + 1.1 * STEP_S, BARE) == pytest.approx(0.9 * STEP_S)
    assert slack.allowance_s("a", 3, LEFT, 10.0 + 2 * STEP_S, BARE) == pytest.approx(STEP_S)


@pytest.mark.parametrize(
    ("made", "after_s", "allowed_s"),
    [(2, 0.03, 2 * STEP_S - 0.03), (50, 1.0, 2 * STEP_S), (2, 5.0, CATCH_UP * STEP_S)],
    ids=["ahead_with_its_mean_kept", "far_ahead_no_gap_beyond_two_limits", "far_behind_prompts_go_on_beside_it"],
)
def test_the_next_step_of_a_sequence_that_is(slack, made, after_s, allowed_s):
    slack.allowance_s("a", 1, LEFT, 10.0, BARE)
    assert slack.allowance_s("a", made, LEFT, 10.0 + after_s, BARE) == pytest.approx(allowed_s)


def test_what_a_sequence_has_waited_since_its_kv_came_counts(slack):
    slack.joins("a", 0.1 * STEP_S)
    slack.joins("unknown", 1.0)
    assert slack.allowance_s("a", 1, LEFT, 10.0, BARE) == pytest.approx(0.9 * STEP_S)
    assert slack.allowance_s("a", 2, LEFT, 10.0 + 0.9 * STEP_S, BARE) == pytest.approx(STEP_S)


def test_a_sequence_whose_kv_is_on_its_way_finds_no_step_that_is_longer(slack):
    assert slack.arrival_s("a") == pytest.approx(2 * STEP_S)
    assert slack.arrival_s("another") == math.inf


def test_tokens_that_are_only_repeated_do_not_put_a_sequence_ahead():
    slack = TpotSlack()
    slack.expect("a", LIMIT_S, repeated_tokens=30)
    for token in range(31):
        assert slack.allowance_s("a", token, LEFT, token * 0.01, BARE) == pytest.approx(STEP_S)
    assert slack.allowance_s("a", 31, LEFT, 0.32, BARE) == pytest.approx(2 * STEP_S - 0.02)


def test_a_sequence_that_has_ended_is_forgotten(slack):
    slack.forget("a")
    slack.forget("unknown")
    assert not slack


def test_a_sequence_that_can_no_longer_keep_its_limit_lets_long_steps_through(slack):
    slack.allowance_s("a", 1, 10, 0.0, BARE)
    late_s = 9 * LIMIT_S
    assert slack.allowance_s("a", 2, 9, late_s, DecodeSteps(alone_s=0.0)) == pytest.approx(CATCH_UP * STEP_S)
    assert slack.allowance_s("a", 2, 9, late_s, DecodeSteps(alone_s=LIMIT_S / 2)) == LOST_LIMITS * LIMIT_S


@pytest.mark.parametrize("alone_s", [LIMIT_S / 2, 1000 * LIMIT_S], ids=["for_the_load", "ever"])
def test_a_sequence_whose_limit_no_step_can_keep_lets_long_steps_through(slack, alone_s):
    together_s = max(1.1 * LIMIT_S, alone_s)
    bare = DecodeSteps(alone_s, together_s)
    assert slack.allowance_s("a", 1, LEFT, 10.0, bare) == LOST_LIMITS * together_s
    assert slack.arrival_s("a", bare) == MOST_LIMITS * together_s


def test_a_sequence_asks_for_its_limit_again_once_the_load_lets_it_be_kept(slack):
    slack.allowance_s("a", 1, LEFT, 10.0, DecodeSteps(LIMIT_S / 2, 1.1 * LIMIT_S))
    later_s = 10.0 + 1.1 * LIMIT_S
    assert slack.allowance_s("a", 2, LEFT, later_s, HALF) == pytest.approx(2 * STEP_S - 1.1 * LIMIT_S)


def test_a_sequence_that_has_saved_enough_keeps_its_limit_while_steps_take_longer(slack):
    slack.allowance_s("a", 1, 10, 10.0, HALF)
    allowed_s = slack.allowance_s("a", 10, 1, 10.0 + 5 * LIMIT_S, DecodeSteps(LIMIT_S / 2, 1.2 * LIMIT_S))
    assert allowed_s == pytest.approx(MOST_LIMITS * STEP_S)


SAVES_S = STEP_S * (1 - DECODE_STEP_MARGIN / 2)
"""What a token saves whose step takes half of what the limit allows."""


@pytest.mark.parametrize(
    ("sure_tokens", "left", "bare", "allowed_s"),
    [
        (64, LEFT, HALF, 2 * STEP_S),
        (4, LEFT, HALF, STEP_S + 2 * FUTURE_SLACK_USED * SAVES_S),
        (64, 1, HALF, STEP_S),
        (64, LEFT, DecodeSteps(together_s=STEP_S / DECODE_STEP_MARGIN), STEP_S),
    ],
    ids=["all_that_it_makes_up_for", "a_part_of_few_tokens", "nothing_at_its_longest", "nothing_beside_slow_steps"],
)
def test_a_sequence_lends_at_once_what_the_rest_of_its_answer_will_save(sure_tokens, left, bare, allowed_s):
    slack = TpotSlack()
    slack.expect("a", LIMIT_S, sure_tokens=sure_tokens)
    assert slack.allowance_s("a", 1, left, 10.0, bare) == pytest.approx(allowed_s)


def test_an_answer_beside_prompts_that_take_all_that_it_lends_keeps_its_limit_in_the_mean():
    slack, now_s = TpotSlack(), 10.0
    slack.expect("a", LIMIT_S, sure_tokens=64)
    for made in range(1, 65):
        now_s += slack.allowance_s("a", made, 64 - made, now_s, HALF)
    assert (now_s - 10.0) / 64 == pytest.approx(STEP_S)
