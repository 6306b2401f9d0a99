"""What each engine step is counted as: kinds, phases, wall time, and the roofline's figures by hand."""

from types import SimpleNamespace

import pytest

from ridgeline.engine.connector.accounting import StepAccountant
from ridgeline.roofline.cost import StepCostModel
from ridgeline.roofline.model_shape import load_model_shape
from tests.support.clock import FakeClock

SMOLLM2 = StepCostModel(load_model_shape("smollm2-135m"))


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def accountant(clock):
    return StepAccountant(SMOLLM2, clock)


def scheduled(new=None, running=None, drafts=None):
    """vLLM's SchedulerOutput: {request: (new tokens, tokens already computed)} of first and of later steps."""
    new, running = new or {}, running or {}
    tokens = {name: count for name, (count, _) in {**new, **running}.items()}
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts or {},
        total_num_scheduled_tokens=sum(tokens.values()),
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=done) for name, (_, done) in new.items()],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running), num_computed_tokens=[done for _, done in running.values()]
        ),
    )


def step(accountant, **requests):
    accountant.begin(scheduled(**requests))
    accountant.end()


def kinds(accountant):
    return {name.split(".")[1]: int(n) for name, n in accountant.counters.items() if name.startswith("steps_total.")}


def test_a_step_of_prompts_is_prefill_one_of_outputs_decode_and_both_together_mixed(accountant):
    accountant.expect("a", 10, 0)
    accountant.expect("b", 5, 0)
    step(accountant, new={"a": (10, 0)})
    assert kinds(accountant) == {"prefill": 1}
    step(accountant, running={"a": (1, 10)})
    assert kinds(accountant) == {"prefill": 1, "decode": 1}
    step(accountant, new={"b": (5, 0)}, running={"a": (1, 11)})
    assert kinds(accountant) == {"prefill": 1, "decode": 1, "mixed": 1}
    assert accountant.counters["tokens_total.prefill"] == 15
    assert accountant.counters["tokens_total.decode"] == 2


def test_every_chunk_of_a_prompt_is_prefill_and_only_the_last_one_samples(accountant):
    accountant.expect("a", 100, 0)
    step(accountant, new={"a": (64, 0)})
    assert accountant.counters["flops_total.prefill"] == SMOLLM2.step([(64, 0)], 0).flops
    step(accountant, running={"a": (36, 64)})
    both = SMOLLM2.step([(64, 0)], 0) + SMOLLM2.step([(36, 64)], 1)
    assert accountant.counters["flops_total.prefill"] == both.flops
    assert kinds(accountant) == {"prefill": 2}


def test_a_step_with_drafts_moves_weights_and_kv_once_and_counts_the_tokens_that_were_accepted(accountant):
    accountant.expect("a", 10, 0)
    accountant.expect("b", 10, 0)
    drafts = {"a": [7, 8, 9]}
    step(accountant, running={"a": (4, 10), "b": (1, 20)}, drafts=drafts)
    accountant.verified(sequences=2, drafted=3, accepted=2)
    cost = SMOLLM2.step([(4, 10), (1, 20)], 5)
    counted = accountant.counters
    assert counted["flops_total.decode"] == cost.flops
    assert counted["bytes_total.decode.weights"] == SMOLLM2.step([(1, 10)], 1).weight_bytes
    assert counted["tokens_total.decode"] == 4
    names = ("drafted_tokens_total", "accepted_tokens_total", "sequence_steps_total")
    assert [counted[name] for name in names] == [3, 2, 2]


@pytest.mark.parametrize(("prompt", "computed"), [(71, 70), (70, 69)], ids=["continue", "resample"])
def test_the_first_step_of_a_handed_over_request_is_decode(accountant, prompt, computed):
    accountant.expect("a", prompt, 70)
    step(accountant, new={"a": (1, computed)})
    assert kinds(accountant) == {"decode": 1}
    assert accountant.counters["tokens_total.prefill"] == 0
    assert accountant.counters["flops_total.decode"] == SMOLLM2.step([(1, computed)], 1).flops


