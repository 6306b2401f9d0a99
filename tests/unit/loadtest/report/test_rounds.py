"""summary.json, the terminal and the page of a comparison, made from simulated records."""

from datetime import UTC, datetime
from io import StringIO

import pytest
from rich.console import Console

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.report.page import write_report
from ridgeline.loadtest.report.rounds import Round, labels_of, summarise_comparison
from ridgeline.loadtest.report.tables import print_comparison
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.statistics.outcome import conclude
from ridgeline.loadtest.statistics.pairs import pair_difference
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from ridgeline.loadtest.variants import Devices

PLAN = ComparePlan(pairs=6, slo_ttft_ms=400, slo_tpot_ms=60, price_per_hour=0.05)
TRACE = Trace("simulated", tuple(TraceRow(float(i), 100, 11) for i in range(20)))


def replayed(ttft_s: float, tpot_s: float) -> ReplayResult:
    records = tuple(
        RequestRecord(
            index=i,
            scheduled_s=float(i),
            sent_s=float(i),
            input_tokens=100,
            output_tokens=11,
            ttft_s=ttft_s * (1 + i / 100),
            second_token_s=ttft_s * (1 + i / 100) + tpot_s,
            latency_s=ttft_s * (1 + i / 100) + 10 * tpot_s,
            itls_s=(tpot_s,) * 10,
        )
        for i in range(20)
    )
    return ReplayResult(TRACE, records, 20.0, None, ())


def comparison_summary(plan: ComparePlan = PLAN, ties: int = 0, name: str = "disaggregated"):
    """Of six pairs b meets the SLOs in all; a in `ties` of them."""
    rounds, differences = [], []
    for pair in range(6):
        a, b = replayed(0.1, 0.04 if pair < ties else 0.1), replayed(0.3, 0.04)
        rounds += [
            Round(side, pair, datetime.now(UTC), result, None, (), True) for side, result in (("a", a), ("b", b))
        ]
        differences.append(pair_difference(a.records, b.records, plan.slos))
    conclusion = conclude(differences, (6,), 6, plan.margin)
    devices = {"a": None, "b": Devices("core", 2, {"prefill": 1, "decode": 1})}
    load = Load(1.0, "as given", "as given")
    return summarise_comparison(conclusion, differences, rounds, labels_of("colocated", name), plan, load, devices)


def _terminal(summary) -> str:
    text = StringIO()
    print_comparison(summary, Console(file=text, width=1000))
    return text.getvalue()


def test_an_interval_without_0_that_the_exact_test_does_not_support_is_inconclusive_and_the_sentence_says_so():
    outcome = comparison_summary(ties=1)[0]["outcome"]
    assert outcome["outcome"] == "inconclusive"
    assert outcome["attainment"]["low"] > 0
    assert "The interval leaves out 0, but the exact test over pairs gives p = 0.0625" in outcome["sentence"]
    assert "the exact test" not in comparison_summary()[0]["outcome"]["sentence"]


def test_the_map_of_winners_is_in_the_summary_on_the_terminal_and_on_the_page(tmp_path):
    summary, records = comparison_summary()
    cells = {(cell["ttft_ms"], cell["tpot_ms"]): cell for cell in summary["winner_map"]["cells"]}
    assert cells[400.0, 60.0]["winner"] == summary["outcome"]["better"] == "b"
    assert cells[400.0, 60.0]["differences"][0]["low"] == pytest.approx(summary["outcome"]["attainment"]["low"])
    sentence = summary["winner_map"]["sentence"]
    assert sentence in _terminal(summary)
    page = write_report(tmp_path / "report.html", summary, records).read_text()
    assert sentence in page
    assert page.count("border-left:6px") == len(cells)


def test_a_limit_on_the_largest_gap_is_in_the_outcome_and_in_every_cell_of_the_map(tmp_path):
    plan = PLAN.model_copy(update={"slo_gap_ms": 30.0})  # shorter than any gap of either variant
    summary, records = comparison_summary(plan)
    assert summary["slo"]["gap_ms"] == summary["winner_map"]["grid"]["gap_ms"] == 30
    assert {cell["winner"] for cell in summary["winner_map"]["cells"]} == {"unreachable"}
    assert summary["variants"]["b"]["attainment"] == summary["variants"]["b"]["request_goodput"] == 0
    assert summary["variants"]["b"]["p50_gap_ms"] == pytest.approx(40)
    assert "largest gap <= 30 ms" in summary["outcome"]["headline"]
    assert "met all three SLOs" in summary["outcome"]["headline"]
    assert "each with gaps of at most 30 ms" in _terminal(summary)
    assert "SLO 30 ms" in write_report(tmp_path / "report.html", summary, records).read_text()


def test_figures_per_device_are_shown_for_the_variants_whose_devices_are_known(tmp_path):
    summary, records = comparison_summary()
    found = summary["variants"]["b"]["per_device"]
    assert found["output_tokens_per_device"] == pytest.approx(11 / 2)
    assert found["cost_per_million_output_tokens"] == pytest.approx(0.05 * 2 / (11 * 3600) * 1e6)
    assert "per_device" not in summary["variants"]["a"]
    page = write_report(tmp_path / "report.html", summary, records).read_text()
    for shown in (_terminal(summary), page):
        assert "disaggregated, 2 cores" in shown
        assert "cost of a million output tokens" in shown


def test_a_name_is_text_on_the_terminal_and_on_the_page(tmp_path):
    name = "</script><b>[/tp=2]"
    summary, records = comparison_summary(name=name)
    assert _terminal(summary).count(name) > 2
    page = write_report(tmp_path / "report.html", summary, records).read_text()
    assert name not in page
    assert "&lt;/script&gt;&lt;b&gt;[/tp=2]" in page


@pytest.mark.parametrize(
    ("changes", "is_exact"), [({}, True), ({"endpoint": "chat"}, False), ({"text_prompts": True}, False)]
)
def test_the_page_calls_no_prompts_exact_that_were_sent_as_text(tmp_path, changes, is_exact):
    summary, records = comparison_summary(PLAN.model_copy(update=changes))
    page = write_report(tmp_path / "report.html", summary, records).read_text()
    assert ("exact to the token" in page) == is_exact
    assert ("some or all sent as text" in page) != is_exact
