"""Rate, SLOs and number of requests from what an unloaded server takes: arithmetic, with figures made up."""

import math

import msgspec
import pytest

from ridgeline.loadtest.plan import ComparePlan, ReplayPlan, Slo
from ridgeline.loadtest.run.calibration import (
    LEAST_REQUESTS,
    Schedule,
    Workers,
    beside_arrivals_s,
    fit_budget,
    given_load,
    least_requests,
    most_rate,
    settle,
    workers_of,
)
from ridgeline.loadtest.run.quantities import minutes_text
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.statistics.verdict import LEAST_PAIRS
from ridgeline.loadtest.trace.trace import Trace, TraceRow

CPU = Unloaded(
    input_tokens=(128, 260, 510, 577, 1024),
    output_tokens=32,
    median_ttft_s=1.0,
    mean_ttft_s=1.25,
    median_tpot_s=0.04,
    batch_sequences=8,
    prefill_token_s=0.0025,
    median_batch_gap_s=0.054,
    workers={"colocated": 2},
)
GPU = msgspec.structs.replace(
    CPU,
    median_ttft_s=0.0071,
    mean_ttft_s=0.0083,
    prefill_token_s=1.6e-5,
    median_tpot_s=0.0031,
    median_batch_gap_s=0.0034,
)
SLOW = msgspec.structs.replace(
    CPU, median_ttft_s=21.0, mean_ttft_s=26.0, prefill_token_s=0.052, median_tpot_s=0.9, median_batch_gap_s=1.1
)
PAIR = Workers(prefill=1, decode=1)
TRACE = Trace("t", tuple(TraceRow(2.0 * i, 500, 80) for i in range(200)))


def test_rate_is_four_fifths_of_what_the_prefill_workers_hold_and_limits_are_multiples_of_the_unloaded_medians():
    plan, load = settle(ReplayPlan(rate="auto", slo="auto"), TRACE, CPU, PAIR)
    assert plan.rate == load.rate == pytest.approx(0.8 / 1.25, rel=0.01)
    assert plan.slos == Slo(ttft_ms=5000, tpot_ms=100)
    assert not plan.measures_first
    twice, _ = settle(ReplayPlan(rate="auto"), TRACE, CPU, Workers(prefill=2, decode=1))
    assert twice.rate == pytest.approx(2 * 0.8 / 1.25, rel=0.05)


def test_the_settled_plan_is_a_plan_that_offers_the_same_load_without_measuring():
    plan, _ = settle(ReplayPlan(rate="auto", slo="auto"), TRACE, CPU, PAIR)
    assert ReplayPlan(**plan.model_dump(exclude_unset=True)) == plan


def test_only_what_is_auto_is_measured():
    plan, load = settle(ReplayPlan(slo="auto", rate=3), TRACE, CPU, PAIR)
    assert (plan.rate, load.rate, load.rate_source) == (3, 3, "as given")
    plan, load = settle(ReplayPlan(rate="auto", slo_ttft_ms=700), TRACE, CPU, PAIR)
    assert plan.slos == Slo(ttft_ms=700, tpot_ms=100)
    assert load.slo_source == "as given"
    plan, load = settle(ComparePlan(budget_s=60), TRACE, CPU, PAIR)
    assert (plan.rate, load.rate, load.slo_source) == (None, TRACE.mean_rate, "the defaults")


@pytest.mark.parametrize(
    ("asked", "named"), [({}, 0), ({"slo_ttft_ms": 700}, 1), ({"slo": "auto"}, 2)], ids=["defaults", "given", "auto"]
)
def test_a_measured_rate_makes_no_slo_one_that_was_named(asked, named):
    plan, _ = settle(ReplayPlan(rate="auto", **asked), TRACE, CPU, PAIR)
    assert len(plan.named_slos) == named


