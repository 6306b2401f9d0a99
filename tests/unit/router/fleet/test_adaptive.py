"""What mode `adaptive` chooses on tables of workers, and what it predicts for its choices."""

import math
import time

import pytest

from ridgeline.contracts.workers import LEAST_PROMPT_SHARE, LOST_LIMITS, TPOT_LIMIT_USED, StepModel
from ridgeline.router.fleet.adaptive import Wanted, choose
from ridgeline.router.fleet.prediction import Load, attended, compute_s, joined_step_s, later, prompt_s, step_s, tpot_s
from ridgeline.router.fleet.prediction import with_prompts as seat_prompts

MODEL = StepModel(
    base_s=0.04,
    per_prefill_token_s=0.0018,
    per_sequence_s=0.002,
    per_context_token_s=1e-6,
    per_attended_token_s=1e-7,
    steps=100,
)
"""About what SmolLM2-135M takes on one core with AVX2 alone."""
PROMPT, OUTPUT = 512, 64


def fast(_source, _sink):
    return 0.02


WORK_S = compute_s(Load("w", MODEL, 512), PROMPT, attended(PROMPT))
UNLOADED_S = 0.04 + WORK_S


def slow(_source, _sink):
    return 0.5


def a_load(name="w0", **values):
    return Load(name, MODEL, 512, **values)


def decoding(name, sequences, **values):
    return a_load(name, decoding=sequences, decodes=sequences, context_tokens=544 * sequences, **values)


def with_prompts(name, prompts, **values):
    return seat_prompts(a_load(name, **values), [PROMPT] * prompts, 0.0)


def wanted(ttft_s=math.inf, tpot_s=math.inf, **values):
    return Wanted(PROMPT, OUTPUT, ttft_s, tpot_s, **values)


def pair_of(decision):
    return decision.chosen.prompt_worker, decision.chosen.decode_worker


# What is predicted


def test_a_prompt_alone_takes_its_computation_and_a_base_for_each_step():
    assert prompt_s(a_load(), PROMPT, WORK_S) == pytest.approx(UNLOADED_S)
    two_works_s = compute_s(a_load(), 2 * PROMPT, attended(2 * PROMPT))
    assert prompt_s(a_load(), 2 * PROMPT, two_works_s) == pytest.approx(0.08 + two_works_s)


def test_a_prompt_waits_for_those_before_it():
    assert prompt_s(with_prompts("w", 1), PROMPT, WORK_S) == pytest.approx(2 * UNLOADED_S)


def test_beside_sequences_without_limits_a_prompt_takes_only_their_share_of_its_steps_longer():
    busy = decoding("w", 10)
    longer_s = prompt_s(busy, PROMPT, WORK_S) - UNLOADED_S
    assert longer_s == pytest.approx(step_s(busy) - MODEL.base_s)


def test_beside_sequences_with_a_limit_a_prompt_is_spread_over_the_steps_that_it_leaves():
    step = step_s(decoding("w", 10))
    busy = decoding("w", 10, tpot_limit_s=2 * step / 0.95)
    assert prompt_s(busy, PROMPT, WORK_S) == pytest.approx(2 * WORK_S, rel=0.1)
    joined_s = step_s(decoding("w", 11))
    assert tpot_s(busy, step_s(busy), joined_s, OUTPUT) >= joined_s


def test_beside_sequences_that_can_still_save_time_a_prompt_takes_fewer_steps():
    step = step_s(decoding("w", 10))
    long, middle, short = (decoding("w", 10, tpot_limit_s=2 * step / 0.95, left_tokens=left) for left in (1000, 15, 0))
    asked = PROMPT, WORK_S
    assert prompt_s(long, *asked) == pytest.approx(4 / 3 * WORK_S, rel=0.1)
    assert prompt_s(long, *asked) < prompt_s(middle, *asked) < prompt_s(short, *asked)


def test_what_sequences_lend_to_one_prompt_they_do_not_lend_to_the_next():
    asked = {"tpot_limit_s": 2 * step_s(decoding("w", 10)) / 0.95, "left_tokens": 20}
    whole_s = prompt_s(decoding("w", 10, **asked), 2 * PROMPT, 2 * WORK_S)
    busy = seat_prompts(decoding("w", 10, **asked), [PROMPT], 0.0)
    assert prompt_s(busy, PROMPT, WORK_S) == pytest.approx(whole_s, rel=0.05)


