"""The policy of mode adaptive on two simulated workers: what it may not lose, and what it must gain."""

from dataclasses import replace
from statistics import mean, median

import pytest

from ridgeline.contracts.workers import StepModel
from tools.bench import simulated_modes
from tools.bench.simulated_modes import (
    MACHINES,
    MODES,
    NO_LIMITS,
    SHARED_H100,
    Fleet,
    Limits,
    Simulation,
    Workload,
    arrivals,
    best,
    goodput,
    serve,
    unloaded,
)

LOAD = Workload(requests=100, seeds=2)
FLEET = Fleet(MACHINES["avx2"])


@pytest.mark.parametrize(
    ("ttft", "tpot", "least"),
    [(2.0, 1.3, 0.93), (12.0, 1.3, 0.93), (2.0, 4.0, 1.0), (5.0, 2.0, 1.15), (5.0, 3.0, 1.25)],
)
def test_adaptive_holds_what_the_better_pure_mode_holds_and_more_where_limits_are_balanced(ttft, tpot, least):
    prompt_s, step_s = unloaded(FLEET.machine, LOAD.prompt_tokens)
    limits = Limits(ttft * prompt_s, tpot * step_s)
    pure = max(best(FLEET, mode, (0.3, 0.4, 0.5), limits, LOAD) for mode in ("colocated", "disaggregated"))
    assert best(FLEET, "adaptive", (0.4, 0.5, 0.6), limits, LOAD) >= least * pure


@pytest.mark.parametrize("mode", MODES)
def test_every_simulated_request_is_answered_in_full(mode):
    requests = arrivals(0.6, 50, 1, 300, 20)
    Simulation(FLEET, mode, Limits(5.0, 0.1)).run(requests)
    assert all(request.made == 20 and request.arrival_s < request.first_s < request.end_s for request in requests)


def test_of_a_large_fleet_the_workers_on_the_short_list_hold_about_as_much_as_all_of_them_would(monkeypatch):
    fleet, load = Fleet(MACHINES["bf16"], workers=16, noise=0.1), Workload(requests=300, seeds=4)
    prompt_s, step_s = unloaded(fleet.machine, load.prompt_tokens)
    limits, rate = Limits(5 * prompt_s, 4 * step_s), 0.7 * 16 / prompt_s
    short = goodput(fleet, "adaptive", rate, limits, load)
    monkeypatch.setattr(simulated_modes, "short_list", lambda workers, *_: workers)
    assert short >= 0.97 * goodput(fleet, "adaptive", rate, limits, load)


def test_prompts_in_short_chunks_that_take_longer_than_predicted_do_not_make_requests_late():
    """Where a chunk of a prompt takes longer than the line of a model says, 0.86 of the requests were in time."""
    cheap_answers = StepModel(
        base_s=0.055,
        per_prefill_token_s=0.0006,
        per_sequence_s=0.00005,
        per_context_token_s=1e-6,
        per_attended_token_s=0.0006 / 18_000,
        corrections=(*[1.0] * 6, 1.45, 1.45, 1.45, 1.2),
        steps=100,
    )
    limits, fleet, load = Limits(1.5, 0.095), Fleet(cheap_answers, noise=0.1), Workload(requests=150, seeds=3)
    served = [request for requests in serve(fleet, "adaptive", 2.4, limits, load) for request in requests]
    assert sum(request.within(limits) for request in served) / len(served) > 0.9


def tpot_s(request):
    return (request.end_s - request.first_s) / (request.output_tokens - 1)


@pytest.mark.parametrize(
    ("prompt_tokens", "output_tokens", "rate"), [(256, 128, 12.0), (512, 64, 12.0), (2048, 128, 8.0)]
)
@pytest.mark.parametrize("limits", [NO_LIMITS, Limits(0.2, 0.015)], ids=["without limits", "within 200 and 15 ms"])
def test_two_engines_that_take_turns_on_a_gpu_are_used_as_well_as_by_the_better_pure_mode(
    prompt_tokens, output_tokens, rate, limits
):
    """Seen on an H100 at 256/128 and 12 requests/s: answers on both engines took 15.2 ms a token, the split 8.3."""
    fleet, asked = replace(SHARED_H100, noise=0.05), Limits(0.2, 0.015)
    load = Workload(requests=80, seeds=2, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    tokens_ms, kept = {}, {}
    for mode in MODES:
        served = [one for requests in serve(fleet, mode, rate, limits, load) for one in requests]
        tokens_ms[mode] = 1e3 * median(tpot_s(one) for one in served)
        kept[mode] = mean(one.within(asked) for one in served)
    assert 1.05 * kept["adaptive"] >= max(kept["colocated"], kept["disaggregated"]), kept
    if limits is NO_LIMITS:
        assert tokens_ms["adaptive"] <= 1.05 * min(tokens_ms["colocated"], tokens_ms["disaggregated"]), tokens_ms


def test_two_workers_that_take_turns_on_a_device_each_go_at_half_of_their_speed():
    alone, shared = (Fleet(MACHINES["bf16"], per_device=number) for number in (1, 2))
    took_s = {}
    for fleet in (alone, shared):
        requests = arrivals(1e6, 2, 1, 256, 50)
        Simulation(fleet, "colocated", NO_LIMITS).run(requests)
        took_s[fleet.per_device] = [one.end_s - one.arrival_s for one in requests]
    assert took_s[2] == pytest.approx([2 * one for one in took_s[1]], rel=1e-4)


@pytest.mark.parametrize("prompt_tokens", [128, 1024])
def test_first_tokens_are_predicted_with_what_passes_outside_of_the_engine(prompt_tokens):
    """On an H100, 20 ms of 42 were not the engine's; a factor alone cannot say that for prompts of any length."""
    fleet = replace(SHARED_H100, per_device=1, outside_s=0.02)
    short, long = (arrivals(1.0, 60, seed, tokens, 8) for seed, tokens in ((1, 128), (2, 1024)))
    requests = sorted([*short, *long], key=lambda one: one.arrival_s)
    for number, request in enumerate(requests):
        request.number, request.arrival_s = number, float(number)
    Simulation(fleet, "adaptive", NO_LIMITS).run(requests)
    late = [one for one in requests[40:] if one.prompt_tokens == prompt_tokens]
    errors = [one.decision.chosen.ttft_s / (one.first_s - one.arrival_s) - 1 for one in late]
    assert max(errors, key=abs) == pytest.approx(0.0, abs=0.03)
