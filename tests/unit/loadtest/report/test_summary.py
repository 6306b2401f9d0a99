"""The arithmetic: vLLM bench's names, goodput, intervals, verdicts, pools."""

import math

import msgspec
import pytest

from loadtest.errors import ServerError
from loadtest.plan import Slo
from loadtest.report.bootstrap import mean_interval, median_interval, paired_ratio_interval
from loadtest.report.pools import describe_pools, disaggregated_fraction, stage_seconds
from loadtest.report.summary import FORMULAS, attainment, summarise
from loadtest.report.tables import ROWS, formula_of
from loadtest.report.verdict import GapTail, judge
from loadtest.run.records import RequestRecord
from loadtest.run.server_metrics import add_up, difference, parse_metrics

SLO = Slo(ttft_ms=200, tpot_ms=50)


def _record(index: int, ttft_s: float, tpot_s: float, output_tokens: int = 11, error: str | None = None):
    return RequestRecord(
        index=index,
        scheduled_s=float(index),
        sent_s=float(index),
        input_tokens=100,
        output_tokens=output_tokens,
        ttft_s=ttft_s,
        second_token_s=ttft_s + tpot_s,
        latency_s=ttft_s + tpot_s * (output_tokens - 1),
        itls_s=(tpot_s,) * (output_tokens - 1),
        error=error,
    )


