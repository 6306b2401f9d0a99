"""The verdict on simulated comparisons whose truth is known, with the drift of real machines."""

import numpy as np
import pytest

from ridgeline.loadtest.statistics.attainment_curve import RoundCount, curves_of
from ridgeline.loadtest.statistics.verdict import RateVerdict, judge, told_apart
from tests.support.simulated_comparisons import Curve, Machine, logistic, searched

RUNS, LONG_RUNS = 40, 1_000
"""Of each simulation; `make long` has a thousand."""
MACHINES = {"quiet": Machine(0.06), "shared": Machine(0.12), "busy": Machine(0.2)}


def judged(rounds: dict[str, list[RoundCount]], undisturbed: int | None = None) -> RateVerdict:
    pairs = len(next(iter(rounds.values())))
    return judge(curves_of(rounds, 0.9), rounds, pairs if undisturbed is None else undisturbed)


def simulated(curves: dict[str, Curve], runs: int, **given) -> list[RateVerdict]:
    return [judged(searched(curves, seed, start=(1.4, 2.0, 2.8)[seed % 3], **given)) for seed in range(runs)]


def claims(verdicts: list[RateVerdict]) -> float:
    return float(np.mean([bool(each.serves_more) for each in verdicts]))


def check_equals(runs: int, names: str, machine: Machine, **given) -> None:
    """Fail if a comparison of equal variants claims a difference more often than one in twenty."""
    found = claims(simulated(dict.fromkeys(names, logistic(2.0, 8)), runs, machine=machine, **given))
    assert found <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_of_equal_variants_hardly_ever_one_is_said_to_serve_more(names: str, machine: Machine):
    check_equals(RUNS, names, machine)


@pytest.mark.long
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("names", ["ab", "abc"])
def test_of_a_thousand_times_equal_variants_hardly_ever_one_is_said_to_serve_more(names: str, machine: Machine):
    check_equals(LONG_RUNS, names, machine)


def check_planted(runs: int, factor: float, least: float, **given) -> None:
    """Fail if a planted difference is found too seldom, or the wrong way round more often than 1 in 50 times."""
    curves = {"a": logistic(2.0, 8), "b": logistic(2.0 * factor, 8)}
    found = [each.serves_more for each in simulated(curves, runs, **given)]
    assert np.mean([("b", "a") in each for each in found]) >= least
    assert np.mean([("a", "b") in each for each in found]) <= 0.02


@pytest.mark.parametrize(("factor", "least"), [(1.25, 0.5), (1.5, 0.9)])
def test_a_planted_difference_is_found_and_never_the_wrong_way_round(factor: float, least: float):
    check_planted(RUNS, factor, least)


@pytest.mark.long
def test_one_variant_that_is_a_quarter_slower_is_found_in_most_of_a_thousand_comparisons():
    check_planted(LONG_RUNS, 1.25, 0.5)


def test_variants_of_other_slopes_are_told_apart_by_their_highest_rates():
    curves = {"soft": logistic(2.0, 5), "cliff": logistic(3.0, 25)}
    found = [each.serves_more for each in simulated(curves, RUNS, pairs=8)]
    assert np.mean([("cliff", "soft") in each for each in found]) >= 0.6
    assert np.mean([("soft", "cliff") in each for each in found]) <= 0.05


TWO_ROUNDS = {
    "adaptive": [RoundCount(2.16, 27, 33), RoundCount(2.29, 29, 35)],
    "colocated": [RoundCount(2.16, 24, 33), RoundCount(2.29, 29, 35)],
    "disaggregated": [RoundCount(2.16, 13, 33), RoundCount(2.29, 16, 35)],
}
"""Of a demo: no rate was low enough for a highest rate, and yet one variant is clearly the worst."""


def test_rounds_far_from_the_highest_rates_tell_the_worst_variant():
    verdict = judged(TWO_ROUNDS)
    assert set(verdict.serves_more) == {("adaptive", "disaggregated"), ("colocated", "disaggregated")}
    assert verdict.open == (("adaptive", "colocated"),)


@pytest.mark.parametrize("undisturbed", [0, 1])
def test_nothing_is_said_of_fewer_than_two_undisturbed_pairs(undisturbed: int):
    verdict = judged(TWO_ROUNDS, undisturbed)
    assert (verdict.serves_more, verdict.alike) == ((), ())
    assert len(verdict.open) == 3


def test_nothing_is_said_against_the_requests_that_were_counted():
    more_at_the_low_rate = {
        "a": [RoundCount(1.0, 10, 10), RoundCount(4.0, 30, 100)] * 2,
        "b": [RoundCount(1.0, 0, 10), RoundCount(4.0, 45, 100)] * 2,
    }
    verdict = judged(more_at_the_low_rate)
    assert ("a", "b") not in verdict.serves_more


def test_with_many_rounds_two_equal_variants_differ_by_nothing_that_matters():
    rounds = [RoundCount(rate, met, 100) for rate, met in ((1.0, 99), (1.8, 95), (2.0, 90), (2.2, 80), (3.0, 30))] * 6
    verdict = judged({"a": rounds, "b": rounds})
    assert (verdict.serves_more, len(verdict.alike), verdict.factor) == ((), 1, None)


def test_what_is_open_says_how_much_longer_it_takes():
    few = {
        "a": [RoundCount(1.0, 28, 30), RoundCount(2.0, 10, 30)],
        "b": [RoundCount(1.0, 27, 30), RoundCount(2.0, 13, 30)],
    }
    verdict = judged(few)
    assert verdict.open
    assert verdict.factor is not None
    assert verdict.factor > 1


def test_what_a_budget_can_tell_is_about_what_simulated_comparisons_tell():
    for pairs, round_s in ((6, 10.0), (12, 10.0)):
        factor = told_apart(pairs, round(2.0 * round_s))
        found = simulated({"a": logistic(2.0, 8), "b": logistic(2.0 * factor, 8)}, RUNS, pairs=pairs, round_s=round_s)
        assert 0.5 <= np.mean([("b", "a") in each.serves_more for each in found]) <= 1.0


def test_more_pairs_and_more_requests_tell_smaller_differences():
    assert told_apart(12, 20) < told_apart(6, 20) < told_apart(2, 20)
    assert told_apart(6, 80) < told_apart(6, 20)
