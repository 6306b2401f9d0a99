"""The cells of the map of modes, on rounds whose latencies are known, and the rates that get one. Data are made up."""

from datetime import UTC, datetime

import pytest

from ridgeline.loadtest.rate_search import Round
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.statistics.proportions import wilson_interval
from tools.bench.modes.cells import (
    Goodput,
    cell_of,
    good_rates,
    goodput_of,
    mean_ratio,
    next_cell_rate,
    ratio_between,
)
from tools.bench.modes.journal import Limits, Outcome, RoundEnded, RoundSpec, limits_of, outcome_of
from tools.bench.modes.settings import ADAPTIVE, Settings

UNLOADED = Unloaded((512,), 32, 2.0, 2.0, 0.05, 8, 0.15, 64.0, {"colocated": 2})
SETTINGS = Settings(ttft_factors=(2.0, 5.0), tpot_factors=(1.3, 2.0), workloads=("poisson",))
LIMITS = {
    (row, column): limits_of(UNLOADED, SETTINGS.ttft_factors[row], SETTINGS.tpot_factors[column])
    for row, column in SETTINGS.cells
}
WITHIN_ALL, SLOW_STEPS = Outcome(3000.0, 60.0), Outcome(3000.0, 90.0)
FAILED = Outcome(None)


def ended(variant: str, rate: float, outcomes, cell=None) -> RoundEnded:
    spec = RoundSpec("poisson", 1, variant, rate, 0, len(outcomes), cell)
    return RoundEnded(0, spec, datetime(2026, 1, 1, tzinfo=UTC), 60.0, tuple(outcomes), (), None, 0.0, 0)


def cells(rounds) -> dict:
    return {place: cell_of(rounds, SETTINGS.variants, place, limits) for place, limits in LIMITS.items()}


def test_limits_are_multiples_of_what_the_idle_server_took():
    assert LIMITS[0, 0] == Limits(4000.0, 65.0)
    assert LIMITS[1, 1] == Limits(10000.0, 100.0)


def test_goodput_is_the_rate_times_the_share_in_time_and_failures_are_missed():
    found = cells([ended("colocated", 0.5, [WITHIN_ALL] * 6 + [SLOW_STEPS] * 2 + [FAILED] * 2)])
    assert found[0, 0].variants["colocated"].requests_per_s == pytest.approx(0.3)
    assert found[0, 1].variants["colocated"].requests_per_s == pytest.approx(0.4)
    assert "disaggregated" not in found[0, 0].variants


def test_a_variant_has_its_best_rate_and_the_interval_of_that_rate():
    rounds = [
        ended("colocated", 0.5, [WITHIN_ALL] * 10),
        ended("colocated", 1.0, [WITHIN_ALL] * 8 + [FAILED] * 2),
        ended("colocated", 2.0, [WITHIN_ALL] * 1 + [FAILED] * 9),
    ]
    best = cells(rounds)[0, 0].variants["colocated"]
    assert (best.rate, best.requests_per_s) == (1.0, pytest.approx(0.8))
    assert best.low < 0.8 < best.high
    assert [(at.rate, at.met, at.total) for at in best.at_rates] == [(0.5, 10, 10), (1.0, 8, 10), (2.0, 1, 10)]


def test_the_interval_is_no_narrower_than_the_score_interval_of_the_share():
    goodput = goodput_of([Round(2.0, 16, 20), Round(2.0, 17, 20)])
    assert goodput is not None
    low, high = wilson_interval(33, 40, 0.05)
    assert goodput.low <= 2 * low
    assert goodput.high >= 2 * high


def test_a_round_of_a_mode_without_limits_serves_every_cell_and_an_adaptive_one_its_own_only():
    found = cells([ended("colocated", 0.5, [WITHIN_ALL] * 4), ended(ADAPTIVE, 0.5, [WITHIN_ALL] * 4, cell=(1, 0))])
    assert all("colocated" in cell.variants for cell in found.values())
    assert [place for place, cell in found.items() if ADAPTIVE in cell.variants] == [(1, 0)]


def test_the_ratio_is_to_the_better_of_the_others():
    rounds = [
        ended("colocated", 1.0, [WITHIN_ALL] * 40 + [FAILED] * 40),
        ended("disaggregated", 1.0, [WITHIN_ALL] * 8 + [FAILED] * 72),
        ended(ADAPTIVE, 1.0, [WITHIN_ALL] * 60 + [FAILED] * 20, cell=(0, 0)),
    ]
    cell = cells(rounds)[0, 0]
    assert cell.ratio is not None
    assert cell.ratio.ratio == pytest.approx(1.5)
    assert cell.best == ADAPTIVE
    assert mean_ratio([cell, cells([])[0, 1]]) == pytest.approx(1.5)


