"""Plans that leave rate and limits to be measured, and combinations that are refused."""

import pytest
from pydantic import ValidationError

from loadtest.errors import LoadTestError, TraceError
from loadtest.plan import ComparePlan, ReplayPlan
from loadtest.run.replay import check_client
from loadtest.run.unloaded import sizes_of


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"slo": "auto", "slo_ttft_ms": 2000}, "leave out slo_ttft_ms, or slo"),
        ({"slo": "auto", "slo_ttft_ms": 1, "slo_tpot_ms": 2}, "leave out slo_tpot_ms and slo_ttft_ms, or slo"),
        ({"rate": "auto", "time_scale": 2}, "give one of them"),
        ({"rate": "fast"}, "must be a number above 0 or auto, not 'fast'"),
        ({"rate": "-1"}, "above 0"),
        ({"rate": "nan"}, "above 0"),
        ({"slo": "strict"}, "auto"),
        ({"budget_s": 0}, "above 0"),
        ({"margin": 0}, "between 0 and 1"),
        ({"arms": "colocated"}, "two of colocated, disaggregated, adaptive"),
        ({"arms": "colocated,mixed"}, "two of colocated, disaggregated, adaptive"),
        ({"opponent": "http://h:1"}, "name the one mode to compare with it, such as arms disaggregated"),
        ({"opponent": "h:1", "arms": "colocated"}, "must be URLs such as http://127.0.0.1:8001"),
        ({"opponent": "http://h:1,", "arms": "colocated"}, "must be URLs such as http://127.0.0.1:8001"),
        ({"opponent": "http://h:1", "arms": "colocated", "opponent_name": "colocated"}, "a name that no mode has"),
        ({"opponent": "http://h:1", "arms": "colocated", "opponent_processes": "vllm"}, "process ids such as 4711"),
        ({"tuning_rounds": 2}, "give grid too"),
        ({"grid": "g", "tuning_rounds": 0}, "must be 1 or more"),
        ({"grid": "g", "find_rate": True}, "grid does not go with find_rate"),
        ({"grid": "g", "budget_s": 300}, "grid does not go with budget_s"),
        ({"grid": "g", "opponent": "http://h:1", "arms": "colocated"}, "an opponent is not ours to tune"),
        ({"grid": "g", "arms": "colocated,colocated"}, "grid needs two modes"),
        ({"opponent_devices": 2}, "opponent_devices say nothing without an opponent"),
    ],
)
def test_a_combination_that_contradicts_itself_is_refused_with_the_fix(fields, fix):
    with pytest.raises(ValidationError, match=fix):
        ComparePlan(**fields)


def test_arms_are_two_modes_of_which_one_may_come_twice():
    assert ComparePlan().modes == ("colocated", "disaggregated")
    assert ComparePlan(arms="disaggregated, disaggregated").modes == ("disaggregated", "disaggregated")


def test_an_opponent_is_the_last_arm_beside_one_mode_and_in_a_search_beside_one_or_two():
    urls = "http://h:1/v1, http://h:2/"
    plan = ComparePlan(arms="disaggregated", opponent=urls, opponent_processes="12, 13")
    assert (plan.modes, plan.kinds) == (("disaggregated",), ("disaggregated", "opponent"))
    three = ComparePlan(opponent=urls, find_rate=True)
    assert three.kinds == ("colocated", "disaggregated", "opponent")
    assert plan.opponent_urls == ("http://h:1", "http://h:2")
    assert plan.opponent_process_ids == (12, 13)
    assert ComparePlan(**plan.model_dump()) == plan
    assert ComparePlan(**ComparePlan().model_dump()) == ComparePlan()


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
