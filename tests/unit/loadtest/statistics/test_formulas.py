"""The formulas against published examples, tables and brute force."""

import itertools

import pytest

from ridgeline.loadtest.statistics.looks import ALPHA, levels, looks_until, spent
from ridgeline.loadtest.statistics.paired_tests import estimate, holm, sign_flip_p
from ridgeline.loadtest.statistics.proportions import PairedCounts, paired_score_interval, wilson_interval


def test_wilsons_interval_has_a_width_where_all_requests_agree():
    low, high = wilson_interval(36, 36, 0.05)
    assert (low, high) == (pytest.approx(36 / (36 + 1.959964**2), abs=1e-5), 1.0)
    assert wilson_interval(15, 148, 0.05) == (pytest.approx(0.0624, abs=1e-4), pytest.approx(0.1605, abs=1e-4))


@pytest.mark.parametrize(
    ("counts", "ends"),
    [((36, 12, 2, 0), (0.0569, 0.3404)), ((0, 0, 0, 50), (-0.0713, 0.0713)), ((50, 0, 0, 0), (-0.0713, 0.0713))],
)
def test_the_interval_of_two_paired_shares_is_newcombes(counts, ends):
    low, high = paired_score_interval(PairedCounts(*counts), 0.05)
    assert (-high, -low) == (pytest.approx(ends[0], abs=1e-4), pytest.approx(ends[1], abs=1e-4))


def test_the_sign_flip_test_counts_all_patterns():
    differences = [0.4, -0.1, 0.3, 0.25, 0.0, 0.6, -0.05]
    patterns = itertools.product((1, -1), repeat=len(differences))
    sums = [abs(sum(sign * one for sign, one in zip(signs, differences, strict=True))) for signs in patterns]
    expected = sum(one >= abs(sum(differences)) - 1e-9 for one in sums) / len(sums)
    assert sign_flip_p(differences) == pytest.approx(expected)
    assert sign_flip_p([0.1] * 6) == pytest.approx(2 / 64)
    assert sign_flip_p([0.0] * 6) == sign_flip_p([0.1, -0.1]) == 1.0


def test_the_t_interval_is_the_textbooks():
    found = estimate([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0], 0.05)
    assert (found.mean, found.sd) == (pytest.approx(0.75), pytest.approx(1.789, abs=1e-3))
    assert (found.low, found.high) == (pytest.approx(-0.5298, abs=1e-3), pytest.approx(2.0298, abs=1e-3))
    assert found.p_t == pytest.approx(0.2176, abs=1e-3)
    assert estimate([1.0], 0.05) is None
    assert estimate([0.0, 0.0], 0.05).p_t == 1.0


def test_holm_multiplies_by_what_is_left_and_never_falls():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}


def test_the_last_pair_is_always_a_look():
    assert looks_until(16) == (6, 9, 12, 16)
    assert looks_until(10) == (6, 9, 10)
    assert looks_until(3) == (3,)
    assert looks_until(20) == (6, 9, 12, 16, 20)


def test_all_looks_together_spend_five_percent_and_even_looks_are_pocock_s():
    assert levels((6,), 6) == (pytest.approx(ALPHA),)
    assert spent(1.0) == pytest.approx(ALPHA)
    assert levels((6, 9, 12, 16), 16)[0] == pytest.approx(spent(6 / 16))
    # Two even looks: ldbounds and gsDesign print 2.157 and 2.201 for this spending function at 5 %, two-sided.
    assert levels((6, 12), 12) == (pytest.approx(0.0310, abs=1e-4), pytest.approx(0.0277, abs=1e-4))


def test_a_comparison_cut_short_spends_only_what_it_has_seen():
    assert levels((6, 7), 16)[-1] < levels((6, 9), 16)[-1] < ALPHA