def test_without_any_time_left_by_a_step_target_a_prompt_still_goes_on_in_small_chunks():
    busy = decoding("w", 10, step_target_s=1.001 * step_s(decoding("w", 10)))
    steps = WORK_S / (LEAST_PROMPT_SHARE * step_s(busy))
    assert prompt_s(busy, PROMPT, WORK_S) == pytest.approx(WORK_S + steps * step_s(busy), rel=0.1)


@pytest.mark.parametrize("part", [0.1, 1.001, 1.09])
def test_beside_a_limit_that_no_step_can_keep_a_prompt_is_computed_in_long_steps(part: float):
    busy = decoding("w", 10, tpot_limit_s=part * step_s(decoding("w", 10)) / TPOT_LIMIT_USED)
    steps = math.ceil(WORK_S / ((LOST_LIMITS - 1) * step_s(busy)))
    assert prompt_s(busy, PROMPT, WORK_S) == pytest.approx(WORK_S + steps * step_s(busy))


def test_a_prompt_behind_others_is_computed_beside_the_sequences_that_will_have_their_first_tokens_by_then():
    limit_s = 2 * step_s(decoding("w", 10)) / 0.95
    decode_too = decoding("w", 10, tpot_limit_s=limit_s)
    alone_s = prompt_s(a_load(), PROMPT, WORK_S)
    beside_s = prompt_s(decode_too, PROMPT, WORK_S)
    assert beside_s > 1.5 * alone_s
    coming = with_prompts("w", 1, decodes=10, context_tokens=5440, tpot_limit_s=limit_s)
    assert prompt_s(coming, PROMPT, WORK_S) == pytest.approx(alone_s + beside_s)


def test_while_sequences_are_on_their_way_a_prompt_may_take_longer_steps_than_beside_them():
    alone_s = prompt_s(a_load(), PROMPT, WORK_S)
    coming = a_load(decodes=3, context_tokens=1632, tpot_limit_s=0.06)
    beside = decoding("w", 3, tpot_limit_s=0.06)
    coming_s, beside_s = (prompt_s(load, PROMPT, WORK_S) for load in (coming, beside))
    assert 1.2 * alone_s < coming_s < beside_s / 2


def test_a_step_target_bounds_prompts_however_far_sequences_are_ahead():
    step = step_s(decoding("w", 10))
    bounded = decoding("w", 10, step_target_s=2 * step)
    assert prompt_s(bounded, PROMPT, WORK_S) == pytest.approx(2 * WORK_S, rel=0.1)


def test_until_an_answer_begins_its_worker_gets_no_further_with_prompts_than_its_sequences_allow():
    limited = {"decodes": 10, "decoding": 10, "context_tokens": 5440}
    slow = with_prompts("w", 1, **limited, tpot_limit_s=1.1 * step_s(decoding("w", 10)))
    free = with_prompts("w", 1, **limited)
    alone_s = step_s(decoding("w", 11))
    assert tpot_s(free, step_s(free), alone_s, OUTPUT, UNLOADED_S) == alone_s
    assert tpot_s(slow, step_s(slow), alone_s, OUTPUT, UNLOADED_S) > alone_s


def test_the_first_prompt_is_as_far_computed_as_it_would_be_alone_whatever_waits_behind_it():
    from_nothing = seat_prompts(a_load(), [PROMPT, PROMPT], UNLOADED_S / 2)
    assert from_nothing.prompt_tokens == pytest.approx(1.5 * PROMPT)


def test_what_is_cached_is_neither_computed_nor_attended_from():
    assert attended(1000, 1000) == 0
    assert attended(1000) == attended(400) + attended(1000, 400)


def test_the_answers_steps_grow_by_the_prompts_beside_it_up_to_what_its_limit_lets_them():
    beside = with_prompts("w", 1, decodes=3, decoding=3, context_tokens=1632)
    alone_s = step_s(decoding("w", 4))
    assert tpot_s(beside, step_s(beside), alone_s, OUTPUT) == pytest.approx(
        alone_s + (UNLOADED_S - MODEL.base_s) / OUTPUT
    )
    limited = with_prompts("w", 3, decodes=3, decoding=3, context_tokens=1632, tpot_limit_s=0.06)
    assert tpot_s(limited, step_s(limited), alone_s, OUTPUT) == pytest.approx(0.95 * 0.06)


# What is chosen


def test_the_first_request_goes_whole_to_an_idle_worker():
    first, second = pair_of(choose(wanted(10, 0.2), [a_load("w0"), a_load("w1")], fast))
    assert first == second


