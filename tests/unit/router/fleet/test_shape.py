"""What a fleet is expected to hold in each shape, and which shape is best."""

import math

import msgspec
import pytest

from ridgeline.contracts.workers import TPOT_LIMIT_USED, StepModel
from ridgeline.router.fleet.prediction import attended
from ridgeline.router.fleet.shape import Traffic, Workers, best_shape, held_per_s, mean_latency_s, needs_no_division

MODEL = StepModel(
    base_s=0.03,
    per_prefill_token_s=0.0014,
    per_sequence_s=0.003,
    per_context_token_s=0.0,
    per_attended_token_s=0.0,
    steps=100,
)
PROMPT_S = 0.03 + 512 * 0.0014
STEP_S = 0.033


def fleet(number):
    return Workers(MODEL, number, step_tokens=512, places=64, kv_tokens=1_000_000)


def traffic(ttft=math.inf, tpot=math.inf, prompt_tokens=512, output_tokens=64, computed_tokens=None):
    """Limits in unloaded prompts and steps."""
    tokens = prompt_tokens if computed_tokens is None else computed_tokens
    return Traffic(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        ttft_limit_s=ttft * PROMPT_S,
        tpot_limit_s=tpot * STEP_S,
        requests_per_s=1.0,
        computed_tokens=tokens,
        attended_tokens=attended(prompt_tokens),
    )


def test_workers_that_only_compute_prompts_hold_less_than_they_could_compute_and_more_the_longer_prompts_may_wait():
    held = [held_per_s(fleet(8), traffic(ttft, tpot=20), 4) for ttft in (1.5, 2, 5, 50)]
    assert held == sorted(held)
    assert 0.5 * 4 / PROMPT_S < held[0] < held[-1] < 4 / PROMPT_S


def test_a_ttft_limit_below_a_prompt_alone_holds_nothing_in_a_split():
    assert held_per_s(fleet(8), traffic(0.9, 4), 4) == 0.0


def test_a_tpot_limit_below_a_step_alone_holds_nothing_anywhere():
    assert [held_per_s(fleet(4), traffic(5, 0.9), shape) for shape in range(4)] == [0.0] * 4


def test_workers_that_only_decode_hold_as_many_sequences_as_steps_within_the_limit_allow():
    """A step of five sequences takes 0.045 s, and ten workers have 50 places."""
    held = held_per_s(fleet(20), traffic(math.inf, 0.045 / STEP_S, prompt_tokens=1), 10)
    assert 50 / (64 * 0.045) > held > 0.8 * 50 / (64 * 0.045)


def test_a_limit_that_leaves_hardly_room_for_two_sequences_holds_about_as_much_as_one_with_hardly_too_little():
    just, nearly = (
        held_per_s(fleet(2), traffic(math.inf, tpot / STEP_S, prompt_tokens=1), 1) for tpot in (0.0361, 0.0359)
    )
    assert nearly > 0.9 * just > 0.0


def test_the_two_phases_of_a_split_hold_what_the_narrower_one_holds():
    held = [held_per_s(fleet(8), traffic(5, 2), shape) for shape in range(1, 8)]
    best = max(range(7), key=held.__getitem__)
    assert held[: best + 1] == sorted(held[: best + 1]), "prompts are too slow up to there"
    assert held[best:] == sorted(held[best:], reverse=True), "and answers from there on"


@pytest.mark.parametrize(
    ("workers", "ttft", "tpot", "wanted"),
    [
        (8, 5, 1.3, 4),
        (8, 5, 1.7, 5),
        (8, 5, 2, 5),
        (2, 5, 1.3, 1),
        (2, 5, 2, 0),
        (2, 12, 2, 0),
        (2, 5, 4, 0),
        (2, 2, 4, 0),
    ],
)
def test_tight_limits_on_tpot_are_held_best_by_workers_that_only_decode_and_loose_ones_by_all(
    workers, ttft, tpot, wanted
):
    assert best_shape(fleet(workers), traffic(ttft, tpot)) == wanted


def test_two_workers_that_do_all_hold_more_than_a_division_where_steps_leave_time_for_prompts():
    for ttft in (5, 12):
        together, divided = (held_per_s(fleet(2), traffic(ttft, 2), shape) for shape in (0, 1))
        assert together > 1.02 * divided
        assert needs_no_division(fleet(2), traffic(ttft, 2), 1)
        assert not needs_no_division(fleet(2), traffic(ttft, 1.3), 1)
        assert not needs_no_division(fleet(8), traffic(ttft, 2), 5)


def test_prompts_beside_answers_do_not_count_where_they_would_be_late():
    """They take 1.4 s there and more."""
    late, in_time = (held_per_s(fleet(2), traffic(ttft, 2), 0) for ttft in (1.6, 12))
    whole = (1 - MODEL.base_s / (TPOT_LIMIT_USED * 2 * STEP_S)) * 2 / (512 * 0.0014 + 64 * 0.003)
    assert late == pytest.approx(whole)
    assert in_time > 1.1 * whole


@pytest.mark.parametrize("limits", [(), (5, 1.3)])
def test_one_worker_favours_no_phase(limits):
    assert best_shape(fleet(1), traffic(*limits)) == 0