def test_both_are_printed_with_their_source():
    plan, load = settle(ReplayPlan(rate="auto", slo="auto"), TRACE, CPU, PAIR)
    assert load.sentences(plan.slos) == [
        "measured without load: TTFT 1.00 s, TPOT 40 ms (medians of 5 requests of 128 to 1024 tokens, one at a "
        "time; mean TTFT 1.25 s); with 8 at once on each worker 400 prompt tokens/s and 54 ms a token",
        "rate: 0.64 requests/s: 80% of the calculated rate at which 90% of the requests should meet the SLOs",
        "SLOs: TTFT <= 5000 ms and TPOT <= 100 ms: 5 times the unloaded median TTFT and 2.5 times the median TPOT",
    ]
    plan, load = settle(ReplayPlan(slo="auto", slo_gap_ms=900), TRACE, CPU, PAIR)
    assert plan.slos == Slo(ttft_ms=5000, tpot_ms=100, gap_ms=900)
    assert load.slo_source.endswith("2.5 times the median TPOT, the largest gap as given")
    slower = ReplayPlan(time_scale=2)
    assert given_load(slower, TRACE).sentences(slower.slos) == [
        "rate: 0.5 requests/s: the trace's own, gaps multiplied by 2",
        "SLOs: TTFT <= 2000 ms and TPOT <= 100 ms: the defaults",
    ]
    assert given_load(ReplayPlan(), Trace("t", TRACE.rows[:1])).sentences(Slo())[0].startswith("rate: all requests at")


ALL_EQUAL = msgspec.structs.replace(
    CPU, input_tokens=(500,), prefill_token_s=0.002, median_tpot_s=0.1, median_batch_gap_s=0.1, batch_sequences=8
)


