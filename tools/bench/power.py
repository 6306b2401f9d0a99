"""How often comparisons of simulated rounds find what is there, and what is not: `make power`.

The product's own judgement (`ridgeline.loadtest.statistics`) looks at pairs of rounds of made-up requests: a round is
slower or faster as a whole by a log-normal effect, its requests scatter around that and resemble their neighbours.
Prints a table; docs/results/comparisons.json has its figures, and tests/unit/loadtest/statistics/test_power.py holds
the rates.
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from ridgeline.loadtest.statistics.looks import LOOKS, looks_until
from ridgeline.loadtest.statistics.outcome import Conclusion, conclude
from ridgeline.loadtest.statistics.pairs import Latency, PairDifference
from ridgeline.loadtest.statistics.proportions import PairedCounts

REQUESTS = 20
REQUEST_SD, NEIGHBOURS = 0.14, 0.4
"""Scatter of a request's log latency and its correlation with the request before, as in a real run of the demo."""
ROUND_EFFECTS = (0.0, 0.05, 0.10, 0.15)
MARGIN = 0.05
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class World:
    """What is true of both variants; `b` differs from `a` by `tpot_ratio` and by `lost_share` of good requests."""

    round_effect: float
    tpot_ratio: float = 1.0
    lost_points: float = 0.0
    attained: float = 0.9
    """Share of requests that meet the SLOs in variant a; where TPOT decides it, b's follows from its ratio."""


def simulate(world: World, comparisons: int, seed: int, pairs: int = LOOKS[-1]) -> Iterator[list[PairDifference]]:
    """Yield the pairs of each simulated comparison."""
    random = np.random.default_rng(seed)
    shape = (comparisons, pairs, 2)
    by_name: dict[Latency, Floats] = {}
    for name in ("ttft", "ttst", "largest_gap"):
        own = random.normal(0, math.sqrt(2) * _mean_sd(), shape[:2])
        rounds = random.normal(0, world.round_effect, shape)
        by_name[name] = own + rounds[..., 1] - rounds[..., 0]
    noise = _alike_neighbours(random, shape)
    rounds = random.normal(0, world.round_effect, shape)
    tpot = noise + rounds[..., None]
    tpot[:, :, 1] += math.log(world.tpot_ratio)
    by_name["tpot"] = (tpot[:, :, 1] - tpot[:, :, 0]).mean(axis=-1)
    limit = math.hypot(REQUEST_SD, world.round_effect) * _normal_quantile(world.attained)
    met = tpot <= limit
    met[:, :, 1] &= random.random(met[:, :, 1].shape) >= world.lost_points / world.attained
    first, second = met[:, :, 0], met[:, :, 1]
    counts = np.stack([(one & other).sum(axis=-1) for one in (first, ~first) for other in (second, ~second)], axis=-1)
    latencies = {name: values.tolist() for name, values in by_name.items()}
    for number, rows in enumerate(counts.tolist()):
        yield [
            _pair(PairedCounts(*cell), {name: latencies[name][number][at] for name in latencies})
            for at, cell in enumerate(rows)
        ]


def judged(pairs: list[PairDifference], looks: tuple[int, ...]) -> Conclusion:
    """Look as `compare` does: until it is settled, or at the last look."""
    for number, look in enumerate(looks, start=1):
        found = conclude(pairs[:look], looks[:number], looks[-1], MARGIN)
        if found.is_settled:
            break
    return found


@dataclass(frozen=True)
class Rates:
    """Shares of comparisons by outcome and of those in which a latency differed, and the mean number of pairs."""

    outcomes: dict[str, float]
    mean_pairs: float
    some_differs: float


def rates(world: World, comparisons: int, seed: int, most_pairs: int = LOOKS[-1]) -> Rates:
    """Judge many simulated comparisons of at most this many pairs."""
    looks = looks_until(most_pairs)
    found = [judged(pairs, looks) for pairs in simulate(world, comparisons, seed, most_pairs)]
    counts = Counter(one.outcome for one in found)
    return Rates(
        outcomes={name: counts[name] / comparisons for name in counts},
        mean_pairs=sum(one.pairs for one in found) / comparisons,
        some_differs=sum(any(each.differs for each in one.secondary.values()) for one in found) / comparisons,
    )


def _pair(counts: PairedCounts, latencies: dict[Any, float]) -> PairDifference:
    good_a, good_b = counts.both + counts.only_a, counts.both + counts.only_b
    goodput = math.log(good_b / good_a) if good_a and good_b else None
    return PairDifference(counts, (good_b - good_a) / counts.total, goodput, latencies, counts.total)


def _alike_neighbours(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    noise = random.normal(0, REQUEST_SD, (*shape, REQUESTS))
    for at in range(1, REQUESTS):
        noise[..., at] = NEIGHBOURS * noise[..., at - 1] + math.sqrt(1 - NEIGHBOURS**2) * noise[..., at]
    return noise


def _mean_sd() -> float:
    """Return the standard deviation of the mean of a round's requests."""
    together = sum(NEIGHBOURS ** abs(one - other) for one in range(REQUESTS) for other in range(REQUESTS))
    return REQUEST_SD * math.sqrt(together) / REQUESTS


def _normal_quantile(share: float) -> float:
    return NormalDist().inv_cdf(share)


def tpot_power(world: World, pairs: int, comparisons: int, seed: int) -> float:
    """Return the share of comparisons of exactly this many pairs whose TPOT differs at the last look."""
    looks = looks_until(pairs)
    found = [conclude(one, looks, pairs, MARGIN) for one in simulate(world, comparisons, seed, pairs)]
    return sum(one.secondary["tpot"].differs for one in found) / comparisons


def table(comparisons: int, seed: int) -> str:
    """Return a table of all the rates, a round effect a row."""
    rows = [
        "| round effect | the same twice: `better` | `equivalent` | one of four latencies differs | attainment 90 % "
        "against 80 %: `better` within 6, 9, 12, 16 pairs | 99 % against 89 % | TPOT +10 %: differs after 6, 9, 12, 16 "
        "pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    for effect in ROUND_EFFECTS:
        same = rates(World(effect), comparisons, seed)
        lost = [_better(World(effect, lost_points=0.10), comparisons, seed + 1, most) for most in LOOKS]
        from_all = [
            _better(World(effect, lost_points=0.10, attained=0.99), comparisons, seed + 2, most) for most in LOOKS
        ]
        slower = [tpot_power(World(effect, tpot_ratio=1.10), most, comparisons, seed + 3) for most in LOOKS]
        rows.append(
            f"| {effect:.0%} | {same.outcomes.get('better', 0):.1%} | {same.outcomes.get('equivalent', 0):.0%} | "
            f"{same.some_differs:.1%} | {_shares(lost)} | {_shares(from_all)} | {_shares(slower)} |"
        )
    return "\n".join(rows)


def _better(world: World, comparisons: int, seed: int, most_pairs: int) -> float:
    return rates(world, comparisons, seed, most_pairs).outcomes.get("better", 0.0)


def _shares(values: list[float]) -> str:
    return ", ".join(f"{value:.0%}" for value in values)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comparisons", type=int, default=1000, help="simulated comparisons in each cell")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    Console().print(table(given.comparisons, given.seed), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
