"""Simulated comparisons: rounds of servers whose attainment over the rate is known, on a machine whose speed drifts.

The speed of the machine is an Ornstein-Uhlenbeck process on a log scale: rounds close in time feel about the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.loadtest.statistics.attainment_curve import RoundCount, next_rate

Curve = Callable[[float], float]


def logistic(max_rate: float, slope: float) -> Curve:
    """Return a curve that falls to 90 % at this rate, by so many logits while the rate grows by e."""
    return lambda rate: 1 / (1 + math.exp(-(math.log(9) - slope * math.log(rate / max_rate))))


@dataclass(frozen=True)
class Machine:
    """How rounds scatter."""

    drift: float = 0.12
    """Standard deviation of the logarithm of the speed: 25 % between two moments far apart is 0.16."""
    forgets_s: float = 120.0
    """The time after which little of a speed is left."""
    scatter: float = 0.03
    """Of each round on its own."""
    beside_s: float = 3.0
    """Seconds of a round without arrivals."""


def searched(
    curves: Mapping[str, Curve],
    seed: int,
    *,
    start: float = 2.0,
    pairs: int = 6,
    round_s: float = 10.0,
    machine: Machine = Machine(),
    rates: Sequence[float] = (),
) -> dict[str, list[RoundCount]]:
    """Run a simulated comparison of so many pairs at most: a search from `start`, or at these rates in turn."""
    draw = np.random.default_rng(seed)
    speed, found = machine.drift * draw.standard_normal(), dict[str, list[RoundCount]]()
    kept = math.exp(-(round_s + machine.beside_s) / machine.forgets_s)
    rate: float | None = rates[0] if rates else start
    for pair in range(pairs):
        if rate is None:
            break
        for name in draw.permutation(list(curves)):
            speed = kept * speed + machine.drift * math.sqrt(1 - kept**2) * draw.standard_normal()
            felt = rate * math.exp(machine.scatter * draw.standard_normal() - speed)
            sent = max(8, round(rate * round_s))
            met = int(draw.binomial(sent, curves[name](felt)))
            found.setdefault(str(name), []).append(RoundCount(rate, met, sent))
        rate = rates[(pair + 1) % len(rates)] if rates else next_rate(found, start, 0.9)
    return {name: found[name] for name in curves}
