"""Plans that leave rate and SLOs to be measured, and combinations that are refused."""

import pytest
from pydantic import ValidationError

from ridgeline.loadtest.errors import LoadTestError, TraceError
from ridgeline.loadtest.plan import ComparePlan, ReplayPlan
from ridgeline.loadtest.run.replay import check_client
from ridgeline.loadtest.run.unloaded import sizes_of


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"slo": "auto", "slo_ttft_ms": 2000}, "leave out slo_ttft_ms, or slo"),
        ({"slo": "auto", "slo_ttft_ms": 1, "slo_tpot_ms": 2}, "leave out slo_tpot_ms and slo_ttft_ms, or slo"),
        ({"rate": "auto", "time_scale": 2}, "give one of them"),
        ({"rate": "auto", "time_scale": 1}, "give one of them"),
        ({"attainment": 0.9}, "give find_rate too"),
        ({"tuning_rounds": 3}, "give grid too"),
        ({"baseline_name": "baseline"}, "baseline_name say nothing without a baseline"),
        ({"rate": "fast"}, "must be a number above 0 or auto, not 'fast'"),
        ({"rate": "-1"}, "above 0"),
        ({"rate": "nan"}, "above 0"),
        ({"slo": "strict"}, "auto"),
        ({"budget_s": 0}, "greater than 0"),
        ({"margin": 0}, "greater than 0"),
        ({"variants": "colocated"}, "two of colocated, disaggregated, adaptive"),
        ({"variants": "colocated,mixed"}, "two of colocated, disaggregated, adaptive"),
        ({"baseline": "http://h:1"}, "name the one mode to compare with it, such as variants disaggregated"),
        ({"baseline": "h:1", "variants": "colocated"}, "must be URLs such as http://127.0.0.1:8001"),
        ({"baseline": "http://h:99999", "variants": "colocated"}, "must be URLs such as http://127.0.0.1:8001"),
        ({"baseline": "http://h:port/v1", "variants": "colocated"}, "must be URLs such as http://127.0.0.1:8001"),
        ({"baseline": "http://h:1,", "variants": "colocated"}, "must be URLs such as http://127.0.0.1:8001"),
        ({"baseline": "http://h:1", "variants": "colocated", "baseline_name": "colocated"}, "a name that no mode has"),
        ({"baseline": "http://h:1", "variants": "colocated", "baseline_processes": "vllm"}, "process ids such as 4711"),
        ({"tuning_rounds": 2}, "give grid too"),
        ({"grid": "g", "tuning_rounds": 0}, "greater than or equal to 1"),
        ({"grid": "g", "find_rate": True}, "grid does not go with find_rate"),
        ({"grid": "g", "budget_s": 300}, "grid does not go with budget_s"),
        ({"grid": "g", "baseline": "http://h:1", "variants": "colocated"}, "a baseline is not ours to tune"),
        ({"grid": "g", "variants": "colocated,colocated"}, "grid needs two modes"),
        ({"warmup_requests": 2}, "should be 0"),
        ({"baseline_devices": 2}, "baseline_devices say nothing without a baseline"),
    ],
)
def test_a_combination_that_contradicts_itself_is_refused_with_the_fix(fields, fix):
    with pytest.raises(ValidationError, match=fix):
        ComparePlan(**fields)


def test_variants_are_two_modes_of_which_one_may_come_twice():
    assert ComparePlan().modes == ("colocated", "disaggregated")
    assert ComparePlan(variants="disaggregated, disaggregated").modes == ("disaggregated", "disaggregated")


def test_an_baseline_is_the_last_variant_beside_one_mode_and_in_a_search_beside_one_or_two():
    urls = "http://h:1/v1, http://h:2/"
    plan = ComparePlan(variants="disaggregated", baseline=urls, baseline_processes="12, 13")
    assert (plan.modes, plan.kinds) == (("disaggregated",), ("disaggregated", "baseline"))
    three = ComparePlan(baseline=urls, find_rate=True)
    assert three.kinds == ("colocated", "disaggregated", "baseline")
    assert plan.baseline_urls == ("http://h:1", "http://h:2")
    assert plan.baseline_process_ids == (12, 13)
    assert ComparePlan(**plan.model_dump(exclude_unset=True)) == plan


def test_an_option_that_is_turned_off_contradicts_none():
    assert ComparePlan(grid="g", find_rate=False, baseline_text_prompts=False).grid == "g"


def test_former_names_of_fields_are_still_read():
    former = ComparePlan(arms="disaggregated", opponent="http://h:1", opponent_name="vLLM")
    assert former == ComparePlan(variants="disaggregated", baseline="http://h:1", baseline_name="vLLM")


def test_a_plan_measures_first_only_if_something_is_left_to_be_measured():
    assert not ReplayPlan(rate=2).measures_first
    assert ReplayPlan(rate="auto").measures_first
    assert ReplayPlan(slo="auto").measures_first
    assert ComparePlan(budget_s=60).measures_first
    assert ReplayPlan(rate="2.5").rate == 2.5


def test_a_trace_without_spread_cannot_have_a_measured_rate_and_that_is_said_before_anything_starts():
    with pytest.raises(TraceError, match="no spread of arrivals to rescale to a measured rate"):
        sizes_of(ReplayPlan(trace="poisson:n=1", rate="auto"))
    with pytest.raises(TraceError, match="no spread of arrivals to rescale to 2 requests/s"):
        sizes_of(ReplayPlan(trace="poisson:n=1", rate=2))
    assert len(sizes_of(ReplayPlan(trace="poisson:n=9", rate="auto", duration_s=0.001)).rows) == 9


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"client_cores": "4096"}, "cannot run on core 4096"),
        ({"client_cores": "first"}, "give a list such as 0-1,3"),
        ({"tokenizer": "/no/such/folder"}, "the tokenizer '/no/such/folder' cannot be loaded"),
    ],
)
def test_a_client_that_this_machine_cannot_run_is_refused_before_anything_starts(fields, sentence):
    with pytest.raises(LoadTestError, match=sentence):
        check_client(ReplayPlan(**fields))


def test_without_an_option_that_asks_for_one_rate_all_modes_are_measured_over_rates():
    assert ComparePlan(**ComparePlan.completed({"budget_s": 300})).find_rate
    assert ComparePlan(**ComparePlan.completed({})).modes == ("colocated", "disaggregated", "adaptive")
    with_baseline = ComparePlan(**ComparePlan.completed({"baseline": "http://127.0.0.1:9000"}))
    assert with_baseline.kinds == ("colocated", "disaggregated", "adaptive", "baseline")
    two = ComparePlan(**ComparePlan.completed({"variants": "colocated,adaptive"}))
    assert (two.find_rate, two.modes) == (True, ("colocated", "adaptive"))


@pytest.mark.parametrize("given", [{"rate": "auto"}, {"time_scale": 1.0}, {"pairs": 9}, {"margin": 0.1}, {"grid": "g"}])
def test_an_option_that_asks_for_one_rate_compares_two_modes_in_pairs(given):
    plan = ComparePlan(**ComparePlan.completed(given))
    assert (plan.find_rate, plan.modes) == (False, ("colocated", "disaggregated"))


def test_three_modes_at_one_rate_are_refused_with_the_way_out():
    with pytest.raises(ValueError, match="leave --rate out"):
        ComparePlan(rate=1.0, variants="colocated,disaggregated,adaptive")
