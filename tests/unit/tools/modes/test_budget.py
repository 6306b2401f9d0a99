"""How the time is divided among rounds, and which rates get one."""

import pytest

from loadtest.rate_search import Round
from tools.bench.modes.budget import (
    ENOUGH_REQUESTS,
    LEAST_REQUESTS,
    MOST_REQUESTS,
    BlockPlan,
    block_s,
    plan_blocks,
    requests_within,
    share_of,
)
from tools.bench.modes.rates import better_knee, good_rates, nearest, next_cell_rate, next_search_rate

RATES = [0.3, 0.4, 0.6] * 2 + [0.4] * 16
BESIDE_S = 15.0


def test_a_planned_block_takes_no_longer_than_its_time():
    for seconds in (600.0, 1500.0, 4000.0, 20000.0):
        plan = plan_blocks(RATES, seconds, BESIDE_S, most_blocks=4)
        assert plan.blocks * block_s(RATES, plan.requests, BESIDE_S) <= seconds


def test_one_more_request_in_each_round_would_not_fit():
    fitting = requests_within(RATES, 1500.0, BESIDE_S)
    assert block_s(RATES, fitting, BESIDE_S) <= 1500.0 < block_s(RATES, fitting + 1, BESIDE_S)


def test_longer_rounds_come_before_more_blocks_until_they_are_long_enough():
    one = block_s(RATES, ENOUGH_REQUESTS, BESIDE_S)
    assert plan_blocks(RATES, 1.9 * one, BESIDE_S, 4).blocks == 1
    assert plan_blocks(RATES, 2.1 * one, BESIDE_S, 4).blocks == 2
    assert plan_blocks(RATES, 100 * one, BESIDE_S, 4) == BlockPlan(4, MOST_REQUESTS)


def test_a_short_time_gives_a_block_of_short_rounds_and_a_shorter_one_none():
    least = block_s(RATES, LEAST_REQUESTS, BESIDE_S)
    assert plan_blocks(RATES, least + 1, BESIDE_S, 4) == BlockPlan(1, LEAST_REQUESTS)
    assert plan_blocks(RATES, least - 10, BESIDE_S, 4) == BlockPlan(0, 0)


def test_requests_that_are_given_are_kept():
    assert plan_blocks(RATES, 2.5 * block_s(RATES, 5, BESIDE_S), BESIDE_S, 4, requests=5) == BlockPlan(2, 5)


def test_what_a_workload_leaves_goes_to_those_after_it():
    assert share_of(5100.0, 3) == 1700.0
    assert share_of(5100.0 - 1500.0, 2) == 1800.0


def _at(shares: dict[float, int]) -> list[Round]:
    return [Round(rate, met, 10) for rate, met in shares.items()]


def test_the_search_goes_up_while_a_mode_holds_and_ends_with_a_rate_that_no_mode_holds():
    assert next_search_rate({}, 0.5) == 0.5
    assert next_search_rate({"colocated": _at({0.5: 3}), "disaggregated": _at({0.5: 9})}, 0.5) == pytest.approx(0.8)
    both = {"colocated": _at({0.5: 3, 0.8: 2}), "disaggregated": _at({0.5: 9, 0.8: 4})}
    assert next_search_rate(both, 0.5) is None


def test_the_search_goes_down_while_no_mode_holds():
    assert next_search_rate({"colocated": _at({0.8: 3}), "disaggregated": _at({0.8: 5})}, 0.8) == pytest.approx(0.5)


def test_the_search_ends_after_four_rates():
    assert next_search_rate({"colocated": _at({0.5: 10, 0.8: 10, 1.3: 10, 2.0: 10})}, 0.5) is None


def test_the_knee_is_that_of_the_better_mode_and_lies_between_the_rates_it_held_and_did_not():
    rate, source = better_knee({"colocated": _at({0.5: 3, 0.8: 2}), "disaggregated": _at({0.5: 9, 0.8: 4})})
    assert 0.5 < rate < 0.8
    assert "disaggregated" in source


def test_without_a_bracket_the_knee_is_the_rate_at_the_edge():
    assert better_knee({"colocated": _at({0.5: 1, 0.3: 2})})[0] == 0.3
    assert better_knee({"colocated": _at({0.5: 10, 0.8: 10})})[0] == 0.8


LADDER = (0.35, 0.5, 0.7, 1.0)
OTHERS = {"colocated": _at({0.35: 10, 0.5: 9, 0.7: 4}), "disaggregated": _at({0.35: 5, 0.5: 4, 0.7: 3})}


def test_the_adaptive_mode_starts_where_the_better_of_the_others_served_most():
    assert good_rates(OTHERS) == [0.5]
    assert next_cell_rate(LADDER, 0.7, [], OTHERS) == 0.5
    assert next_cell_rate(LADDER, 0.7, [], {"colocated": _at({0.45: 9})}) == 0.5
    assert next_cell_rate(LADDER, 0.7, [], {}) == 0.7
    assert next_cell_rate(LADDER, 0.7, [], {"colocated": _at({0.5: 0})}) == 0.35


def test_the_adaptive_mode_goes_up_while_nearly_all_of_its_requests_are_in_time():
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 9}), OTHERS) == 0.7
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 9, 0.7: 9}), OTHERS) == 1.0


def test_the_adaptive_mode_goes_down_where_it_failed_and_else_stays_at_its_best():
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 4}), OTHERS) == 0.35
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 7}), OTHERS) == 0.5
    assert next_cell_rate(LADDER, 0.7, _at({0.7: 6}), OTHERS) == 0.5


def test_the_adaptive_mode_is_tried_at_every_rate_at_which_the_others_served_nearly_as_much_as_at_their_best():
    others = {"colocated": _at({0.35: 10, 0.5: 9, 0.7: 4}), "disaggregated": _at({0.35: 5, 0.5: 4, 0.7: 6, 1.0: 1})}
    assert good_rates(others) == [0.5, 0.7]
    assert good_rates({"colocated": _at({0.5: 0})}) == []
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 7}), others) == 0.7
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 7, 0.7: 6}), others) == 0.7, "none is left, so its best one again"
    assert next_cell_rate(LADDER, 0.7, _at({1.0: 1}), others) == 0.5, "before it goes down"


def test_nearest_is_by_factor_and_not_by_difference():
    assert nearest((1.0, 4.0), 2.1) == 4.0
