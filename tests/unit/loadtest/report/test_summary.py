"""The arithmetic: vLLM bench's names, goodput, intervals, pools."""

import msgspec
import pytest

from ridgeline.loadtest.errors import RestartedError
from ridgeline.loadtest.plan import Slo
from ridgeline.loadtest.report.pools import bound, describe_pools, disaggregated_fraction, latency_parts, stage_seconds
from ridgeline.loadtest.report.summary import FORMULAS, least_count, summarise
from ridgeline.loadtest.report.tables import ROWS, formula_of
from ridgeline.loadtest.run.server_metrics import MetricsDelta, add_up, difference, parse_metrics
from tests.support.load_records import a_record

SLO = Slo(ttft_ms=200, tpot_ms=50)


def test_summary_reproduces_figures_worked_by_hand():
    records = [
        a_record(0, 0.1, 0.04),
        a_record(1, 0.3, 0.04),
        a_record(2, 0.1, 0.06),
        a_record(3, 0.1, 0.0, output_tokens=1),
        a_record(4, 0.1, 0.01, error="broken"),
    ]
    figures = summarise(records, 10.0, SLO)
    assert (figures["completed"], figures["failed"]) == (4, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (400, 34)
    assert figures["request_throughput"] == pytest.approx(0.4)
    assert figures["request_goodput"] == pytest.approx(0.2)
    assert figures["attainment"] == pytest.approx(2 / 5)
    assert figures["output_throughput"] == pytest.approx(3.4)
    assert figures["total_token_throughput"] == pytest.approx(43.4)
    assert figures["mean_ttft_ms"] == pytest.approx(150)
    assert figures["median_tpot_ms"] == figures["p50_tpot_ms"] == pytest.approx(40)
    assert figures["mean_tpot_ms"] == pytest.approx(140 / 3)
    assert figures["p90_itl_ms"] is None, "30 gaps are too few for a 90th percentile"
    assert figures["mean_e2el_ms"] == pytest.approx((500 + 700 + 700 + 100) / 4)
    assert figures["p99_send_lag_ms"] == pytest.approx(0)
    low, high = msgspec.json.decode(msgspec.json.encode(figures))["ci95"]["attainment"]
    assert 0 <= low < 0.4 < high <= 1


def test_a_late_client_is_part_of_ttft_and_latency_in_figures_as_in_attainment():
    late = a_record(0, 0.15, 0.04, sent_s=0.1)
    figures = summarise([late], 10.0, SLO)
    assert (figures["p50_ttft_ms"], figures["attainment"]) == (pytest.approx(250), 0)
    assert figures["p50_e2el_ms"] == pytest.approx(100 + 150 + 400)
    assert (figures["p50_tpot_ms"], figures["max_send_lag_ms"]) == (pytest.approx(40), pytest.approx(100))
    assert figures["p50_tpot_ms"] == pytest.approx((figures["p50_e2el_ms"] - figures["p50_ttft_ms"]) / 10)


def test_no_data_is_none_and_not_zero():
    figures = summarise([a_record(0, 0.1, 0.04, error="broken")], 1.0, SLO)
    assert figures["completed"] == 0
    assert figures["p50_ttft_ms"] is None
    assert figures["mean_tpot_ms"] is None
    assert msgspec.json.decode(msgspec.json.encode(figures))["ci95"]["attainment"][0] == 0


def test_every_row_of_the_table_but_the_counts_has_a_formula():
    assert all(formula_of(key, FORMULAS) for _, key, _ in ROWS if key != "completed")
    assert formula_of("p90_tpot_ms", FORMULAS).startswith("(e2el - TTFT) / (output tokens - 1)")


def test_a_tail_of_too_few_values_is_a_dash():
    assert [least_count(rank) for rank in (50, 90, 95, 99)] == [1, 36, 72, 368]
    few = summarise([a_record(i, 0.1, 0.04) for i in range(35)], 10.0, SLO)
    assert few["p90_ttft_ms"] is None
    assert few["p50_ttft_ms"] == pytest.approx(100)
    assert few["p90_itl_ms"] == pytest.approx(40), "there are ten gaps a request"
    assert summarise([a_record(i, 0.1, 0.04) for i in range(36)], 10.0, SLO)["p90_ttft_ms"] == pytest.approx(100)


def test_the_largest_gap_needs_no_number_of_gaps():
    steady = a_record(0, 0.1, 0.04)
    stalled = msgspec.structs.replace(steady, itls_s=(0.03,) * 9 + (0.9,))
    assert summarise([stalled], 1.0, SLO)["max_itl_ms"] == pytest.approx(900)
    assert summarise([a_record(0, 0.1, 0.0, output_tokens=1)], 1.0, SLO)["max_itl_ms"] is None
    broken = msgspec.structs.replace(a_record(1, 0.1, 0.04, error="broken"), itls_s=(9.0,))
    assert summarise([stalled, broken], 1.0, SLO)["max_itl_ms"] == pytest.approx(900)


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
# TYPE ridgeline_hardware_info gauge
ridgeline_hardware_info{pool="decode",hardware="h100-sxm",source="data sheet"} 1
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
    assert (decode["hardware"], decode["peaks_source"]) == ("h100-sxm", "data sheet")
    twice = describe_pools(add_up([delta, delta]))["decode"]
    assert twice["flops"] == 2400
    assert twice["mfu_wall"] == pytest.approx(decode["mfu_wall"])


def counted(text: str) -> MetricsDelta:
    return difference(parse_metrics(""), parse_metrics(text), wall_s=10)


STEPS = """# TYPE ridgeline_flops_total counter
ridgeline_flops_total{pool="colocated",worker="0",step="prefill"} 8000
ridgeline_flops_total{pool="colocated",worker="0",step="decode"} 100
# TYPE ridgeline_bytes_total counter
ridgeline_bytes_total{pool="colocated",worker="0",step="prefill",kind="weights"} 100
ridgeline_bytes_total{pool="colocated",worker="0",step="decode",kind="weights"} 200
# TYPE ridgeline_busy_seconds_total counter
ridgeline_busy_seconds_total{pool="colocated",worker="0",step="prefill"} 10
ridgeline_busy_seconds_total{pool="colocated",worker="0",step="decode"} 5
ridgeline_busy_seconds_total{pool="decode",worker="0",step="decode"} 0
# TYPE ridgeline_peak_flops gauge
ridgeline_peak_flops{pool="colocated"} 1000
# TYPE ridgeline_peak_bytes_per_second gauge
ridgeline_peak_bytes_per_second{pool="colocated"} 200
"""


def test_steps_left_of_the_ridge_but_far_from_the_roof_are_bound_by_neither():
    pools = describe_pools(counted(STEPS))
    assert list(pools) == ["colocated"]
    kinds = pools["colocated"]["step_kinds"]
    assert (kinds["prefill"]["bound"], kinds["decode"]["bound"]) == ("compute", "neither")
    assert pools["colocated"]["bound"] == "compute"
    assert pools["colocated"]["roof_seconds"] == pytest.approx(8.0 + 1.0)
    assert (bound(0.1, 0.5), bound(None, 0.5)) == ("memory", None)


def test_parts_of_the_latency_add_up_to_it():
    delta = counted("""# TYPE ridgeline_requests_total counter
ridgeline_requests_total{path="disaggregated",outcome="finished"} 4
# TYPE ridgeline_stage_seconds histogram
ridgeline_stage_seconds_sum{stage="prefill"} 4
ridgeline_stage_seconds_count{stage="prefill"} 4
ridgeline_stage_seconds_sum{stage="wire"} 2
ridgeline_stage_seconds_count{stage="wire"} 2
""")
    assert latency_parts(delta, 1.5, 2.25) == {
        "first token": {"prefill": 1.0, "elsewhere": 0.5},
        "after it": {"wire": 0.5, "elsewhere": 0.25},
    }
    assert latency_parts(delta, None, None) == {}


def test_a_counter_that_fell_means_a_restart():
    with pytest.raises(RestartedError, match="restarted"):
        difference(parse_metrics(AFTER), parse_metrics(BEFORE), wall_s=1)


def test_a_sum_that_fell_means_an_observation_below_zero():
    before, after = (
        parse_metrics(f"# TYPE vllm:e2e histogram\nvllm:e2e_sum {total}\nvllm:e2e_count {number}\n", foreign=True)
        for total, number in ((0.5, 3), (0.4, 4))
    )
    assert difference(before, after, wall_s=1).total("vllm:e2e_count") == 1
