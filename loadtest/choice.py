"""Chooses the best of a variant's candidates, and draws the order in which all run."""

import random
from collections.abc import Mapping, Sequence

import msgspec

from loadtest.statistics.outcome import Side


class Score(msgspec.Struct, frozen=True):
    """What a candidate reached in its tuning rounds."""

    candidate: str
    attainment: float
    goodput: float
    """Requests per second that met the SLOs."""


def best_of(scores: Sequence[Score]) -> Score:
    """Return the score with the highest attainment, then goodput; of equals the one that was declared first."""
    return max(scores, key=lambda score: (score.attainment, score.goodput))  # max returns the first of equals


def order_of(candidates: Mapping[Side, Sequence[object]], seed: int) -> list[tuple[Side, int]]:
    """Draw the order of all candidates, as side and place; the same one for the same seed.

    Candidates of both variants are mixed, so that a drift of the machine favours no variant.
    """
    turns = [(side, place) for side, declared in candidates.items() for place in range(len(declared))]
    random.Random(f"tuning {seed}").shuffle(turns)
    return turns
