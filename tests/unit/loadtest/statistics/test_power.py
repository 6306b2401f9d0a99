"""Simulated comparisons: a variant against itself is seldom called better, and planted differences are found.

The product's own judgement looks at pairs of rounds of made-up requests: a round is slower or faster as a whole by a
log-normal effect, its requests scatter around that and resemble their neighbours. The seeds are fixed, so these are
rates of fixed samples; each bound allows two standard errors and a half. The powers are those of
docs/results/comparisons.json.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import pytest

from ridgeline.loadtest.statistics import outcome
from ridgeline.loadtest.statistics.looks import ALPHA, LOOKS, looks_until
from ridgeline.loadtest.statistics.outcome import Conclusion, conclude
from ridgeline.loadtest.statistics.pairs import PairDifference
from ridgeline.loadtest.statistics.proportions import PairedCounts

COMPARISONS = 250
REQUESTS = 20
REQUEST_SD, NEIGHBOURS = 0.14, 0.4
"""Scatter of a request's log latency and its correlation with the request before, as in a real run of the demo."""
ROUND_EFFECTS = (0.0, 0.05, 0.10, 0.15)
MARGIN = 0.05


@dataclass(frozen=True)
class World:
    """What is true of both variants; `b` differs from `a` by `tpot_ratio` and by `lost_points` of good requests."""

    round_effect: float
    tpot_ratio: float = 1.0
    lost_points: float = 0.0
    attained: float = 0.9
    """Share of requests that meet the SLOs in variant a; where TPOT decides it, b's follows from its ratio."""


def simulated(world: World, comparisons: int, seed: int, pairs: int = LOOKS[-1]) -> Iterator[list[PairDifference]]:
    """The pairs of each simulated comparison."""
    random = np.random.default_rng(seed)
    shape = (comparisons, pairs, 2)
    together = sum(NEIGHBOURS ** abs(one - other) for one in range(REQUESTS) for other in range(REQUESTS))
    mean_sd = REQUEST_SD * math.sqrt(together) / REQUESTS
    latencies = {}
    for name in ("ttft", "ttst", "largest_gap"):
        own = random.normal(0, math.sqrt(2) * mean_sd, shape[:2])
        rounds = random.normal(0, world.round_effect, shape)
        latencies[name] = own + rounds[..., 1] - rounds[..., 0]
    tpot = random.normal(0, REQUEST_SD, (*shape, REQUESTS))
    for at in range(1, REQUESTS):
        tpot[..., at] = NEIGHBOURS * tpot[..., at - 1] + math.sqrt(1 - NEIGHBOURS**2) * tpot[..., at]
    tpot += random.normal(0, world.round_effect, shape)[..., None]
    tpot[:, :, 1] += math.log(world.tpot_ratio)
    latencies["tpot"] = (tpot[:, :, 1] - tpot[:, :, 0]).mean(axis=-1)
    met = tpot <= math.hypot(REQUEST_SD, world.round_effect) * NormalDist().inv_cdf(world.attained)
    met[:, :, 1] &= random.random(met[:, :, 1].shape) >= world.lost_points / world.attained
    first, second = met[:, :, 0], met[:, :, 1]
    counts = np.stack([(one & other).sum(axis=-1) for one in (first, ~first) for other in (second, ~second)], axis=-1)
    for number, rows in enumerate(counts.tolist()):
        yield [
            pair(PairedCounts(*cell), {name: float(values[number][at]) for name, values in latencies.items()})
            for at, cell in enumerate(rows)
        ]


def pair(counts: PairedCounts, latencies: dict[str, float]) -> PairDifference:
    good_a, good_b = counts.both + counts.only_a, counts.both + counts.only_b
    goodput = math.log(good_b / good_a) if good_a and good_b else None
    return PairDifference(counts, (good_b - good_a) / counts.total, goodput, latencies, counts.total)


def judged(pairs: list[PairDifference], looks: tuple[int, ...]) -> Conclusion:
    """Looks as `compare` does: until it is settled, or at the last look."""
    for number, look in enumerate(looks, start=1):
        found = conclude(pairs[:look], looks[:number], looks[-1], MARGIN)
        if found.is_settled:
            break
    return found


def conclusions(world: World, comparisons: int, seed: int, most_pairs: int = LOOKS[-1]) -> list[Conclusion]:
    return [judged(pairs, looks_until(most_pairs)) for pairs in simulated(world, comparisons, seed, most_pairs)]


def better(found: list[Conclusion]) -> float:
    return sum(one.outcome == "better" for one in found) / len(found)


def test_an_variant_against_itself_is_called_better_in_five_percent_of_comparisons_at_most():
    found = [conclusions(World(effect), COMPARISONS, seed=7) for effect in ROUND_EFFECTS]
    rates = [better(each) for each in found]
    assert max(rates) <= 0.05 + 2.5 * (0.05 * 0.95 / COMPARISONS) ** 0.5
    assert sum(rates) / len(rates) <= 0.05 + 2.5 * (0.05 * 0.95 / COMPARISONS / len(rates)) ** 0.5
    differing = [sum(any(each.differs for each in one.secondary.values()) for one in ended) for ended in found]
    assert max(differing) / COMPARISONS <= 0.05 + 2.5 * (0.05 * 0.95 / COMPARISONS) ** 0.5


def test_the_same_looks_at_five_percent_each_would_be_wrong_too_often(monkeypatch):
    monkeypatch.setattr(outcome, "levels", lambda looks, most_pairs: (ALPHA,) * len(looks))
    found = conclusions(World(0.10, attained=0.5), 150, seed=7)
    assert better(found) > 0.05 + 2.5 * (0.05 * 0.95 / 150) ** 0.5


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
    assert better(conclusions(world, COMPARISONS, seed=8, most_pairs=most_pairs)) == pytest.approx(power, abs=0.08)


@pytest.mark.parametrize(("effect", "pairs", "power"), [(0.05, 9, 0.32), (0.05, 16, 0.72), (0.10, 16, 0.25)])
def test_ten_percent_of_tpot_are_found_as_often_as_the_table_says(effect, pairs, power):
    looks, slower = looks_until(pairs), World(effect, tpot_ratio=1.10)
    found = [conclude(each, looks, pairs, MARGIN) for each in simulated(slower, COMPARISONS, seed=9, pairs=pairs)]
    assert sum(one.secondary["tpot"].differs for one in found) / COMPARISONS == pytest.approx(power, abs=0.08)
