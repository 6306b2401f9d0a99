"""summary.json, the terminal and the page of a comparison, made from simulated records."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.report.comparison import summarise_comparison
from ridgeline.loadtest.report.page import print_comparison, write_report
from ridgeline.loadtest.report.rounds import Round, Side, labels_of
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.machine import Disturbance
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_facts import ServerFacts
from ridgeline.loadtest.run.server_metrics import Level, MetricsDelta
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from ridgeline.loadtest.variants import Devices, SwitchedVariant
from tests.support.load_records import a_record

PLAN = ComparePlan(
    variants="colocated,disaggregated", rate="0.5,1,2,4,8", slo_ttft_ms=400, slo_tpot_ms=60, price_per_hour=0.05
)
TRACE = Trace("simulated", tuple(TraceRow(float(i), 100, 11) for i in range(20)))
CORES = Devices("core", 2, {"prefill": 1, "decode": 1})
QUEUES: Mapping[Side, float] = {"a": 1.5, "b": 3.0}
"""The rate, in requests/s, from which prompts wait longer than their SLO."""
TPOTS_S: Mapping[Side, float] = {"a": 0.04, "b": 0.05}
PAIRS_AT_A_RATE = 2


def replayed(ttft_s: float, tpot_s: float, number: int = 20) -> ReplayResult:
    records = tuple(a_record(i, ttft_s * (1 + i / 100), tpot_s, output_tokens=11) for i in range(number))
    return ReplayResult(TRACE, records, 20.0, {}, ())


def a_round(side: Side, pair: int, result: ReplayResult | None, *reasons: str, is_kept: bool = True) -> Round:
    return Round(side, pair, datetime.now(UTC), result, Disturbance(0.0, 0.0), reasons, is_kept, number=2 * pair)


def comparison_summary(
    plan: ComparePlan = PLAN, name: str = "disaggregated", rounds: tuple[Round, ...] = (), **devices: Devices
) -> dict[str, Any]:
    """Two pairs at each of five rates, `rounds` besides: a holds the first two rates, b the first three."""
    rates = PLAN.rates * PAIRS_AT_A_RATE
    kept = [
        a_round(side, pair, replayed(0.1 if rate < QUEUES[side] else 0.9, TPOTS_S[side]))
        for pair, rate in enumerate(rates)
        for side in QUEUES
    ]
    variants = {side: SwitchedVariant("http://unused", "colocated", devices=devices.get(side)) for side in QUEUES}
    load, labels = Load(1.0, "as given", "as given"), labels_of("colocated", name)
    summary = summarise_comparison(rates, [*rounds, *kept], labels, plan, load, variants, 60.0)
    return summary | {"setup": {}, "interruptions": [], "unequal": []}


def shown(summary: dict[str, Any]) -> str:
    text = StringIO()
    print_comparison(summary, Console(file=text, width=1000))
    return text.getvalue()


def test_each_variant_has_its_highest_rate_its_points_and_a_curve_over_all_rates():
    summary = comparison_summary()
    a, b = (summary["variants"][side] for side in "ab")
    for held, queue in ((a["max_goodput_rate"], QUEUES["a"]), (b["max_goodput_rate"], QUEUES["b"])):
        assert held["low"] < queue < held["high"]
        assert held["rate"] == pytest.approx(queue, rel=0.25)
    assert b["output_tokens_per_s"] == pytest.approx(11 * b["max_goodput_rate"]["rate"])
    assert summary["verdict"]["serves_more"] == (("disaggregated", "colocated"),)
    assert summary["verdict"]["pairs"] == 10
    (ratio,) = summary["verdict"]["ratios"]
    assert 1 < ratio["low"] < ratio["ratio"] < ratio["high"]
    points = [(point["rate"], point["rounds"], point["attainment"]) for point in b["points"]]
    assert points == [(0.5, 2, 1), (1, 2, 1), (2, 2, 1), (4, 2, 0), (8, 2, 0)]
    assert b["points"][0]["median_tpot_ms"] == pytest.approx(50)
    assert (a["curve"][0]["rate"], a["curve"][-1]["rate"]) == (0.5, pytest.approx(8))


def test_every_sentence_and_the_whole_map_are_on_the_page_and_the_verdict_on_the_terminal(tmp_path):
    summary = comparison_summary()
    page, terminal = write_report(tmp_path / "report.html", summary).read_text(), shown(summary)
    for sentence in summary["verdict"]["sentences"]:
        assert sentence in page
        assert sentence in terminal
    cells = {(cell["ttft_ms"], cell["tpot_ms"]): cell for cell in summary["map"]["cells"]}
    own = cells[400.0, 60.0]
    assert own["winner"] == "b"
    assert own["max_goodput_rates"] == {side: summary["variants"][side]["max_goodput_rate"] for side in "ab"}
    assert summary["map"]["sentence"] in page
    assert page.count("border-left:6px") == len(cells)
    assert "<h1>Disaggregated serves more requests within the SLOs than colocated (strong evidence).</h1>" in page


def test_an_slo_on_the_largest_gap_holds_in_the_counts_and_in_every_cell_of_the_map(tmp_path):
    plan = PLAN.model_copy(update={"slo_gap_ms": 30.0})  # shorter than any gap of either variant
    summary = comparison_summary(plan)
    assert summary["slo"]["gap_ms"] == summary["map"]["grid"]["gap_ms"] == 30
    assert {cell["winner"] for cell in summary["map"]["cells"]} == {"unreachable"}
    assert {each["met"] for each in summary["rounds"]} == {0}
    for text in (shown(summary), write_report(tmp_path / "report.html", summary).read_text()):
        assert "largest gap" in text


@pytest.mark.parametrize(("places", "resource"), [("8", "places"), ("8 and 16", "time"), ("unknown", "time")])
def test_the_places_that_a_server_tells_apart_from_its_counters_say_what_is_short(places: str, resource: str):
    waiting = "vllm:num_requests_waiting_by_reason", frozenset({("reason", "capacity")})
    levels = {("vllm:num_requests_running", frozenset[tuple[str, str]]()): Level(8, 8, 1), waiting: Level(4, 4, 1)}
    rounds = [
        a_round(side, 0, replace(replayed(0.1, 0.04), deltas={"http://engine": MetricsDelta({}, {}, 20.0, levels)}))
        for side in QUEUES
    ]
    facts = ServerFacts(max_num_seqs=places)
    variants = {side: SwitchedVariant("http://unused", "colocated", facts=facts) for side in QUEUES}
    load = Load(1.0, "as given", "as given")
    summary = summarise_comparison([1.0], rounds, labels_of("one", "other"), PLAN, load, variants, 60.0)
    assert [summary["variants"][side]["bottleneck"]["resource"] for side in QUEUES] == [resource] * 2


def judged(rounds: list[Round], rate: float = 1.0) -> dict[str, Any]:
    """The verdict on rounds at one rate."""
    pairs = 1 + max(each.pair for each in rounds)
    variants = {side: SwitchedVariant("http://unused", "colocated") for side in QUEUES}
    labels = labels_of("colocated", "disaggregated")
    load = Load(rate, "as given", "as given")
    found: dict[str, Any] = summarise_comparison([rate] * pairs, rounds, labels, PLAN, load, variants, 60.0)["verdict"]
    return found


@pytest.mark.parametrize("undisturbed", [2, 4])
def test_a_verdict_rests_on_undisturbed_pairs_alone_whatever_the_others_say(undisturbed: int):
    slow = {"a": 0.1, "b": 0.9}
    clean = [a_round(side, pair, replayed(0.1, 0.04)) for pair in range(undisturbed) for side in QUEUES]
    disturbed = [
        a_round(side, pair, replayed(slow[side], 0.04), "other work took 40% of this machine's CPU time")
        for pair in range(undisturbed, undisturbed + 6)
        for side in QUEUES
    ]
    found = judged([*clean, *disturbed])
    assert (found["serves_more"], found["pairs"]) == ((), undisturbed)
    assert all(f"{mode} 100%" in " ".join(found["sentences"]) for mode in ("colocated", "disaggregated"))
    assert f"{undisturbed} of {undisturbed + 6} pairs" in " ".join(found["sentences"])


def test_an_slo_that_alone_picks_another_variant_is_named():
    told = comparison_summary(PLAN.model_copy(update={"slo_tpot_ms": 45.0}))["verdict"]["sentences"]
    picks = "By TTFT alone disaggregated serves more; by TPOT alone colocated serves more (strong evidence)."
    assert picks in told


def test_figures_per_device_and_cost_are_shown_if_the_devices_are_known(tmp_path):
    summary = comparison_summary(a=CORES, b=Devices("core", 4, {}))
    found, rate = summary["variants"]["b"]["per_device"], summary["variants"]["b"]["max_goodput_rate"]["rate"]
    assert found["rate_per_device"] == pytest.approx(rate / 4)
    assert found["cost_per_million_output_tokens"] == pytest.approx(0.05 * 4 / (rate * 11 * 3600) * 1e6)
    own = next(one for one in summary["map"]["cells"] if (one["ttft_ms"], one["tpot_ms"]) == (400.0, 60.0))
    assert own["max_goodput_rates"]["b"]["rate"] == rate, "the map has the unit of the verdict"
    for text in (shown(summary), write_report(tmp_path / "report.html", summary).read_text()):
        assert "requests/s per core" in text
        assert "cost of 1M output tokens" in text


def test_what_is_not_known_of_devices_is_none_and_not_zero():
    summary = comparison_summary(PLAN.model_copy(update={"price_per_hour": None}), b=CORES)
    assert summary["variants"]["a"]["per_device"] is None
    assert summary["variants"]["b"]["per_device"]["cost_per_million_output_tokens"] is None
    assert "cost" not in shown(summary)


def test_rounds_that_were_discarded_or_disturbed_are_marked_and_only_kept_ones_count(tmp_path):
    lost, late = (
        a_round("a", 0, None, "0 was restarted", is_kept=False),
        a_round("b", 0, replayed(0.9, 0.05), "other work took 40% of the time", is_kept=False),
    )
    summary = comparison_summary(rounds=(lost, late))
    assert len(summary["rounds"]) == 22
    assert summary["variants"]["b"] == comparison_summary()["variants"]["b"]
    kept = comparison_summary(rounds=(a_round("b", 0, replayed(0.1, 0.05), "other work"),))
    assert kept["verdict"]["pairs"] == 9
    assert kept["variants"]["b"]["points"][0]["rounds"] == 3
    page = write_report(tmp_path / "report.html", summary).read_text()
    assert "discarded: 0 was restarted" in page
    assert "Rounds that were discarded and repeated: 2." in page
    page = write_report(tmp_path / "report.html", kept).read_text()
    assert "since their repeats were disturbed too: 1" in page


def test_a_name_is_text_on_the_terminal_and_on_the_page(tmp_path):
    name = "</script><b>[/tp=2]"
    summary = comparison_summary(name=name)
    assert shown(summary).count(name) > 2
    page = write_report(tmp_path / "report.html", summary).read_text()
    assert name not in page
    assert "&lt;/script&gt;&lt;b&gt;[/tp=2]" in page


@pytest.mark.parametrize(
    ("changes", "is_exact"), [({}, True), ({"endpoint": "chat"}, False), ({"text_prompts": True}, False)]
)
def test_the_page_calls_no_prompts_exact_that_were_sent_as_text(tmp_path, changes, is_exact):
    page = write_report(tmp_path / "report.html", comparison_summary(PLAN.model_copy(update=changes))).read_text()
    assert ("exact to the token" in page) == is_exact
    assert ("sent as text" in page) != is_exact