SIMULATED_S = {
    (2, 512, 64, 0.92): (4.98, 4.29),
    (2, 512, 64, 1.45): (9.28, math.inf),
    (2, 1024, 24, 0.40): (2.96, 3.71),
    (2, 128, 128, 1.43): (7.29, 10.30),
    (4, 512, 64, 1.85): (4.24, 3.73),
    (8, 512, 64, 5.81): (6.93, 4.71),
    (8, 1024, 24, 3.19): (3.42, 2.79),
}
"""Mean latency if all do all, and in the best division: workers, tokens in and out, requests/s (simulated, `MODEL`)."""


@pytest.mark.parametrize("kind", SIMULATED_S, ids=str)
def test_the_mean_latency_is_about_what_is_simulated_in_either_shape(kind):
    workers, prompt_tokens, output_tokens, per_s = kind
    asked = msgspec.structs.replace(
        traffic(prompt_tokens=prompt_tokens, output_tokens=output_tokens), requests_per_s=per_s
    )
    together_s, *divided_s = (mean_latency_s(fleet(workers), asked, shape) for shape in range(workers))
    simulated_s = SIMULATED_S[kind]
    assert together_s == pytest.approx(simulated_s[0], rel=0.25)
    assert min(divided_s) == pytest.approx(simulated_s[1], rel=0.25)
    best = best_shape(fleet(workers), asked)
    assert (best > 0) == (simulated_s[1] < simulated_s[0])


def test_a_division_pays_for_its_hand_overs_and_a_fleet_that_is_not_divided_does_not():
    slow = msgspec.structs.replace(fleet(8), handover_s_per_token=1 / 512)
    divided, together = (mean_latency_s(slow, traffic(), shape) for shape in (4, 0))
    assert divided == pytest.approx(mean_latency_s(fleet(8), traffic(), 4) + 1.0)
    assert together == mean_latency_s(fleet(8), traffic(), 0)


@pytest.mark.parametrize("shape", [0, 4])
def test_a_model_that_corrects_all_steps_alike_takes_that_much_longer(shape):
    corrected = msgspec.structs.replace(MODEL, corrections=(1.5,) * 12)
    longer = msgspec.structs.replace(
        MODEL, base_s=1.5 * MODEL.base_s, per_prefill_token_s=1.5 * 0.0014, per_sequence_s=1.5 * 0.003
    )
    by_k, by_line = (
        mean_latency_s(msgspec.structs.replace(fleet(8), model=model), traffic(), shape)
        for model in (corrected, longer)
    )
    assert by_k == pytest.approx(by_line, rel=0.02)
    assert by_k > 1.4 * mean_latency_s(fleet(8), traffic(), shape)


def test_more_requests_than_a_fleet_can_serve_take_for_ever_and_divide_no_worker():
    flood = msgspec.structs.replace(traffic(), requests_per_s=1e3)
    assert [mean_latency_s(fleet(4), flood, shape) for shape in range(4)] == [math.inf] * 4
    assert best_shape(fleet(4), flood) == 0
    narrow = msgspec.structs.replace(fleet(4), places=1)
    busy = msgspec.structs.replace(traffic(), requests_per_s=2.0)
    assert math.isfinite(mean_latency_s(fleet(4), busy, 2))
    assert mean_latency_s(narrow, busy, 2) == math.inf, "one place, and more answers than that"


def test_prompts_that_caches_have_need_fewer_workers():
    shapes = [best_shape(fleet(8), traffic(8, 1.7, 2000, computed_tokens=tokens)) for tokens in (2000, 200)]
    assert shapes[0] > shapes[1] > 0


def test_no_more_sequences_decode_than_have_kv_blocks():
    narrow = msgspec.structs.replace(fleet(8), kv_tokens=3 * 544)
    assert held_per_s(narrow, traffic(50, 20), 7) < 0.5 * held_per_s(fleet(8), traffic(50, 20), 7)
    assert held_per_s(narrow, traffic(50, 20, prompt_tokens=4000), 4) == 0.0


@pytest.mark.parametrize("part", ["base_s", "per_prefill_token_s", "per_sequence_s"])
def test_a_fit_that_takes_something_for_free_is_no_error(part):
    free = msgspec.structs.replace(fleet(8), model=msgspec.structs.replace(MODEL, **{part: 0.0}))
    nothing = msgspec.structs.replace(fleet(8), model=StepModel(**dict.fromkeys(PARTS, 0.0)))
    for workers in (free, nothing):
        assert 0 <= best_shape(workers, traffic(5, 2)) < 8


PARTS = ("base_s", "per_prefill_token_s", "per_sequence_s", "per_context_token_s", "per_attended_token_s")


def test_stairs_of_steps_do_not_change_what_workers_hold_that_do_both():
    stairs = msgspec.structs.replace(fleet(8), model=msgspec.structs.replace(MODEL, corrections=(1.0, 0.5)))
    assert held_per_s(stairs, traffic(5, 2), 0) == held_per_s(fleet(8), traffic(5, 2), 0)
