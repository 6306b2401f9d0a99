"""The cells of the map of modes, on rounds whose latencies are known, and the picture of them. All data are made up."""

import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime

import pytest

from loadtest.rate_search import Round
from loadtest.run.records import RequestRecord
from loadtest.run.unloaded import Unloaded
from loadtest.statistics.proportions import wilson_interval
from tools.bench.modes.cells import Goodput, cells_of, goodput_of, limits_of, mean_ratio, ratio_between
from tools.bench.modes.journal import SEARCH, Limits, Outcome, RoundEnded, RoundSpec, outcome_of
from tools.bench.modes.picture import draw
from tools.bench.modes.settings import ADAPTIVE, Settings

UNLOADED = Unloaded((512,), 32, 2.0, 2.0, 0.05, 8, 0.15, 64.0, {"colocated": 2})
SETTINGS = Settings(ttft_factors=(2.0, 5.0), tpot_factors=(1.3, 2.0), workloads=("poisson",))
LIMITS = limits_of(SETTINGS, UNLOADED)
WITHIN_ALL, SLOW_STEPS = Outcome(3000.0, 60.0), Outcome(3000.0, 90.0)
FAILED = Outcome(None)


def ended(arm: str, rate: float, outcomes, cell=None, block: int = 1, void: str | None = None) -> RoundEnded:
    spec = RoundSpec("poisson", block, arm, rate, 0, len(outcomes), cell)
    return RoundEnded(0, spec, datetime(2026, 1, 1, tzinfo=UTC), 60.0, tuple(outcomes), (), void, 0.0, 0)


def cells(rounds) -> dict:
    return {cell.place: cell for cell in cells_of("poisson", rounds, SETTINGS, LIMITS)}


def test_limits_are_multiples_of_what_the_idle_server_took():
    assert LIMITS[0, 0] == Limits(4000.0, 65.0)
    assert LIMITS[1, 1] == Limits(10000.0, 100.0)
    assert SETTINGS.named((1, 1)) == "balanced"
    assert SETTINGS.balanced == (1, 1)


def test_goodput_is_the_rate_times_the_share_in_time_and_failures_are_missed():
    found = cells([ended("colocated", 0.5, [WITHIN_ALL] * 6 + [SLOW_STEPS] * 2 + [FAILED] * 2)])
    assert found[0, 0].arms["colocated"].requests_per_s == pytest.approx(0.3)
    assert found[0, 1].arms["colocated"].requests_per_s == pytest.approx(0.4)
    assert "disaggregated" not in found[0, 0].arms


def test_an_arm_has_its_best_rate_and_the_interval_of_that_rate():
    rounds = [
        ended("colocated", 0.5, [WITHIN_ALL] * 10),
        ended("colocated", 1.0, [WITHIN_ALL] * 8 + [FAILED] * 2),
        ended("colocated", 2.0, [WITHIN_ALL] * 1 + [FAILED] * 9),
    ]
    best = cells(rounds)[0, 0].arms["colocated"]
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
    assert all("colocated" in cell.arms for cell in found.values())
    assert [place for place, cell in found.items() if ADAPTIVE in cell.arms] == [(1, 0)]


def test_rounds_of_the_search_count_in_no_cell():
    assert not cells([ended("colocated", 0.5, [WITHIN_ALL] * 4, block=SEARCH)])[0, 0].arms


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


def test_an_entry_of_the_summary_names_workload_limits_and_every_arm():
    row = cells([ended("colocated", 0.5, [WITHIN_ALL] * 4)])[1, 1].as_row(SETTINGS.arms)
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


def test_the_picture_has_a_field_for_each_cell_with_what_each_arm_served():
    found = cells(
        [
            ended("colocated", 0.5, [WITHIN_ALL] * 4 + [SLOW_STEPS] * 4),
            ended(ADAPTIVE, 0.5, [WITHIN_ALL] * 8, cell=(0, 0)),
        ]
    )
    root = ElementTree.fromstring(draw("poisson", "512 in & 64 out", list(found.values()), SETTINGS.arms))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("TTFT ≤ 4 s") == 1
    assert "x 2.00" in texts
    assert sum(text == "colocated" for text in texts) == 3 + 1  # three fields, and the legend


def test_a_goodput_of_no_rounds_is_none():
    assert goodput_of([]) is None
    assert isinstance(goodput_of([Round(1.0, 0, 1)]), Goodput)
