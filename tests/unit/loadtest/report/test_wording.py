"""The sentences of a comparison over rates claim what its rounds show, and nothing more."""

from collections.abc import Sequence

import pytest

from ridgeline.loadtest.report.wording import say_rates
from ridgeline.loadtest.statistics.attainment_curve import RoundCount, curves_of
from ridgeline.loadtest.statistics.rate_verdict import judge_rates


def _sentence(**rounds: Sequence[tuple[float, int, int]]) -> str:
    """Say of each variant's rounds (rate, requests within the SLOs, requests), which took five minutes."""
    counts = {name: [RoundCount(*one) for one in of_one] for name, of_one in rounds.items()}
    curves = curves_of(counts, 0.9)
    held = {name: curve.max_goodput_rate() for name, curve in curves.items()}
    return say_rates({name: name for name in counts}, held, judge_rates(curves), 300, None)[0]


BRACKETED = [(1.0, 40, 40), (1.5, 40, 40), (2.0, 37, 40), (3.0, 5, 40)]
NEARLY_THE_SAME = [(1.0, 40, 40), (1.5, 40, 40), (2.0, 34, 40), (3.0, 4, 40)]
FAR_LESS = [(0.3, 40, 40), (0.5, 36, 40), (1.0, 2, 40), (1.5, 0, 40), (2.0, 0, 40)]


def test_of_three_one_is_behind_and_two_are_not_told_apart():
    said = _sentence(vLLM=BRACKETED, adaptive=NEARLY_THE_SAME, colocated=FAR_LESS)
    assert "cannot tell yet whether vLLM holds more than adaptive; they differ by a factor of 1." in said
    assert " at most. Colocated holds less than vLLM, strong evidence. " in said
    assert said.endswith("would tell.")


def test_evidence_that_is_not_strong_is_told_as_what_it_is():
    few = {"a": [(1.0, 28, 30), (2.0, 10, 30)], "b": [(1.0, 27, 30), (2.0, 13, 30)]}
    said = _sentence(**few, c=[(0.5, 27, 30), (1.0, 5, 30), (2.0, 0, 30)])
    assert " C holds less than a, some evidence. " in said


def test_no_largest_difference_is_told_where_no_measured_rate_bounds_it():
    said = _sentence(a=[(1.0, 28, 30), (2.0, 10, 30)], b=[(1.0, 24, 30), (2.0, 13, 30)])
    assert "cannot tell yet whether a holds more than b. " in said


def test_a_variant_that_misses_the_slos_at_the_only_rate_needs_no_higher_rate_to_be_told_apart():
    said = _sentence(a=[(1.0, 10, 10)], b=[(1.0, 7, 10)])
    assert "high enough" not in said
    assert "cannot tell yet whether a holds more than b. " in said


@pytest.mark.parametrize("count", [1, 6])
def test_variants_that_hold_every_rate_are_told_apart_by_none(count):
    assert "high enough" in _sentence(a=[(1.0, 60, 60)] * count, b=[(1.0, 60, 60)] * count)