def _even(gap_s: float, output_tokens: int, requests: int = 100, at_once: int = 1) -> Trace:
    return Trace("t", tuple(TraceRow(gap_s * (i // at_once), 500, output_tokens) for i in range(requests)))


@pytest.mark.parametrize(
    ("trace", "workers", "limits", "held"),
    [
        pytest.param(_even(2, 11), PAIR, Slo(ttft_ms=1100, tpot_ms=150), 1.0, id="prompts of 1 s follow one another"),
        pytest.param(_even(2, 11), Workers(3, 1), Slo(ttft_ms=1100, tpot_ms=150), 3.0, id="three prefill workers"),
        pytest.param(_even(2, 11), Workers(0.5, 1), Slo(ttft_ms=2100, tpot_ms=150), 0.5, id="half a prefill worker"),
        pytest.param(_even(2, 11, at_once=2), PAIR, Slo(ttft_ms=2100, tpot_ms=150), 1.0, id="the second of two waits"),
        pytest.param(_even(2, 11, at_once=3), PAIR, Slo(ttft_ms=2100, tpot_ms=150), None, id="a third waits too long"),
        # An answer takes 1 s, so prompts 2 s apart interrupt none; one that came sooner would make 0.19 s of 0.1.
        pytest.param(_even(3, 11), Workers(replicas=1), Slo(ttft_ms=1100, tpot_ms=150), 0.5, id="a replica"),
        pytest.param(_even(3, 11), Workers(replicas=2), Slo(ttft_ms=1100, tpot_ms=150), 1.0, id="two replicas"),
        pytest.param(_even(3, 11), Workers(replicas=2), Slo(ttft_ms=1100, tpot_ms=90), None, id="no rate holds these"),
    ],
)
def test_the_rate_that_is_held_by_workers_whose_every_step_is_known(trace, workers, limits, held):
    most, meaning = most_rate(trace, ALL_EQUAL, workers, limits)
    assert ("no rate is expected to meet the SLOs" in meaning) == (held is None)
    if held is not None:
        assert held * 0.94 < most <= held * 1.001, "the search goes in steps of 5 %"


def test_decode_bounds_the_rate_where_answers_are_long():
    # 2 ms more for each sequence: 31 sequences in a step of 100 ms
    most, _ = most_rate(_even(2, 4000, 400), CPU, Workers(prefill=9, decode=1), Slo(ttft_ms=9000, tpot_ms=100))
    assert most == pytest.approx(31 / 0.1 / 4000, rel=0.1)


@pytest.mark.parametrize(
    ("pools", "workers"),
    [
        ({"prefill": 3, "decode": 2}, Workers(prefill=3, decode=2)),
        ({"colocated": 4}, Workers(replicas=4)),
        ({}, Workers(replicas=1)),
    ],
)
def test_a_running_server_says_how_many_workers_share_the_load(pools, workers):
    assert workers_of(pools) == workers


@pytest.mark.parametrize("unloaded", [CPU, GPU, SLOW], ids=["cpu", "gpu", "slow"])
@pytest.mark.parametrize("budget_s", [1.0, 60.0, 300.0, 3600.0])
def test_a_round_has_requests_enough_and_no_more_than_its_window_on_any_machine(unloaded, budget_s):
    plan, load = settle(ComparePlan(rate="auto", slo="auto", budget_s=budget_s), TRACE, unloaded, PAIR)
    plan, load = fit_budget(plan, load, 60, Schedule(1.5, 30.0, 8.0), 50.0, 1)
    assert LEAST_REQUESTS <= plan.limit <= 60
    assert 0 < plan.rate < float("inf")
    assert 0 < plan.slo_ttft_ms < float("inf")
    assert f"({plan.limit} requests at the first rate)" in load.notes[0]


COURSE = Schedule(starts=1.5, start_s=10.0, beside_arrivals_s=10.0)


@pytest.mark.parametrize(
    ("budget_s", "fields", "least", "requests", "pairs"),
    [
        # (600 - 60) / 6 = 90 s a pair, 15 of them for starts, 20 beside arrivals
        (600.0, {"rate": 1.0}, 1, 28, 6),
        (600.0, {}, 1, 28, 6),
        # longer rounds come first, then more pairs
        (1500.0, {"rate": 1.0}, 1, 60, 8),
        (1500.0, {}, 1, 60, 9),
        # a queue has time to grow, however few pairs fit
        (600.0, {"rate": 1.0}, 40, 40, 4),
        (300.0, {"rate": 1.0}, 1, LEAST_REQUESTS, 4),
        (100.0, {"rate": 1.0}, 1, LEAST_REQUESTS, 1),
        (600.0, {"rate": 1.0, "pairs": 3}, 1, 60, 3),
        # two pairs at each rate
        (600.0, {"rate": "1,2,3,4"}, 1, 17, 8),
    ],
)
def test_a_budget_gives_six_pairs_or_two_at_each_rate_and_then_longer_rounds(budget_s, fields, least, requests, pairs):
    asked = ComparePlan(budget_s=budget_s, **fields)
    load = given_load(ComparePlan(rate=1.0), TRACE)
    plan, load = fit_budget(asked, load, 60, COURSE, 60.0, least)
    assert plan.limit == requests
    assert load.notes[0] == (
        f"about {pairs} pair{'s' * (pairs > 1)} of 2 rounds, each with arrivals for {requests - 1} s ({requests} "
        f"requests at the first rate), about {minutes_text(COURSE.pair_s(requests, 1.0))} a pair"
    )
    can_tell = "can tell highest rates apart" in load.notes[1]
    assert can_tell == (pairs >= LEAST_PAIRS)


def test_a_budget_of_which_nothing_can_be_concluded_is_told_with_one_that_is_enough():
    plan = ComparePlan(rate=1.0, budget_s=100.0)
    _, load = fit_budget(plan, given_load(plan, TRACE), 60, COURSE, 60.0, 1)
    assert "too few for a verdict: give --budget-s" in load.notes[1]
    enough_s = float(load.notes[1].partition("--budget-s ")[2].partition(" ")[0])
    plan = ComparePlan(rate=1.0, budget_s=enough_s)
    _, load = fit_budget(plan, given_load(plan, TRACE), 60, COURSE, 60.0, 1)
    assert load.notes[0].startswith("about 6 pairs")


def test_without_a_budget_pairs_and_requests_stay_the_plans():
    plan, load = fit_budget(ComparePlan(rate=1.0), given_load(ComparePlan(rate=1.0), TRACE), 61, COURSE, 0.0, 80)
    assert (plan.pairs, plan.limit) == (None, None)
    assert load.notes[0].startswith("at most 8 pairs of 2 rounds, each with arrivals for 60 s (61 requests")


def test_a_round_is_long_enough_for_a_queue_to_show():
    rows = Trace("t", tuple(TraceRow(float(i), 500, 120) for i in range(100)))
    long_answer_s = 1.25 + 120 * 0.054
    assert least_requests(1.0, rows, CPU, Slo(ttft_ms=100)) == math.ceil(2 * long_answer_s) + 1
    # at 25 % too high a rate a queue of 10 s takes 40 s
    assert least_requests(1.0, rows, CPU, Slo(ttft_ms=10_000)) == 41


def test_a_round_ends_with_a_long_answer_of_busy_workers():
    rows = tuple(TraceRow(float(i), 500, 20 if i < 80 else 120) for i in range(100))
    plan = ReplayPlan(warmup_requests=2, settle_s=1)
    warm_up_s, readings_s, last_s = 2 * (1.25 + 8 * 0.04), 4, 2 * 1.25 + 120 * 0.054
    assert beside_arrivals_s(plan, Trace("t", rows), CPU) == pytest.approx(warm_up_s + readings_s + last_s)
