"""Plans that leave rate and SLOs to be measured, and combinations that are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from ridgeline.loadtest.errors import LoadTestError, TraceError
from ridgeline.loadtest.plan import ComparePlan, ReplayPlan
from ridgeline.loadtest.run.replay import check_client
from ridgeline.loadtest.run.unloaded import sizes_of

TWO_SERVERS: dict[str, Any] = {"server": ["one=http://h:1/v1", "two= http://h:2/, https://h"]}


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"slo": "auto", "slo_ttft_ms": 2000}, "leave out slo_ttft_ms, or slo"),
        ({"slo": "auto", "slo_ttft_ms": 1, "slo_tpot_ms": 2}, "leave out slo_tpot_ms and slo_ttft_ms, or slo"),
        ({"rate": "auto", "time_scale": 1}, "give one of them"),
        ({"rate": "fast"}, "must be a number above 0 or auto, not 'fast'"),
        ({"rate": "-1"}, "above 0"),
        ({"rate": "nan"}, "above 0"),
        ({"slo": "strict"}, "auto"),
        ({"budget_s": 0}, "greater than 0"),
        ({"rate": "1,0"}, "1 validation error for ComparePlan\nrate\n.* above 0 or auto, not '1,0'"),
        ({"rate": "1,,2"}, "above 0 or auto, not '1,,2'"),
        ({"attainment": 1}, "less than 1"),
        ({"variants": "colocated,mixed"}, "some of colocated, disaggregated, adaptive, separated by commas"),
        ({"variants": "colocated"}, "two to 6 variants, not 1: name modes"),
        ({"variants": ",".join(["colocated"] * 7)}, "two to 6 variants, not 7"),
        ({"server": ["one=http://h:1"]}, r"running servers \(--server NAME=URL, twice\), or both"),
        ({"server": ["http://h:1", "two=http://h:2"]}, "must be NAME=URL"),
        ({"server": ["colocated=http://h:1", "two=http://h:2"]}, "a name that no mode has"),
        ({"server": ["one=h:1", "two=http://h:2"]}, "must have URLs such as vllm=http://127.0.0.1:8001, not 'h:1'"),
        ({"server": ["one=http://h:99999", "two=http://h:2"]}, "must have URLs such as"),
        ({"server": ["one=http://h:port/v1", "two=http://h:2"]}, "must have URLs such as"),
        ({"server": ["one=http://h:1,", "two=http://h:2"]}, "must have URLs such as"),
        ({"server": ["one=http://key@h:1", "two=http://h:2"]}, "must have URLs such as"),
        ({"server": ["one=http://h:1", "one =http://h:2"]}, "and one is given twice: join its URLs with commas"),
        (TWO_SERVERS | {"engines": ["one=http://h:3", "one=http://h:4"]}, "and one is given twice: join its URLs"),
        (TWO_SERVERS | {"devices": ["one=1", "one=2"]}, "and one is given twice: leave one out"),
        (TWO_SERVERS | {"devices": ["one=two"]}, "must be NAME=N, such as vllm=2, not 'one=two'"),
        (TWO_SERVERS | {"devices": ["one=0"]}, "must be NAME=N"),
        (TWO_SERVERS | {"devices": ["vllm=2"]}, "devices name vllm, which no server is called; servers: one, two"),
        ({"devices": ["vllm=2"]}, "which no server is called; servers: none"),
        ({"warmup_requests": 2}, "should be 0"),
        ({"duration_s": 9}, "none"),
    ],
)
def test_a_combination_that_contradicts_itself_is_refused_with_the_fix(fields, fix):
    with pytest.raises(ValidationError, match=fix):
        ComparePlan(**fields)


def test_all_modes_are_compared_by_default_and_running_servers_come_after_those_that_are_named():
    assert ComparePlan().kinds == ("colocated", "disaggregated", "adaptive")
    assert ComparePlan(variants="disaggregated, disaggregated").kinds == ("disaggregated", "disaggregated")
    plan = ComparePlan(**TWO_SERVERS, devices=["two=4"])
    assert (plan.modes, plan.kinds) == ((), ("one", "two"))
    assert plan.servers == {"one": ("http://h:1",), "two": ("http://h:2", "https://h")}
    assert plan.devices_of == {"two": 4}
    assert ComparePlan(**TWO_SERVERS, variants="adaptive").kinds == ("adaptive", "one", "two")
    assert ComparePlan(**plan.model_dump(exclude_unset=True)) == plan


def test_several_rates_are_measured_in_turn_and_the_first_plans_the_rounds():
    plan = ComparePlan(rate="1, 2.5")
    assert (plan.rate, plan.rates, plan.most_pairs) == (1, (1, 2.5), 16)
    assert (ComparePlan(rate=3).rates, ComparePlan(rate=3, pairs=5).most_pairs) == ((3,), 5)
    assert (ComparePlan(rate="auto").rates, ComparePlan().most_pairs) == ((), 36)
    assert ComparePlan(**plan.model_dump(exclude_unset=True)) == plan


def test_a_plan_measures_first_only_if_something_is_left_to_be_measured():
    assert not ReplayPlan(rate=2).measures_first
    assert ReplayPlan(rate="auto").measures_first
    assert ReplayPlan(slo="auto").measures_first
    assert ComparePlan().measures_first, "a search begins at a rate that is measured"
    assert not ComparePlan(rate="1,2").measures_first
    assert ComparePlan(rate="1,2", budget_s=60).measures_first
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
