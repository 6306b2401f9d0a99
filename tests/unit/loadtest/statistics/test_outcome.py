"""What pairs of rounds lead to: each outcome, and how large a difference must be to be seen."""

import math

import msgspec
import pytest

from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.statistics.outcome import Conclusion, conclude, pairs_to_see, smallest_seen
from ridgeline.loadtest.statistics.pairs import PairDifference, pair_difference
from ridgeline.loadtest.statistics.proportions import PairedCounts
from tests.support.load_records import a_record

MARGIN = 0.05


def _pair(both=0, only_a=0, only_b=0, neither=0, **latencies) -> PairDifference:
    counts = PairedCounts(both, only_a, only_b, neither)
    return PairDifference(counts, (only_b - only_a) / counts.total, None, latencies, counts.total)


def _judged(pairs: list[PairDifference], most_pairs: int = 16) -> Conclusion:
    return conclude(pairs, (len(pairs),), most_pairs, MARGIN)


def test_an_variant_that_keeps_more_requests_in_every_pair_is_better():
    found = _judged([_pair(both=16, only_b=3 + at % 2, neither=1) for at in range(6)])
    assert (found.outcome, found.better) == ("better", "b")
    assert found.attainment.low > 0
    other = _judged([_pair(both=16, only_a=3 + at % 2, neither=1) for at in range(6)])
    assert (other.outcome, other.better) == ("better", "a")


def test_fewer_than_six_pairs_show_nothing_whatever_they_show():
    found = conclude([_pair(both=10, only_b=10)] * 5, (5,), 5, MARGIN)
    assert (found.outcome, found.better) == ("inconclusive", None)
    assert conclude([_pair(both=10)], (1,), 1, MARGIN).attainment is None


def test_one_wild_pair_makes_no_difference():
    found = _judged([_pair(both=18, only_b=2)] * 5 + [_pair(both=18, only_a=2)])
    assert found.outcome == "inconclusive"


def test_pairs_that_all_agree_are_equivalent_only_if_they_hold_enough_requests():
    assert _judged([_pair(both=30)] * 6).outcome == "equivalent"
    few = _judged([_pair(both=10)] * 6)
    assert few.outcome == "inconclusive", "a loss of five points would not have been seen in 60 requests"
    assert few.attainment.sd == 0
    assert few.attainment.low < -MARGIN
    assert few.smallest_seen > MARGIN
    assert few.pairs_for_margin > 6


def test_limits_that_nobody_meets_are_called_out_of_reach_and_not_equivalence():
    assert _judged([_pair(neither=30)] * 6).outcome == "slo_unreachable"
    assert conclude([_pair(neither=30)] * 2, (2,), 2, MARGIN).outcome == "slo_unreachable"
    assert _judged([_pair(neither=28, both=2)] * 6).outcome != "slo_unreachable"


def test_a_latency_that_differs_is_secondary_and_corrected_for_the_others():
    pairs = [_pair(both=30, ttft=0.01 * (-1) ** at, tpot=0.10 + 0.01 * (at % 3)) for at in range(6)]
    found = _judged(pairs)
    assert found.outcome == "equivalent"
    assert found.secondary["tpot"].differs
    assert found.secondary["tpot"].p_holm == pytest.approx(2 * found.secondary["tpot"].estimate.p_t)
    assert not found.secondary["ttft"].differs
    assert found.secondary["ttft"].is_equivalent


def test_the_smallest_difference_that_is_seen_shrinks_with_pairs_and_grows_with_scatter():
    assert smallest_seen(0.1, 6, 0.05) == pytest.approx((2.5706 + 0.9195) * 0.1 / math.sqrt(6), rel=1e-3)
    assert smallest_seen(0.1, 16, 0.05) < smallest_seen(0.1, 6, 0.05) < smallest_seen(0.2, 6, 0.05)
    needed = pairs_to_see(0.05, 0.1)
    assert smallest_seen(0.1, needed, 0.05) <= 0.05 < smallest_seen(0.1, needed - 1, 0.05)
    assert pairs_to_see(0.05, 0.001) == 6
    assert pairs_to_see(0.001, 1.0) is None


def test_a_pair_compares_request_by_request_those_that_finished_in_both():
    slo = Slo(ttft_ms=200, tpot_ms=50)
    a = [a_record(0, 0.1, 0.04), a_record(1, 0.1, 0.02), a_record(2, 0.1, 0.04, error="cut"), a_record(3, 0.3, 0.04)]
    b = [a_record(0, 0.1, 0.08), a_record(1, 0.1, 0.04), a_record(2, 0.1, 0.04), a_record(3, 0.3, 0.08)]
    found = pair_difference(a, b, slo)
    assert found.counts == PairedCounts(both=1, only_a=1, only_b=1, neither=1)
    assert (found.attainment, found.goodput, found.compared) == (0.0, 0.0, 3)
    assert found.latencies["tpot"] == found.latencies["largest_gap"] == pytest.approx(math.log(2))
    assert found.latencies["ttft"] == pytest.approx(0)


def test_a_request_that_pauses_once_misses_a_limit_on_the_largest_gap_though_its_tpot_is_within_limits():
    steady, paused = a_record(0, 0.1, 0.04), a_record(0, 0.1, 0.04)
    paused = msgspec.structs.replace(paused, itls_s=(0.02,) * 9 + (0.22,))
    any_gap, short_gap = Slo(ttft_ms=200, tpot_ms=50), Slo(ttft_ms=200, tpot_ms=50, gap_ms=100)
    assert paused.meets(*any_gap.in_seconds())
    assert not paused.meets(*short_gap.in_seconds())
    assert paused.meets(*short_gap.in_seconds(2.5))
    assert pair_difference([steady], [paused], any_gap).attainment == 0
    assert pair_difference([steady], [paused], short_gap).attainment == -1
    single = msgspec.structs.replace(paused, itls_s=(), output_tokens=1)
    assert single.meets(*short_gap.in_seconds())


def test_limits_are_judged_from_when_the_request_should_have_left():
    slo = Slo(ttft_ms=200, tpot_ms=50)
    late = a_record(0, 0.15, 0.04, sent_s=0.1)
    assert not late.meets(*slo.in_seconds())
    assert (late.ttft_s, late.ttft_scheduled_s) == (0.15, pytest.approx(0.25))
