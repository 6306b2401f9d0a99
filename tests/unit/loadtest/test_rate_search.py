"""The search for the maximum goodput rate, on simulated servers whose attainment is a known function of the rate."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from ridgeline.loadtest.rate_search import (
    Bounds,
    MaxGoodputRate,
    Ratio,
    Round,
    bands,
    bracket,
    least_requests,
    max_goodput_rate,
    next_rate,
    ratio_of,
    search,
)

BOUNDS = Bounds()
SEEDS = 200


def _logistic(max_rate: float, slope: float):
    return lambda rate: 1 / (1 + math.exp(-(math.log(9) - slope * math.log(rate / max_rate))))


def _shoulder(max_rate: float):
    """Whole up to 5 % below the knee, then falling with the rate: an open queue that no longer keeps up."""
    start = max_rate * 0.95
    return lambda rate: 1.0 if rate <= start else max(0.0, 1 - 0.1 * (rate / start - 1) / (1 / 0.95 - 1))


def _server(seed: int, curves, requests: int = 40, effect: float = 0.05):
    """Measure simulated variants; the rate that a round feels differs from the one asked for by a log-normal effect."""
    draw, asked = np.random.default_rng(seed), []

    async def measure(rate: float):
        asked.append(rate)
        felt = {variant: rate * math.exp(effect * draw.standard_normal()) for variant in curves}
        return {
            variant: Round(rate, int(draw.binomial(requests, curves[variant](felt[variant]))), requests)
            for variant in curves
        }

    return measure, asked


def _true_knee(curve, effect: float) -> float:
    """The rate at which attainment, averaged over round effects, is 90 %: what a search is asked for."""
    steps = (np.arange(99) + 0.5) / 99
    felt = [math.exp(effect * NormalDist().inv_cdf(float(step))) for step in steps]
    low, high = 0.1, 10.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        holds = np.mean([curve(middle * one) for one in felt]) >= 0.9
        low, high = (middle, high) if holds else (low, middle)
    return low


@pytest.mark.parametrize(
    "curve", [_logistic(2.0, 4), _logistic(2.0, 10), _shoulder(2.0)], ids=["flat", "steep", "max_goodput_rate"]
)
@pytest.mark.parametrize("effect", [0.05, 0.1])
async def test_the_interval_holds_the_true_rate_in_nineteen_of_twenty_simulated_searches(curve, effect):
    truth, held, bracketed, widths = _true_knee(curve, effect), 0, 0, []
    for seed in range(7_000, 7_000 + SEEDS):
        measure, asked = _server(seed, {"a": curve}, effect=effect)
        rounds = await search(measure, (0.5, 3.0)[seed % 2], BOUNDS)
        found = max_goodput_rate(rounds["a"], 0.9)
        bracketed += found.outcome == "found"
        assert len(asked) <= BOUNDS.most_pairs
        held += (found.low or 0) <= truth <= (found.high or math.inf)
        widths.append((found.high or math.inf) / (found.low or 1e-9))
    assert held >= 0.95 * SEEDS - 2 * math.sqrt(0.05 * 0.95 * SEEDS)
    assert bracketed >= 0.95 * SEEDS
    assert np.median(widths) < 3, "an interval that holds everything says nothing"


async def test_limits_that_even_the_lowest_rate_misses_are_unreachable_and_a_rate_never_missed_is_above():
    measure, asked = _server(0, {"a": lambda rate: 0.3, "b": lambda rate: 1.0})
    rounds = await search(measure, 1.0, BOUNDS)
    assert max_goodput_rate(rounds["a"], 0.9).outcome == "below"
    assert max_goodput_rate(rounds["b"], 0.9).outcome == "above"
    assert min(asked) == 1 / 32


async def test_the_search_ends_when_its_time_is_over():
    measure, asked = _server(0, {"a": _logistic(2.0, 8)})
    await search(measure, 1.0, BOUNDS, is_over=lambda: len(asked) >= 4)
    assert len(asked) == 4


def test_upwards_comes_before_downwards_since_rounds_at_a_high_rate_are_short():
    missed, held = [Round(1.0, 5, 10)] * 3, [Round(1.0, 10, 10)] * 3
    assert next_rate({"a": missed, "b": held}, 1.0, BOUNDS) == 2.0
    assert next_rate({"a": missed, "b": missed}, 1.0, BOUNDS) == 0.5


def test_a_mean_that_rises_with_the_rate_is_pooled_with_its_neighbour():
    rounds = [Round(1.0, 20, 20), Round(2.0, 17, 20), Round(3.0, 20, 20), Round(4.0, 5, 20)]
    assert bracket(rounds, 0.9) == (3.0, 4.0)
    assert bracket(rounds[-1:], 0.9) == (None, 4.0)


def test_the_ends_of_an_interval_are_measured_rates_told_apart_from_the_share():
    rounds = [Round(1.0, 60, 60)] * 3 + [Round(2.0, 54, 60)] * 3 + [Round(4.0, 5, 60)] * 3
    found = max_goodput_rate(rounds, 0.9)
    assert (found.low, found.high) == (1.0, 4.0)
    assert found.rate == pytest.approx(2.0)


def test_an_end_that_too_few_requests_settle_is_open_and_gets_more_rounds():
    rounds = [Round(1.0, 10, 10)] * 3 + [Round(1.1, 0, 10)] * 3
    found = max_goodput_rate(rounds, 0.9)
    assert (found.outcome, found.low, found.high) == ("found", None, 1.1)
    assert next_rate({"a": rounds}, 1.0, BOUNDS) == 1.0
    assert max_goodput_rate(rounds + [Round(1.0, 10, 10)] * 15, 0.9).low == 1.0


def test_one_bad_round_at_a_low_rate_is_no_end_of_an_interval_that_higher_rates_contradict():
    held = [Round(2.0, 10, 10)] * 3 + [Round(4.0, 10, 10)] * 3
    assert max_goodput_rate([Round(1.0, 3, 10), *held], 0.9) == MaxGoodputRate("above", None, None, None)
    assert max_goodput_rate([Round(1.0, 0, 10), *held], 0.9).high is None
    assert max_goodput_rate([Round(1.0, 30, 60)] * 2 + [Round(2.0, 60, 60)] * 9, 0.9).high is None
    assert max_goodput_rate([Round(1.0, 0, 60)], 0.9) == MaxGoodputRate("below", None, None, None)
    assert max_goodput_rate([Round(1.0, 0, 60)] * 2, 0.9) == MaxGoodputRate("below", None, None, 1.0)


@pytest.mark.parametrize("attainment", [0.5, 0.8, 0.9, 0.99])
def test_rounds_of_the_least_requests_can_show_that_a_rate_is_held_and_shorter_ones_cannot(attainment):
    least = least_requests(attainment)
    assert max_goodput_rate([Round(1.0, least, least)] * 3, attainment).low == 1.0
    assert max_goodput_rate([Round(1.0, least - 1, least - 1)] * 3, attainment).low is None


def test_scatter_between_rounds_widens_the_band():
    even, uneven = ([Round(1.0, met, 40) for met in mets] for mets in ((30, 30, 30, 30), (40, 20, 40, 20)))
    assert bands(uneven)[0].low < bands(even)[0].low - 0.1
    assert bands(uneven)[0].high > bands(even)[0].high


def test_the_ratio_of_two_knees_is_open_where_one_of_them_is():
    a, b = MaxGoodputRate("found", 1.0, 0.8, 1.25), MaxGoodputRate("found", 2.0, 1.6, 2.5)
    found = ratio_of(a, b)
    assert found.ratio == 2.0
    assert found.low == pytest.approx(2 / 1.25 ** math.sqrt(2))
    assert found.high == pytest.approx(2 * 1.25 ** math.sqrt(2))
    assert ratio_of(a, MaxGoodputRate("found", 2.0, 1.6, None)).high is None
    assert ratio_of(a, MaxGoodputRate("above", None, 2.5, None)) == Ratio(None, 2.0, None)
