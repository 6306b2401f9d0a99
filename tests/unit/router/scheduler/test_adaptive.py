"""Mode adaptive serves as the policy that would have served the latest requests best."""

import math

import pytest

from ridgeline.router.scheduler.adaptive import _since_it_turned
from ridgeline.router.scheduler.features import window_tokens
from ridgeline.router.scheduler.offline_simulation import AdaptiveSimulation
from ridgeline.router.scheduler.policies import Colocated, Disaggregated
from ridgeline.router.scheduler.simulation import Simulation
from ridgeline.router.scheduler.traffic import Seen
from tests.support.simulated_serving import BF16, fleet_model
from tests.unit.router.scheduler.samples import CHEAP_ANSWERS, H100, fleet, poisson


def attainment(requests):
    return sum(one.in_time for one in requests) / len(requests)


def adaptive_on(requests, rebalance="act", **of):
    simulation = AdaptiveSimulation(fleet(**of), fleet_model(**of), rebalance)
    simulation.run(requests)
    return simulation.adaptive


CHAT = {"prompt_tokens": 128, "output_tokens": 128}
LONG = {"prompt_tokens": 1024, "output_tokens": 24}


@pytest.mark.parametrize(
    ("traffic", "name"),
    [
        ({"rate": 0.5, "ttft_slo_s": 1.9, "tpot_slo_s": 0.05}, "1 of 2 for prefill"),
        (CHAT | {"rate": 0.6, "ttft_slo_s": 0.52, "tpot_slo_s": 0.05}, "colocated"),
        (LONG | {"rate": 0.3, "ttft_slo_s": 3.8, "tpot_slo_s": 0.05}, "colocated, paced"),
    ],
)
def test_it_becomes_the_policy_that_serves_the_traffic_best(traffic, name):
    traffic = dict(traffic)
    rate = traffic.pop("rate")
    assert adaptive_on(poisson(rate, 150, **traffic)).name == name


def test_it_follows_when_the_traffic_turns():
    long = poisson(0.5, 120, ttft_slo_s=1.9, tpot_slo_s=0.05)
    short = poisson(0.6, 150, prompt_tokens=128, output_tokens=128, ttft_slo_s=0.52, tpot_slo_s=0.05)
    for number, one in enumerate(short, 120):
        one.number, one.arrival_s = number, one.arrival_s + long[-1].arrival_s
    policy = adaptive_on([*long, *short])
    assert policy.name == "colocated"
    assert attainment(short[60:]) > 0.9


def test_without_slos_it_serves_as_the_policy_with_the_least_latency():
    def mean_s(policy):
        requests = poisson(0.6, 150)
        Simulation(fleet(), policy, 0.03).run(requests)
        return sum(one.latency_s for one in requests) / 150

    requests = poisson(0.6, 150)
    adaptive_on(requests)
    assert sum(one.latency_s for one in requests) / 150 < 1.05 * min(mean_s(Colocated()), mean_s(Disaggregated(0.5)))


def test_too_few_requests_change_nothing():
    policy = adaptive_on(poisson(0.5, 7, ttft_slo_s=1.9, tpot_slo_s=0.05))
    assert (policy.name, policy.scores) == ("colocated", {})


def test_the_first_comparison_counts_answers_that_have_not_ended_with_their_expected_length():
    """Taken to be short, they made every policy look right while a backlog grew."""
    policy = adaptive_on(poisson(6.7, 8, ttft_slo_s=5.0, tpot_slo_s=0.09), workers=8)
    assert policy.name == "5 of 8 for prefill"
    assert policy.scores["colocated"] < 0.2


def test_comparisons_in_which_all_policies_are_alike_do_not_move_the_divisions_that_are_compared():
    policy = adaptive_on(poisson(0.1, 30, ttft_slo_s=60.0, tpot_slo_s=1.0), workers=8)
    assert max(policy.scores.values()) - min(policy.scores.values()) < 0.01
    assert {"3 of 8 for prefill", "4 of 8 for prefill", "5 of 8 for prefill"} <= {*policy.scores}


def test_where_all_are_in_time_no_policy_is_simulated_to_the_end_but_what_serves_nor_advised():
    requests = poisson(0.1, 100, ttft_slo_s=60.0, tpot_slo_s=1.0)
    adaptive = adaptive_on(requests, "advise")
    parts = len([*adaptive.compare()])
    alone = len([*Simulation(fleet(), Colocated(), 0.03).steps(poisson(0.1, 100))])
    assert parts < 3 * alone
    assert adaptive.advised == adaptive.name == "colocated"
    assert len(adaptive.scores) >= 4


def test_a_division_far_from_half_of_the_workers_is_found():
    long = {"prompt_tokens": 2048, "output_tokens": 16, "ttft_slo_s": 12.0, "tpot_slo_s": 0.15}
    policy = adaptive_on(poisson(1.9, 100, **long), workers=8)
    assert policy.name == "7 of 8 for prefill"


