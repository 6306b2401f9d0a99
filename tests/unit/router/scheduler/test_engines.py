"""Modelled engines: every token is made, runs of steps take what their steps would, devices are shared."""

import msgspec
import pytest

from ridgeline.router.scheduler.features import Assignment
from ridgeline.router.scheduler.policies import Colocated, Disaggregated, predicted
from ridgeline.router.scheduler.simulation import Simulation
from tests.support.simulated_serving import BF16
from tests.unit.router.scheduler.samples import fleet, poisson


def served(policy, requests, workers=None):
    Simulation(workers or fleet(), policy, handover_s=0.03).run(requests)
    return requests


@pytest.mark.parametrize("policy", [Colocated(), Colocated(paced=True), Disaggregated(0.5)])
def test_every_request_gets_all_of_its_tokens(policy):
    requests = served(policy, poisson(1.5, 80, output_tokens=20, ttft_slo_s=3.0, tpot_slo_s=0.1))
    assert all(one.made_tokens == 20 and one.arrival_s < one.first_s < one.end_s < 1e6 for one in requests)


def test_a_request_alone_takes_its_prompt_and_its_steps():
    (request,) = served(Colocated(), poisson(1.0, 1, prompt_tokens=100, output_tokens=11))
    assert request.ttft_s == pytest.approx(BF16.step_s(100, 0, 0, 100 * 100 / 2))
    steps = [BF16.decode_s(1, 100 + made) for made in range(1, 11)]
    assert request.tpot_s * 10 == pytest.approx(sum(steps))


def test_with_speculation_a_step_computes_and_makes_several_tokens_of_a_sequence():
    drafts = msgspec.structs.replace(BF16, computed_per_sequence=4.0, made_per_sequence=2.5)
    (request,) = poisson(1.0, 1, prompt_tokens=100, output_tokens=11)
    workers = fleet(1, drafts)
    served(Colocated(), [request], workers)
    step_s = BF16.step_s(0, 4, 100, 0)
    assert drafts.decode_s(1, 100) == pytest.approx(step_s)
    assert request.tpot_s * 10 == pytest.approx(4 * step_s, rel=0.01)  # 10 tokens in 4 steps
    assigned = predicted(Assignment("w0", "w0", ""), request.features(0.0), *fleet(1) * 2, overhead_s=0.0)
    faster = predicted(Assignment("w0", "w0", ""), request.features(0.0), *workers * 2, overhead_s=0.0)
    assert faster.tpot_s == pytest.approx(assigned.tpot_s * step_s / BF16.decode_s(1, 100) / 2.5, rel=0.01)


def test_a_long_prompt_is_computed_in_chunks_of_a_step():
    (request,) = served(Colocated(), poisson(1.0, 1, prompt_tokens=1200, output_tokens=1))
    chunks = [(512, 0), (512, 512), (176, 1024)]
    assert request.ttft_s == pytest.approx(
        sum(BF16.step_s(tokens, 0, 0, tokens * (before + tokens / 2)) for tokens, before in chunks)
    )


def test_a_prompt_waits_for_the_end_of_the_step_that_runs():
    first, second = poisson(1.0, 2, prompt_tokens=10, output_tokens=100)
    first.arrival_s, second.arrival_s = 0.0, 1.0
    served(Colocated(), [first, second], fleet(1))
    prompt_s = BF16.step_s(10, 0, 0, 50)
    step_s = BF16.decode_s(1, 30)
    assert 0.0 < second.ttft_s - BF16.step_s(10, 1, 30, 50) < 1.1 * step_s
    assert first.ttft_s == pytest.approx(prompt_s)


def test_workers_that_share_a_device_take_twice_as_long_while_both_compute():
    def last_s(per_device):
        requests = poisson(1000.0, 2, prompt_tokens=512, output_tokens=50)
        served(Colocated(), requests, fleet(per_device=per_device))
        return max(one.end_s for one in requests)

    assert last_s(2) == pytest.approx(2 * last_s(1), rel=0.01)


def test_a_sequence_without_a_seat_waits_for_one():
    requests = poisson(1000.0, 3, prompt_tokens=16, output_tokens=40)
    served(Colocated(), requests, fleet(1, max_num_seqs=1))
    assert all(one.made_tokens == 40 for one in requests)
    ends = sorted(one.end_s for one in requests)
    assert ends[1] - ends[0] >= 38 * BF16.decode_s(1, 16)
    assert sorted(one.first_s for one in requests)[1] >= ends[0], "and so does its first token"


@pytest.mark.parametrize(("kv_tokens", "together"), [(200, 1), (400, 2), (100_000, 3)])
def test_no_more_sequences_run_than_their_kv_has_room_for(kv_tokens, together):
    requests = poisson(1000.0, 3, prompt_tokens=100, output_tokens=100)  # each keeps 150 tokens on average
    served(Colocated(), requests, fleet(1, kv_tokens=kv_tokens))
    assert max(sum(one.first_s < other.end_s <= one.end_s for one in requests) for other in requests) == together


def test_paced_engines_keep_the_tpot_slo_that_prompts_would_break():
    def late(*, paced):
        requests = poisson(0.9, 100, ttft_slo_s=6.0, tpot_slo_s=0.075)
        served(Colocated(paced=paced), requests)
        return sum(one.tpot_s > one.tpot_slo_s for one in requests)

    assert late(paced=True) < late(paced=False) / 4