def test_answers_gather_on_one_worker_while_their_limits_allow_and_prompts_go_to_the_other_one():
    loads = [decoding("w0", 3, tpot_limit_s=0.2), a_load("w1")]
    decision = choose(wanted(10, 0.2), loads, fast)
    assert (pair_of(decision), decision.reason) == (("w1", "w0"), "within_limits")


def test_when_the_prompts_of_one_worker_take_too_long_the_worker_that_decodes_computes_some_too():
    loads = [decoding("w0", 3, tpot_limit_s=0.2), with_prompts("w1", 3)]
    assert pair_of(choose(wanted(3 * UNLOADED_S, 0.2), loads, fast)) == ("w0", "w0")


def test_when_the_steps_of_the_worker_that_decodes_are_as_long_as_they_may_be_the_other_one_decodes_too():
    full = decoding("w0", 70, tpot_limit_s=step_s(decoding("w0", 56)))
    decision = choose(wanted(10, 0.2), [full, a_load("w1")], fast)
    assert pair_of(decision) == ("w1", "w1")


def test_a_request_that_misses_its_limit_anyway_takes_nobody_else_along():
    loads = [decoding("w0", 29, tpot_limit_s=step_s(decoding("w0", 29)) * 0.78), decoding("w1", 3, tpot_limit_s=0.2)]
    decision = choose(wanted(0.1, 0.2), loads, fast)
    assert decision.reason == "fewest_broken"
    assert decision.chosen.decode_worker == "w1"
    assert decision.chosen.broken == 1


def test_a_worker_does_not_stand_idle_because_a_hand_over_would_wait():
    short = Wanted(PROMPT, 12, 9.0, 0.25)
    busy = with_prompts("w0", 2, decodes=4, decoding=2, context_tokens=2100, tpot_limit_s=0.25)
    assert choose(short, [busy, a_load("w1")], fast).chosen.prompt_worker == "w1"


def test_a_prompt_that_is_late_everywhere_goes_where_it_is_least_late():
    limit_s = 1.45 * step_s(decoding("w0", 6))
    shorter = decoding("w0", 6, tpot_limit_s=limit_s)
    longer = with_prompts("w1", 3, decodes=1, decoding=1, context_tokens=544, tpot_limit_s=limit_s)
    late = choose(wanted(1.3 * UNLOADED_S, limit_s), [shorter, longer], fast)
    assert (late.reason, late.chosen.prompt_worker) == ("fewest_broken", "w0")
    assert late.chosen.ttft_s < min(option.ttft_s for option in late.others if option.prompt_worker == "w1")


def test_the_time_that_a_request_has_waited_counts():
    loads = [with_prompts("w0", 2), with_prompts("w1", 1)]
    soon = choose(wanted(4 * UNLOADED_S, 0.2), loads, fast).chosen
    late = choose(wanted(4 * UNLOADED_S, 0.2, waited_s=3 * UNLOADED_S), loads, fast).chosen
    assert (soon.prompt_worker, soon.broken) == ("w1", 0)
    assert late.ttft_s >= soon.ttft_s + 2 * UNLOADED_S
    assert late.broken >= 1


def test_sequences_that_will_have_ended_before_the_answer_begins_do_not_count_against_it():
    load = decoding("w0", 40)
    alone_s = step_s(load)
    assert later(load, alone_s, 20 * alone_s, 40) == (20, load.context_tokens / 2)
    assert later(load, alone_s, 100 * alone_s, 40) == (0, 0)
    busy = decoding("w0", 40, tpot_limit_s=step_s(decoding("w0", 30)))
    at_once, after = (choose(wanted(30, 0.2), [busy, with_prompts("w1", prompts)], fast) for prompts in (0, 4))
    assert at_once.chosen.decode_worker == "w1"
    assert pair_of(after)[1] == "w0"


def test_a_prompt_waits_for_a_worker_only_if_that_is_worth_as_long_a_wait_of_those_behind_it():
    """With a short answer all options lose about the same. Behind one prompt it takes 2.1 s, 2.0 of them to the first
    token; beside two answers 3.3 s, with what it adds to them, and beside eight more than both together."""
    short = Wanted(PROMPT, 4, 20 * UNLOADED_S, 0.15)
    behind = with_prompts("w0", 1)
    full = with_prompts("w0", 1, takes_prompt=False)
    few, many = (decoding("w1", number, tpot_limit_s=0.15) for number in (2, 8))
    chosen = [choose(short, loads, fast).chosen for loads in ([behind, few], [full, few], [full, many])]
    assert [(option.prompt_worker, option.waits) for option in chosen] == [("w0", False), ("w1", False), ("w0", True)]


