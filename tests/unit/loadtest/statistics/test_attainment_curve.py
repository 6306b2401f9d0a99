"""The curve of attainment and the choice of rates, on simulated servers whose attainment over the rate is known.

Simulated rounds scatter more than binomially: the rate that one feels differs from the one asked for.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest

from ridgeline.loadtest.statistics.attainment_curve import AttainmentCurve, RoundCount, curves_of, next_rate
from tests.support.simulated_comparisons import Curve, Machine, logistic, searched

RUNS = 40
"""Of each simulation; `make long` has a thousand."""
LONG_RUNS = 1_000


def _shoulder(max_rate: float) -> Curve:
    """Whole up to 5 % below the maximum, then falling with the rate: an open queue that no longer keeps up."""
    start = max_rate * 0.95
    return lambda rate: 1.0 if rate <= start else max(0.0, 1 - 0.1 * (rate / start - 1) / (1 / 0.95 - 1))


def _lapsing(max_rate: float) -> Curve:
    """A server that misses the SLOs of 3 % of the requests at any rate."""
    within = logistic(max_rate, 10)
    return lambda rate: 0.97 * within(rate)


def _true_rate(curve: Curve, effect: float) -> float:
    """Return the rate at which attainment, averaged over what rounds feel, is 90 %: what a search is asked for."""
    felt = [math.exp(effect * NormalDist().inv_cdf((step + 0.5) / 99)) for step in range(99)]
    low, high = 0.1, 10.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        holds = np.mean([curve(middle * one) for one in felt]) >= 0.9
        low, high = (middle, high) if holds else (low, middle)
    return low


def check_interval(curve: Curve, effect: float, least: float, runs: int) -> None:
    """Fail if the interval of the highest rate holds it in a smaller part of searches, or says nothing."""
    truth, held, widths = _true_rate(curve, effect), 0, []
    for seed in range(runs):
        start, machine = (0.5, 3.0)[seed % 2], Machine(drift=0.0, scatter=effect)
        rounds = searched({"a": curve}, seed, start=start, pairs=12, round_s=30 / start, machine=machine)["a"]
        found = AttainmentCurve(rounds, 0.9).max_goodput_rate()
        held += (found.low or 0.0) <= truth <= (found.high or math.inf)
        widths.append((found.high or math.inf) / (found.low or 1e-9))
    assert held >= least * runs - 3 * math.sqrt(least * (1 - least) * runs)
    assert np.median(widths) < 1.6, "an interval that holds everything says nothing"


CURVES = [logistic(2.0, 4), logistic(2.0, 10), logistic(2.0, 30), _shoulder(2.0), _lapsing(2.0)]
CURVE_NAMES = ["flat", "steep", "cliff", "shoulder", "lapsing"]


@pytest.mark.parametrize("curve", CURVES, ids=CURVE_NAMES)
@pytest.mark.parametrize(("effect", "least"), [(0.03, 0.95), (0.1, 0.85)])
def test_the_interval_holds_the_true_rate_as_often_as_it_says_in_simulated_searches(
    curve: Curve, effect: float, least: float
):
    check_interval(curve, effect, least, RUNS)


@pytest.mark.long
@pytest.mark.parametrize("curve", CURVES, ids=CURVE_NAMES)
@pytest.mark.parametrize(("effect", "least"), [(0.03, 0.95), (0.1, 0.85)])
def test_the_interval_holds_the_true_rate_in_a_thousand_simulated_searches(curve: Curve, effect: float, least: float):
    check_interval(curve, effect, least, LONG_RUNS)


def test_how_rounds_scatter_is_learned_from_all_variants_together():
    steady = [RoundCount(rate, met, 60) for rate, met in ((1.0, 60), (1.5, 60), (2.0, 54), (3.0, 5))]
    erratic = [RoundCount(rate, met, 60) for rate, met in ((1.0, 30), (1.5, 60), (2.0, 20), (2.0, 58), (3.0, 40))]
    alone = curves_of({"a": steady}, 0.9)["a"].max_goodput_rate()
    beside = curves_of({"a": steady, "b": erratic}, 0.9)["a"].max_goodput_rate()
    assert alone.low is not None
    assert alone.high is not None
    assert (beside.high or math.inf) / (beside.low or 1e-9) > 1.2 * alone.high / alone.low


def test_a_rate_that_no_measured_rate_bounds_is_open():
    always, never = [RoundCount(1.0, 60, 60)] * 3, [RoundCount(1.0, 6, 60)] * 3
    above, below = AttainmentCurve(always, 0.9).max_goodput_rate(), AttainmentCurve(never, 0.9).max_goodput_rate()
    assert (above.outcome, above.rate, above.high) == ("above", None, None)
    assert (below.outcome, below.rate, below.low) == ("below", None, None)


def test_one_bad_round_at_a_low_rate_widens_the_interval_and_moves_no_maximum_below_it():
    good = [RoundCount(rate, met, 40) for rate, met in ((1.0, 40), (2.0, 39), (3.0, 38), (4.0, 10))] * 2
    clean = AttainmentCurve(good, 0.9).max_goodput_rate()
    disturbed = AttainmentCurve([*good, RoundCount(1.0, 20, 40)], 0.9).max_goodput_rate()
    assert clean.rate == pytest.approx(3.1, rel=0.1)
    assert disturbed.rate is not None
    assert disturbed.rate > 1.0
    assert (disturbed.high or math.inf) / (disturbed.low or 1e-9) > (clean.high or math.inf) / (clean.low or 1e-9)


def test_the_band_of_the_curve_holds_the_shares_of_its_rounds_and_falls_with_the_rate():
    rounds = [RoundCount(rate, met, 60) for rate, met in ((1.0, 59), (2.0, 54), (3.0, 30), (4.0, 6))] * 2
    bands = [AttainmentCurve(rounds, 0.9).band(rate) for rate in (1.0, 2.0, 3.0, 4.0)]
    shares = [band.share for band in bands]
    assert shares == sorted(shares, reverse=True)
    assert all(band.low <= one.met / 60 <= band.high for band, one in zip(bands, rounds, strict=False))


def test_upwards_comes_before_downwards():
    missed, held = [RoundCount(1.0, 5, 60)] * 2, [RoundCount(1.0, 60, 60)] * 2
    assert next_rate({"a": missed, "b": held}, 1.0, 0.9) == 1.5
    assert next_rate({"a": missed, "b": missed}, 1.0, 0.9) == 0.667


def test_limits_that_even_the_lowest_rate_misses_end_the_search():
    found: dict[str, list[RoundCount]] = {}
    rate: float | None = 1.0
    while rate is not None:
        found.setdefault("a", []).append(RoundCount(rate, 3, 60))
        rate = next_rate(found, 1.0, 0.9)
    assert 1 / 32 <= min(one.rate for one in found["a"]) < 1.5 / 32


def test_a_search_goes_on_inside_the_widest_interval_and_ends_when_all_are_narrow():
    wide = {
        "a": [RoundCount(1.0, 60, 60), RoundCount(4.0, 0, 60)],
        "b": [RoundCount(1.0, 60, 60), RoundCount(4.0, 0, 60)],
    }
    rate = next_rate(wide, 1.0, 0.9)
    assert rate is not None
    assert 1.0 < rate < 4.0
    narrow = [RoundCount(rate, met, 100) for rate, met in ((1.0, 99), (1.8, 95), (2.0, 90), (2.2, 80), (3.0, 30))] * 6
    assert next_rate({"a": narrow, "b": narrow}, 1.0, 0.9) is None
