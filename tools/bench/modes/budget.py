"""Divides the time of a workload among its rounds. Pure arithmetic.

A block has a round of each pure mode at each rate, a round of the adaptive mode for each cell, and those of the climb
that is expected after it. Rounds have as many requests as fit; another block is planned only if rounds keep enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEAST_REQUESTS: Final = 8
"""Fewer requests in a round than this say nothing, whatever the budget."""
ENOUGH_REQUESTS: Final = 16
"""Rounds of fewer requests are not planned for the sake of another block."""
MOST_REQUESTS: Final = 48
"""More requests in a round than this are not worth as much as another block."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How many blocks there is time for, and the requests in each of their rounds."""

    blocks: int
    requests: int


def block_s(rates: Sequence[float], requests: int, beside_s: float) -> float:
    """Return the seconds of a block whose rounds have these rates; each round takes `beside_s` beside its arrivals."""
    return sum(beside_s + requests / rate for rate in rates)


def requests_within(rates: Sequence[float], seconds: float, beside_s: float) -> int:
    """Return how many requests each round of a block of so many seconds may have."""
    return int((seconds - beside_s * len(rates)) / sum(1 / rate for rate in rates))


def plan_blocks(
    rates: Sequence[float], seconds: float, beside_s: float, most_blocks: int, requests: int | None = None
) -> BlockPlan:
    """Return the plan for this time; `requests`, if given, are those of each round.

    There is no block if not even one of the shortest rounds fits.
    """
    if requests is not None:
        return BlockPlan(min(most_blocks, int(seconds / block_s(rates, requests, beside_s))), requests)
    for blocks in range(most_blocks, 0, -1):
        fitting = requests_within(rates, seconds / blocks, beside_s)
        if fitting >= ENOUGH_REQUESTS or (blocks == 1 and fitting >= LEAST_REQUESTS):
            return BlockPlan(blocks, min(fitting, MOST_REQUESTS))
    return BlockPlan(0, 0)


def share_of(left_s: float, workloads_left: int) -> float:
    """Return the seconds of the next workload; what one leaves over goes to those after it."""
    return left_s / max(1, workloads_left)