@pytest.mark.parametrize(("part", "crowded"), [(1.05, 2.0), (1.1, 2.0), (1.225, 1.0), (1.35, 0.0), (2.0, 0.0)])
def test_a_prompt_beside_sequences_with_hardly_any_time_to_spare_is_likely_to_make_half_of_them_late(part, crowded):
    limit_s = part * step_s(decoding("w", 4)) / TPOT_LIMIT_USED
    decision = choose(wanted(tpot_s=10 * limit_s), [decoding("w0", 4, tpot_limit_s=limit_s)], fast)
    others_s = step_s(decoding("w0", 5)) / limit_s
    assert decision.chosen.broken == pytest.approx(crowded + (2.0 if others_s > 1.2 else 0.0))


def test_a_prompt_of_which_nearly_all_is_cached_crowds_nobody():
    limit_s = step_s(decoding("w", 4)) / TPOT_LIMIT_USED
    [option] = [choose(wanted(), [decoding("w0", 4, tpot_limit_s=limit_s, cached_tokens=PROMPT - 1)], fast).chosen]
    [bare] = [choose(wanted(), [decoding("w0", 4, tpot_limit_s=limit_s)], fast).chosen]
    assert bare.broken - option.broken > 1.9


def test_a_prompt_keeps_away_from_such_sequences_if_it_is_in_time_elsewhere():
    limit_s = 1.2 * step_s(decoding("w0", 4)) / TPOT_LIMIT_USED
    workers = [decoding("w0", 4, tpot_limit_s=limit_s), with_prompts("w1", 3)]
    assert choose(wanted(20 * UNLOADED_S, limit_s), workers, fast).chosen.prompt_worker == "w1"


def test_a_sequence_whose_kv_arrives_beside_prompts_waits_for_a_longer_step():
    alone, beside = decoding("w0", 3), with_prompts("w0", 3, decodes=3, decoding=3, context_tokens=1632)
    assert joined_step_s(alone, step_s(alone), 0.2) == step_s(alone)
    assert joined_step_s(beside, step_s(beside), 0.2) == pytest.approx(2 * 0.95 * 0.2)
    assert joined_step_s(beside, step_s(beside), math.inf) == pytest.approx(step_s(beside) + beside.prompts_s)


def test_without_limits_the_least_latency_counts_that_of_others_included():
    loads = [decoding("w0", 8), a_load("w1")]
    decision = choose(wanted(), loads, fast)
    assert (decision.chosen.prompt_worker, decision.reason) == ("w1", "least_latency")


@pytest.mark.parametrize(("prompt_load", "decodes_on"), [(0.0, "w0"), (0.8, "w1")])
def test_without_limits_an_answer_joins_others_where_prompts_to_come_would_be_computed_beside_it(
    prompt_load, decodes_on
):
    loads = [a_load("w0"), decoding("w1", 3)]
    decision = choose(wanted(prompt_load=prompt_load), loads, fast)
    assert pair_of(decision) == ("w0", decodes_on)
    assert decision.costs == tuple(sorted(decision.costs))


def test_without_limits_an_answer_that_must_stay_with_its_prompt_goes_where_there_are_the_fewest():
    loads = [a_load("w0"), decoding("w1", 3)]
    assert pair_of(choose(wanted(prompt_load=0.8, may_split=False), loads, fast)) == ("w0", "w0")


def test_without_limits_prompts_to_come_count_nowhere_if_workers_have_as_many_answers_or_favour_phases():
    for loads in (
        [a_load("w0"), a_load("w1")],
        [a_load("w0", favours="prefill"), decoding("w1", 3, favours="decode")],
    ):
        without, with_load = (choose(wanted(prompt_load=load), loads, fast) for load in (0.0, 0.8))
        assert without.costs == with_load.costs


def test_without_limits_a_prompt_that_waits_in_the_router_counts_for_those_behind_it():
    full, busy = with_prompts("w0", 1, takes_prompt=False), decoding("w1", 1)
    waits, beside = (choose(wanted(), loads, fast) for loads in ([full, busy], [with_prompts("w0", 1), busy]))
    assert beside.chosen.prompt_worker == "w0"
    assert waits.chosen.prompt_worker == "w1"