def test_summary_reproduces_figures_worked_by_hand():
    records = [
        _record(0, 0.1, 0.04),
        _record(1, 0.3, 0.04),
        _record(2, 0.1, 0.06),
        _record(3, 0.1, 0.0, output_tokens=1),
        _record(4, 0.1, 0.01, error="broken"),
    ]
    figures = summarise(records, 10.0, SLO)
    assert (figures["completed"], figures["failed"]) == (4, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (400, 34)
    assert figures["request_throughput"] == pytest.approx(0.4)
    assert figures["request_goodput"] == pytest.approx(0.2)
    assert figures["goodput_ratio"] == pytest.approx(2 / 5)
    assert figures["output_throughput"] == pytest.approx(3.4)
    assert figures["total_token_throughput"] == pytest.approx(43.4)
    assert figures["mean_ttft_ms"] == pytest.approx(150)
    assert figures["median_tpot_ms"] == figures["p50_tpot_ms"] == pytest.approx(40)
    assert figures["mean_tpot_ms"] == pytest.approx(140 / 3)
    assert figures["p90_itl_ms"] == pytest.approx(60)
    assert figures["mean_e2el_ms"] == pytest.approx((500 + 700 + 700 + 100) / 4)
    assert figures["p99_send_lag_ms"] == pytest.approx(0)
    low, high = figures["ci95"]["goodput_ratio"]
    assert 0 <= low < 0.4 < high <= 1


def test_no_data_is_none_and_not_zero():
    figures = summarise([_record(0, 0.1, 0.04, error="broken")], 1.0, SLO)
    assert figures["completed"] == 0
    assert figures["p50_ttft_ms"] is None
    assert figures["mean_tpot_ms"] is None
    assert figures["ci95"]["median_ttft_ms"] is None


def test_every_row_of_the_table_but_the_counts_has_a_formula():
    assert all(formula_of(key, FORMULAS) for _, key, _ in ROWS if key != "completed")
    assert formula_of("p90_tpot_ms", FORMULAS).startswith("(latency - TTFT) / (output tokens - 1)")


def test_attainment_grows_as_the_limits_are_scaled():
    records = [_record(i, 0.05 * (i + 1), 0.02) for i in range(10)]
    shares = [attainment(records, SLO, scale) for scale in (0.25, 1, 4)]
    assert shares == [pytest.approx(0.0), pytest.approx(0.4), pytest.approx(1.0)]


def test_intervals_are_seeded_and_cover_the_figure():
    values = [float(i % 7) for i in range(70)]
    assert mean_interval(values, 1) == mean_interval(values, 1)
    low, high = median_interval(values)
    assert low <= 3 <= high
    assert mean_interval([]) is None
    ends = paired_ratio_interval([1.0, 0.0], [0.0, 0.0], lambda sample: sample.mean(axis=-1))
    assert ends == (1.0, math.inf)


def test_the_verdict_names_winner_limits_factor_and_interval():
    fast = [_record(i, 0.1, 0.04) for i in range(30)]
    slow = [_record(i, 0.1, 0.04 if i % 2 else 0.08) for i in range(30)]
    verdict = judge(slow, fast, SLO, seed=0)
    assert verdict.winner == "disaggregated"
    assert verdict.ratio == pytest.approx(2)
    assert verdict.sentence.startswith(
        "Disaggregated won under TTFT <= 200 ms and TPOT <= 50 ms: it met both for 100% of requests against 50%, "
        "2.00 times the goodput (95 % interval 1."
    )
    other = judge(fast, slow, SLO, seed=0)
    assert other.winner == "colocated"
    assert "Colocated won" in other.sentence
    assert "2.00 times" in other.sentence


def test_the_verdict_names_the_tail_of_the_gaps_which_no_mean_shows():
    steady = [_record(i, 0.1, 0.04) for i in range(30)]
    stalled = [msgspec.structs.replace(one, itls_s=(0.03,) * 9 + (0.9 if one.index < 6 else 0.03,)) for one in steady]
    broken = _record(30, 0.1, 0.04, error="broken")
    slower = msgspec.structs.replace(broken, itls_s=(9.0,))
    verdict = judge([*stalled, slower], [*steady, slower], SLO, seed=0)
    assert verdict.gap_tails["colocated"] == GapTail(p99_s=pytest.approx(0.9), largest_s=0.9)
    tail = "1 % of the gaps between tokens lasted longer than 900 ms colocated and 40 ms disaggregated; "
    assert verdict.sentence.startswith(f"{verdict.headline} {tail}the longest lasted 900 ms and 40 ms. Median TTFT")
    assert summarise(stalled, 1.0, SLO)["max_itl_ms"] == pytest.approx(900)


def test_without_gaps_the_verdict_says_nothing_of_them():
    single = [_record(i, 0.1, 0.0, output_tokens=1) for i in range(3)]
    verdict = judge(single, single, SLO, seed=0)
    assert verdict.gap_tails == {}
    assert "gaps" not in verdict.sentence
    assert summarise(single, 1.0, SLO)["max_itl_ms"] is None


def test_no_clear_difference_is_said_when_the_interval_includes_one():
    one = [_record(i, 0.1, 0.04 if i % 3 else 0.08) for i in range(12)]
    other = [_record(i, 0.1, 0.04 if i % 4 else 0.08) for i in range(12)]
    verdict = judge(one, other, SLO, seed=0)
    assert verdict.winner is None
    assert verdict.sentence.startswith("No clear difference")
    assert "which includes 1" in verdict.sentence
    assert "every request" in judge(one[1:2], one[1:2], SLO, seed=0).sentence


def test_without_any_goodput_the_medians_decide_what_is_said():
    fast = [_record(i, 0.5, 0.06) for i in range(10)]
    slow = [_record(i, 0.5, 0.09) for i in range(10)]
    verdict = judge(slow, fast, SLO, seed=0)
    assert (verdict.winner, verdict.basis) == (None, "latency")
    assert "Neither mode met" in verdict.sentence
    assert "Median TPOT was lower disaggregated: 60 ms against 90 ms, a factor of 1.50" in verdict.sentence


BEFORE = """# TYPE ridgeline_requests_total counter
ridgeline_requests_total{path="disaggregated",outcome="finished"} 5
ridgeline_requests_total{path="fallback",outcome="finished"} 1
# TYPE ridgeline_flops_total counter
ridgeline_flops_total{pool="decode",worker="0"} 100
# TYPE vllm:other_total counter
vllm:other_total 9
"""
AFTER = """# TYPE ridgeline_requests_total counter
ridgeline_requests_total{path="disaggregated",outcome="finished"} 104
ridgeline_requests_total{path="fallback",outcome="finished"} 2
ridgeline_requests_total{path="fallback",outcome="failed"} 50
# TYPE ridgeline_flops_total counter
ridgeline_flops_total{pool="decode",worker="0"} 700
ridgeline_flops_total{pool="decode",worker="1"} 600
# TYPE ridgeline_bytes_total counter
ridgeline_bytes_total{pool="decode",worker="0",kind="weights"} 300
ridgeline_bytes_total{pool="decode",worker="1",kind="kv_read"} 100
# TYPE ridgeline_busy_seconds_total counter
ridgeline_busy_seconds_total{pool="decode",worker="0"} 3
ridgeline_busy_seconds_total{pool="decode",worker="1"} 1
# TYPE ridgeline_peak_flops gauge
ridgeline_peak_flops{pool="decode"} 1000
# TYPE ridgeline_peak_bytes_per_second gauge
ridgeline_peak_bytes_per_second{pool="decode"} 200
# TYPE ridgeline_workers gauge
ridgeline_workers{pool="decode"} 2
# TYPE ridgeline_stage_seconds histogram
ridgeline_stage_seconds_bucket{stage="wire",le="+Inf"} 4
ridgeline_stage_seconds_sum{stage="wire"} 2
ridgeline_stage_seconds_count{stage="wire"} 4
"""


def test_pools_are_figured_from_differences_of_the_servers_counters():
    delta = difference(parse_metrics(BEFORE), parse_metrics(AFTER), wall_s=10)
    assert disaggregated_fraction(delta) == pytest.approx(0.99)
    assert stage_seconds(delta) == {"wire": 0.5}
    decode = describe_pools(delta)["decode"]
    assert decode["arithmetic_intensity"] == pytest.approx(1200 / 400)
    assert decode["ridge"] == pytest.approx(5)
    assert decode["mfu"] == pytest.approx(1200 / 4 / 1000)
    assert decode["mfu_wall"] == pytest.approx(1200 / 20 / 1000)
    assert decode["mbu"] == pytest.approx(400 / 4 / 200)
    assert decode["busy_fraction"] == pytest.approx(4 / 20)
    twice = describe_pools(add_up([delta, delta]))["decode"]
    assert twice["flops"] == 2400
    assert twice["mfu_wall"] == pytest.approx(decode["mfu_wall"])


def test_a_counter_that_fell_means_a_restart():
    with pytest.raises(ServerError, match="restarted"):
        difference(parse_metrics(AFTER), parse_metrics(BEFORE), wall_s=1)
