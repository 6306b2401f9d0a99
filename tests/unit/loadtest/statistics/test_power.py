"""Simulated comparisons: a variant against itself is seldom called better, and planted differences are found.

The seeds are fixed, so these are rates of fixed samples; each bound allows two standard errors and a half.
The powers are those of docs/results/comparisons.json.
"""

import pytest

from ridgeline.loadtest.statistics import outcome
from ridgeline.loadtest.statistics.looks import ALPHA
from tools.bench.power import ROUND_EFFECTS, World, rates, tpot_power

COMPARISONS = 250


def test_an_variant_against_itself_is_called_better_in_five_percent_of_comparisons_at_most():
    found = [rates(World(effect), COMPARISONS, seed=7) for effect in ROUND_EFFECTS]
    better = [one.outcomes.get("better", 0.0) for one in found]
    assert max(better) <= 0.05 + 2.5 * (0.05 * 0.95 / COMPARISONS) ** 0.5
    assert sum(better) / len(better) <= 0.05 + 2.5 * (0.05 * 0.95 / COMPARISONS / len(better)) ** 0.5
    assert max(one.some_differs for one in found) <= 0.05 + 2.5 * (0.05 * 0.95 / COMPARISONS) ** 0.5


def test_the_same_looks_at_five_percent_each_would_be_wrong_too_often(monkeypatch):
    monkeypatch.setattr(outcome, "levels", lambda looks, most_pairs: (ALPHA,) * len(looks))
    found = rates(World(0.10, attained=0.5), 150, seed=7)
    assert found.outcomes["better"] > 0.05 + 2.5 * (0.05 * 0.95 / 150) ** 0.5


@pytest.mark.parametrize(
    ("world", "most_pairs", "power"),
    [
        (World(0.0, lost_points=0.10), 6, 0.12),
        (World(0.0, lost_points=0.10), 16, 0.69),
        (World(0.10, lost_points=0.10), 16, 0.43),
        (World(0.10, lost_points=0.10, attained=0.99), 9, 0.85),
    ],
)
def test_ten_points_of_attainment_lost_are_found_as_often_as_the_table_says(world, most_pairs, power):
    found = rates(world, COMPARISONS, seed=8, most_pairs=most_pairs)
    assert found.outcomes.get("better", 0.0) == pytest.approx(power, abs=0.08)


@pytest.mark.parametrize(("effect", "pairs", "power"), [(0.05, 9, 0.32), (0.05, 16, 0.72), (0.10, 16, 0.25)])
def test_ten_percent_of_tpot_are_found_as_often_as_the_table_says(effect, pairs, power):
    assert tpot_power(World(effect, tpot_ratio=1.10), pairs, COMPARISONS, seed=9) == pytest.approx(power, abs=0.08)