@pytest.mark.parametrize(("rebalance", "advised"), [("none", "colocated"), ("advise", "1 of 2 for prefill")])
def test_workers_are_not_divided_unless_that_is_set(rebalance, advised):
    policy = adaptive_on(poisson(0.5, 150, ttft_slo_s=1.9, tpot_slo_s=0.05), rebalance)
    assert policy.name.startswith("colocated")
    assert policy.advised.startswith(advised)
    assert policy.affinities(2) == [None, None]


def test_where_prompts_take_longer_in_short_chunks_it_serves_as_well_as_the_better_pure_mode():
    """One worker decoded everything and computed the prompts in short chunks, while the other one idled."""

    def late(serve):
        requests = poisson(2.0, 200, ttft_slo_s=1.5, tpot_slo_s=0.095)
        serve(requests)
        return attainment(requests[80:])

    def pure(policy):
        return late(Simulation(fleet(model=CHEAP_ANSWERS), policy, 0.03).run)

    adaptive = late(lambda requests: adaptive_on(requests, model=CHEAP_ANSWERS))
    assert adaptive >= 0.95 * max(pure(Colocated()), pure(Disaggregated(0.5)))


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "rate"), [(256, 128, 12.0), (512, 64, 12.0), (2048, 128, 8.0)]
)
@pytest.mark.parametrize("slo_s", [(math.inf, math.inf), (0.2, 0.015)], ids=["without SLOs", "within 200 and 15 ms"])
def test_two_engines_that_take_turns_on_a_gpu_are_used_as_well_as_by_the_better_pure_mode(
    prompt_tokens, output_tokens, rate, slo_s
):
    """Seen on an H100 at 256/128 and 12 requests/s: answers on both engines took 15.2 ms a token, the split 8.3."""
    of = {"model": H100, "step_tokens": 8192, "per_device": 2}

    def served(policy):
        sizes = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
        requests = poisson(rate, 200, **sizes, ttft_slo_s=slo_s[0], tpot_slo_s=slo_s[1])
        if policy is None:
            adaptive_on(requests, **of)
        else:
            Simulation(fleet(**of), policy, 0.012).run(requests)
        late = requests[80:]
        kept = sum(one.ttft_s <= 0.2 and one.tpot_s <= 0.015 for one in late) / len(late)
        return kept, sum(one.latency_s for one in late) / len(late)

    pure = [served(policy) for policy in (Colocated(), Disaggregated(0.5))]
    kept, latency_s = served(None)
    if slo_s[0] == math.inf:
        assert latency_s <= 1.05 * min(latency for _, latency in pure)
    else:
        assert 1.05 * kept >= max(kept for kept, _ in pure)


def test_two_workers_that_take_turns_on_a_device_each_go_at_half_of_their_speed():
    took_s = {}
    for per_device in (1, 2):
        requests = poisson(1e6, 2, prompt_tokens=256, output_tokens=50)
        Simulation(fleet(per_device=per_device), Colocated(), 0.0).run(requests)
        took_s[per_device] = [one.latency_s for one in requests]
    assert took_s[2] == pytest.approx([2 * one for one in took_s[1]], rel=1e-4)


def test_it_compares_anew_within_a_few_requests_of_another_kind():
    """A burst of 28 was served by what earlier traffic had left, since comparisons were up to 30 requests apart."""
    names = []
    for number in (0, 6):
        requests = poisson(0.5, 121, ttft_slo_s=1.9, tpot_slo_s=0.05)
        last_s = requests[-1].arrival_s
        for one in poisson(1.2, number, **CHAT, ttft_slo_s=0.4, tpot_slo_s=0.05):
            one.number, one.arrival_s = len(requests), one.arrival_s + last_s + 5.0
            requests.append(one)
        names.append(adaptive_on(requests).name)
    assert names == ["1 of 2 for prefill", "colocated"]


def test_requests_of_two_kinds_in_turn_are_no_turn():
    mixed = poisson(0.3, 80, prompt_tokens=64)
    for one in mixed[::2]:
        one.prompt_tokens = 1024
    seen = [Seen(one.number, one.arrival_s, one.prompt_tokens, 1.0, 1.0, 64) for one in mixed]
    assert len(_since_it_turned(seen)) >= 76


@pytest.mark.parametrize(
    ("model", "step_tokens", "tokens"), [(BF16, 592, 192), (CHEAP_ANSWERS, 592, 960), (H100, 8192, 2240)]
)
def test_a_worker_has_as_few_prompts_as_keep_its_rate(model, step_tokens, tokens):
    assert window_tokens(model, step_tokens) == tokens


def test_in_overload_most_prompts_are_in_time():
    """Of 96 tokens each, 12 waited at the worker whatever their SLO: all were late as long as the overload lasted."""
    requests = poisson(6.2, 320, prompt_tokens=96, output_tokens=24, ttft_slo_s=0.66, tpot_slo_s=0.067)
    adaptive_on(requests, step_tokens=592)
    assert attainment(requests) > 0.6
