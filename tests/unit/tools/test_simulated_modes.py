"""The policy of mode adaptive on two simulated workers: what it may not lose, and what it must gain."""

import pytest

from contracts.workers import StepModel
from tools.bench import simulated_modes
from tools.bench.simulated_modes import (
    MACHINES,
    MODES,
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
    fleet, load = Fleet(MACHINES["bf16"], workers=16, noise=0.1), Workload(requests=300, seeds=1)
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