def test_a_prompt_recomputed_after_a_failed_transfer_is_prefill_and_counted_by_reason(accountant):
    accountant.expect("a", 71, 70)
    accountant.recompute("a", "timeout")
    step(accountant, new={"a": (71, 0)})
    assert kinds(accountant) == {"prefill": 1}
    assert accountant.counters["recompute_total.timeout"] == 1
    assert accountant.counters["tokens_total.prefill"] == 71


def test_a_preempted_request_pays_for_its_prefill_again(accountant):
    accountant.expect("a", 10, 0)
    step(accountant, new={"a": (10, 0)})
    step(accountant, running={"a": (1, 10)})
    step(accountant, running={"a": (12, 0)})
    assert kinds(accountant) == {"prefill": 2, "decode": 1}


def test_a_request_id_used_again_after_forgetting_starts_anew(accountant):
    accountant.expect("a", 50, 0)
    accountant.forget("a")
    accountant.expect("a", 5, 0)
    step(accountant, running={"a": (1, 5)})
    assert kinds(accountant) == {"decode": 1}


def test_a_step_without_tokens_counts_for_nothing(accountant, clock):
    accountant.begin(scheduled())
    clock.now_s += 9
    accountant.end()
    assert accountant.counters == {}


def test_the_counters_of_a_mixed_step_equal_the_roofline_done_by_hand(accountant, clock):
    # Two decodes at 99 and 199 computed tokens, and a 16-token chunk after 32: as worked out in the roofline's test.
    accountant.expect("a", 100, 99)
    accountant.expect("b", 190, 0)
    accountant.expect("c", 100, 0)
    accountant.begin(scheduled(new={"a": (1, 99)}, running={"b": (1, 199), "c": (16, 32)}))
    clock.now_s += 0.125
    accountant.end()
    assert accountant.counters == {
        "tokens_total.prefill": 16,
        "tokens_total.decode": 2,
        "steps_total.mixed": 1,
        "busy_seconds_total.mixed": 0.125,
        "flops_total.mixed": 4_000_831_488,
        "bytes_total.mixed.weights": 2 * 134_515_008,
        "bytes_total.mixed.kv_read": 348 * 23_040,
        "bytes_total.mixed.kv_write": 18 * 23_040,
    }


def test_time_between_steps_is_not_busy_time(accountant, clock):
    accountant.expect("a", 1, 0)
    for _ in range(2):
        accountant.begin(scheduled(running={"a": (1, 1)}))
        clock.now_s += 0.25
        accountant.end()
        clock.now_s += 5
    assert accountant.counters["busy_seconds_total.decode"] == 0.5


def test_overlapping_steps_share_the_wall_clock(accountant, clock):
    accountant.expect("a", 1, 0)
    for _ in range(2):
        accountant.begin(scheduled(running={"a": (1, 1)}))
        clock.now_s += 1
    accountant.end()  # began at 0, ended at 2
    clock.now_s += 1
    accountant.end()  # began at 1, ended at 3
    assert accountant.counters["busy_seconds_total.decode"] == 3
    assert accountant.counters["steps_total.decode"] == 2


def test_overlapping_steps_end_in_the_order_in_which_they_began(accountant, clock):
    accountant.expect("a", 10, 0)
    accountant.begin(scheduled(new={"a": (10, 0)}))
    accountant.begin(scheduled(running={"a": (1, 10)}))
    clock.now_s += 1
    accountant.end()
    assert kinds(accountant) == {"prefill": 1}
    accountant.end()
    assert kinds(accountant) == {"prefill": 1, "decode": 1}


def test_an_end_without_a_beginning_is_ignored(accountant):
    accountant.end()
    assert accountant.counters == {}


def test_a_model_whose_shape_is_not_known_is_counted_in_steps_tokens_and_time(clock):
    accountant = StepAccountant(None, clock)
    accountant.expect("a", 100, 0)
    accountant.begin(scheduled(new={"a": (100, 0)}))
    clock.now_s += 0.5
    accountant.end()
    assert accountant.counters == {
        "tokens_total.prefill": 100,
        "tokens_total.decode": 0,
        "busy_seconds_total.prefill": 0.5,
        "steps_total.prefill": 1,
    }