def test_a_mode_wins_only_beyond_the_interval():
    def winner(adaptive_met: int, requests: int) -> str:
        rounds = [
            ended("colocated", 1.0, [WITHIN_ALL] * (requests // 2) + [FAILED] * (requests - requests // 2)),
            ended(ADAPTIVE, 1.0, [WITHIN_ALL] * adaptive_met + [FAILED] * (requests - adaptive_met), cell=(0, 0)),
        ]
        return cells(rounds)[0, 0].winner

    assert winner(12, 16) == "unclear"
    assert winner(380, 400) == ADAPTIVE


def test_a_cell_in_which_nobody_served_anything_in_time_is_unreachable_and_has_no_ratio():
    cell = cells([ended("colocated", 1.0, [FAILED] * 8), ended(ADAPTIVE, 1.0, [FAILED] * 8, cell=(0, 0))])[0, 0]
    assert (cell.winner, cell.best) == ("unreachable", None)
    assert cell.ratio is not None
    assert cell.ratio.ratio is None
    assert mean_ratio([cell]) is None


def test_where_only_the_adaptive_mode_served_something_the_ratio_has_a_lower_end_alone():
    nothing = goodput_of([Round(1.0, 0, 200)])
    much = goodput_of([Round(1.0, 190, 200)])
    assert nothing is not None
    assert much is not None
    ratio = ratio_between(nothing, much)
    assert (ratio.ratio, ratio.high) == (None, None)
    assert ratio.low is not None
    assert ratio.is_above_one


def test_an_entry_of_the_summary_names_workload_limits_and_every_variant():
    row = cells([ended("colocated", 0.5, [WITHIN_ALL] * 4)])[1, 1].as_row("poisson", SETTINGS.variants)
    assert (row["workload"], row["ttft_ms"], row["tpot_ms"]) == ("poisson", 10000.0, 100.0)
    assert {"requests_per_s", "low", "high", "rate"} <= row["colocated"].keys()
    assert row["disaggregated"] is None
    assert row[ADAPTIVE] is None


def _record(**changes) -> RequestRecord:
    fields = {
        "index": 0,
        "scheduled_s": 1.0,
        "sent_s": 1.25,
        "input_tokens": 8,
        "output_tokens": 11,
        "requested_output_tokens": 11,
        "ttft_s": 0.5,
        "latency_s": 1.5,
    }
    return RequestRecord(**(fields | changes))


def test_an_outcome_counts_from_the_time_of_the_trace():
    assert outcome_of(_record()) == Outcome(750.0, 100.0)


def test_a_failed_request_meets_no_limits_and_one_token_misses_no_tpot():
    assert not outcome_of(_record(error="HTTP 429")).meets(Limits(1e9, 1e9))
    assert outcome_of(_record(output_tokens=1)).meets(Limits(800.0, 1.0))
    assert not outcome_of(_record()).meets(Limits(800.0, 99.0))


def test_a_goodput_of_no_rounds_is_none():
    assert goodput_of([]) is None
    assert isinstance(goodput_of([Round(1.0, 0, 1)]), Goodput)


def _at(shares: dict[float, int]) -> list[Round]:
    return [Round(rate, met, 10) for rate, met in shares.items()]


LADDER = (0.35, 0.5, 0.7, 1.0)
OTHERS = {"colocated": _at({0.35: 10, 0.5: 9, 0.7: 4}), "disaggregated": _at({0.35: 5, 0.5: 4, 0.7: 3})}


def test_the_adaptive_mode_starts_where_the_better_of_the_others_served_most():
    assert good_rates(OTHERS) == [0.5]
    assert next_cell_rate(LADDER, 0.7, [], OTHERS) == 0.5
    assert next_cell_rate(LADDER, 0.7, [], {}) == 0.7
    assert next_cell_rate(LADDER, 0.7, [], {"colocated": _at({0.5: 0})}) == 0.35


def test_the_adaptive_mode_goes_up_while_nearly_all_of_its_requests_are_in_time():
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 9}), OTHERS) == 0.7
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 9, 0.7: 9}), OTHERS) == 1.0


def test_the_adaptive_mode_goes_down_where_it_failed_and_else_stays_at_its_best():
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 4}), OTHERS) == 0.35
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 7}), OTHERS) == 0.5
    assert next_cell_rate(LADDER, 0.7, _at({0.7: 6}), OTHERS) == 0.5


def test_the_adaptive_mode_is_tried_at_every_rate_at_which_the_others_served_nearly_as_much_as_at_their_best():
    others = {"colocated": _at({0.35: 10, 0.5: 9, 0.7: 4}), "disaggregated": _at({0.35: 5, 0.5: 4, 0.7: 6, 1.0: 1})}
    assert good_rates(others) == [0.5, 0.7]
    assert good_rates({"colocated": _at({0.5: 0})}) == []
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 7}), others) == 0.7
    assert next_cell_rate(LADDER, 0.7, _at({0.5: 7, 0.7: 6}), others) == 0.7, "none is left, so its best one again"
    assert next_cell_rate(LADDER, 0.7, _at({1.0: 1}), others) == 0.5, "before it goes down"