def test_a_worker_that_has_most_of_the_prompt_computes_it():
    loads = [with_prompts("w0", 1), with_prompts("w1", 1, cached_tokens=480)]
    assert choose(wanted(10, 0.2), loads, fast).chosen.prompt_worker == "w1"


@pytest.mark.parametrize("may_split", [False, True])
@pytest.mark.parametrize(("cached", "chosen"), [(3_984, "full"), (1_000, "idle")])
def test_a_prompt_waits_beside_an_idle_worker_only_for_one_that_has_most_of_it(may_split, cached, chosen):
    full = a_load("full", cached_tokens=cached, takes_prompt=False, prompt_tokens=200, prompts_s=0.3)
    asked = Wanted(4_000, 16, may_split=may_split)
    decision = choose(asked, [full, a_load("idle")], slow)
    assert decision.chosen.prompt_worker == chosen


def test_a_worker_without_room_gets_no_sequence_unless_none_has_room():
    full, free = a_load("w0", room=False), decoding("w1", 20)
    assert choose(wanted(10, 0.5), [full, free], fast).chosen.decode_worker == "w1"
    assert choose(wanted(10, 0.5), [full], fast).chosen.decode_worker == "w0"
    assert choose(wanted(10, 0.5), [], fast) is None


def test_a_prompt_that_is_too_short_to_be_handed_over_goes_whole_to_one_worker():
    loads = [decoding("w0", 3, tpot_limit_s=0.2), a_load("w1")]
    assert choose(wanted(10, 0.2), loads, fast).chosen.splits
    decision = choose(wanted(10, 0.2, may_split=False), loads, fast)
    assert not decision.chosen.splits
    assert not any(option.splits for option in decision.others)


def test_a_decision_names_what_else_there_was():
    decision = choose(wanted(10, 0.2), [a_load("w0"), a_load("w1"), a_load("w2")], fast)
    assert decision.others
    assert decision.chosen not in decision.others
    assert all(one.broken >= decision.chosen.broken for one in decision.others)


def test_a_decision_among_32_workers_takes_little_time():
    loads = [decoding(f"w{index}", index * 4, tpot_limit_s=0.2) for index in range(32)]
    times_s = []
    for _ in range(200):
        began_s = time.perf_counter()
        choose(wanted(6, 0.2), loads, fast)
        times_s.append(time.perf_counter() - began_s)
    assert min(times_s) < 0.002


# Workers that favour a phase


def favouring(name, phase, sequences=0, **values):
    return decoding(name, sequences, favours=phase, **values)


LIMITS = {"ttft_s": 5 * UNLOADED_S, "tpot_s": 0.1}


def test_prompts_go_to_workers_that_favour_prefill_and_answers_to_the_others():
    loads = [favouring("p", "prefill"), favouring("d", "decode", 3)]
    assert pair_of(choose(wanted(**LIMITS), loads, fast)) == ("p", "d")
    assert pair_of(choose(wanted(), loads, fast)) == ("p", "d"), "without limits too"


def test_answers_are_spread_over_workers_that_favour_decode():
    loads = [favouring("p", "prefill"), favouring("d0", "decode", 4), favouring("d1", "decode", 1)]
    assert pair_of(choose(wanted(**LIMITS), loads, fast)) == ("p", "d1")


def test_a_worker_is_used_against_its_favour_only_to_keep_a_limit():
    behind = with_prompts("p", 6, favours="prefill")
    idle = favouring("d", "decode", 1)
    decision = choose(wanted(5 * UNLOADED_S, 4.0), [behind, idle], fast)
    assert pair_of(decision) == ("d", "d")
    assert decision.chosen.against == 1
    assert pair_of(choose(wanted(9 * UNLOADED_S, 4.0), [behind, idle], fast)) == ("p", "d")


def test_without_limits_a_worker_is_used_against_its_favour_where_that_halves_the_latency():
    idle = favouring("d", "decode", 1)
    assert pair_of(choose(wanted(), [with_prompts("p", 1, favours="prefill"), idle], fast)) == ("p", "d")
    assert pair_of(choose(wanted(), [with_prompts("p", 20, favours="prefill"), idle], fast)) == ("d", "d")


def test_a_request_that_may_not_be_split_pays_for_no_favour():
    idle, busy = favouring("p", "prefill"), favouring("d", "decode", 3)
    decision = choose(wanted(**LIMITS, may_split=False), [idle, busy], fast)
    assert decision.chosen.against == 0
