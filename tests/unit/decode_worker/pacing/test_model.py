"""A step's time as fitted to steps made up from a known machine."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import msgspec
import pytest

from ridgeline.contracts.workers import MIN_FITTED_STEPS, StepModel
from ridgeline.decode_worker.pacing.bound import Prompt, most_prefill_tokens
from ridgeline.decode_worker.pacing.model import KNOWN, StepClock, StepFit, StepLoad

TRUE = StepModel(
    base_s=0.04,
    per_prefill_token_s=0.0035,
    per_sequence_s=0.002,
    per_context_token_s=2e-6,
    per_attended_token_s=1.5e-6,
)
NOISE = 0.03


def any_load(draw: random.Random) -> StepLoad:
    sequences = draw.choice([0, 1, 2, 4, 8, 16])
    prefill_tokens = draw.choice([0, 0, 16, 40, 100, 256, 512]) or (0 if sequences else 64)
    context_tokens = sequences * draw.randrange(100, 2000)
    return StepLoad(prefill_tokens, sequences, context_tokens, prefill_tokens * draw.randrange(0, 1500))


def line(load: StepLoad, model: StepModel = TRUE) -> float:
    return model.step_s(load.prefill_tokens, load.decode_tokens, load.context_tokens, load.attended)


def fitted(
    steps: int, took: Callable[[StepLoad], float], seed: int = 1, loads: Callable[[random.Random], StepLoad] = any_load
) -> StepFit:
    draw, fit = random.Random(seed), StepFit()
    for _ in range(steps):
        load = loads(draw)
        fit.observe(load, took(load) * draw.gauss(1.0, NOISE))
    return fit


def errors(fit: StepFit, took: Callable[[StepLoad], float], seed: int = 9) -> list[float]:
    draw = random.Random(seed)
    loads = [any_load(draw) for _ in range(200)]
    return sorted(abs(fit.predict_s(load) / took(load) - 1.0) for load in loads)


@pytest.mark.parametrize("seed", range(5))
def test_a_known_line_is_found_through_noise(seed: int):
    fit = fitted(600, line, seed)
    off = errors(fit, line)
    assert off[100] < 0.02, off[::20]
    assert off[190] < 0.05, off[::20]
    assert fit.model.per_prefill_token_s == pytest.approx(TRUE.per_prefill_token_s, rel=0.1)
    assert fit.model.base_s == pytest.approx(TRUE.base_s, rel=0.15)


def test_the_error_is_that_of_predictions_made_before_the_step_was_known():
    fit = fitted(600, line)
    assert 0.01 < fit.model.error < 0.04  # the median of a normal distribution of 0.03 is 0.02
    assert fit.model.steps == 600


def staircase(load: StepLoad) -> float:
    """CUDA graphs: a step is padded to a power of two."""
    tokens = load.prefill_tokens + load.decode_tokens
    return 0.008 + 0.00004 * (1 << (tokens - 1).bit_length())


def test_a_staircase_is_followed_by_the_corrections():
    fit = fitted(800, staircase)
    off = errors(fit, staircase)
    assert off[100] < 0.05, off[::20]
    assert off[180] < 0.12, off[::20]


@pytest.mark.parametrize("seed", range(20))
def test_no_prediction_is_ever_negative(seed: int):
    draw, fit = random.Random(seed), StepFit()
    for _ in range(draw.randrange(1, 100)):
        fit.observe(any_load(draw), 10 ** draw.uniform(-4, 1))  # a machine without any rule
        far = StepLoad(draw.randrange(10**5), draw.randrange(10**3), draw.randrange(10**7), 10.0 ** draw.randrange(12))
        assert fit.predict_s(far) >= 0.0
        assert min(fit.model.base_s, fit.model.per_prefill_token_s, fit.model.per_attended_token_s) >= 0.0


def test_a_machine_that_becomes_twice_as_slow_is_followed():
    fit, draw = fitted(400, line), random.Random(3)
    for _ in range(400):
        load = any_load(draw)
        fit.observe(load, 2.2 * line(load) * draw.gauss(1.0, NOISE))
    off = errors(fit, lambda load: 2.2 * line(load))
    assert off[100] < 0.05, off[::20]


def test_one_step_in_twenty_that_the_system_disturbs_changes_little():
    disturbed, draw = StepFit(), random.Random(5)
    for step in range(800):
        load = any_load(draw)
        disturbed.observe(load, line(load) * draw.gauss(1.0, NOISE) * (draw.uniform(2.5, 20) if step % 20 == 7 else 1))
    off = errors(disturbed, line)
    assert off[100] < 0.03, off[::20]
    assert off[190] < 0.07, off[::20]


def test_hours_of_decode_do_not_make_it_forget_what_a_prompt_costs():
    fit, draw = fitted(400, line), random.Random(6)
    for _ in range(5000):
        sequences = draw.randrange(1, 9)
        load = StepLoad(0, sequences, 500 * sequences, 0.0)
        fit.observe(load, line(load) * draw.gauss(1.0, NOISE))
    prompt = StepLoad(300, 4, 2000, 300 * 150.0)
    assert fit.predict_s(prompt) == pytest.approx(line(prompt), rel=0.05)


def test_without_any_prompt_a_prompt_is_not_taken_to_be_free():
    fit = fitted(100, line, loads=lambda draw: StepLoad(0, draw.randrange(1, 9), draw.randrange(100, 9000), 0.0))
    assert fit.model.per_prefill_token_s > 0.0005
    assert fit.longest_prefill_tokens == 0


def test_a_size_that_was_never_seen_is_learned_however_far_from_the_prediction():
    fit = fitted(200, line, loads=lambda draw: StepLoad(0, draw.randrange(1, 9), draw.randrange(100, 9000), 0.0))
    prompt = StepLoad(512, 2, 1000, 512 * 256.0)
    draw = random.Random(4)
    for _ in range(10):
        fit.observe(prompt, line(prompt))
        decode = StepLoad(0, 4, 2000, 0.0)
        fit.observe(decode, line(decode) * draw.gauss(1.0, NOISE))
    assert fit.predict_s(prompt) == pytest.approx(line(prompt), rel=0.1)


@pytest.mark.parametrize("pause_s", [0.0, 1.0, 30.0])
def test_a_pause_in_the_first_step_of_each_size_does_not_keep_chunks_short(pause_s: float):
    fit, met, chunk = StepFit(), set(), 16
    for _ in range(200):
        for load in (StepLoad(0, 4, 2000, 0.0), StepLoad(chunk, 4, 2000, chunk * chunk / 2)):
            fit.observe(load, line(load) + (0.0 if load.bucket in met else pause_s))
            met.add(load.bucket)
        if fit.known:
            fits = most_prefill_tokens(fit.model, 1.5, 4, 2000, [Prompt(0, 2048)])
            chunk = min(2 * fit.longest_prefill_tokens, fits)
    assert chunk == pytest.approx(382, rel=0.1), "what fits 1.5 s"


def test_a_model_is_known_after_its_first_steps():
    fit = StepFit()
    assert not fit.known
    assert fit.predict_s(StepLoad(0, 1, 100, 0.0)) == 0.0
    for step in range(MIN_FITTED_STEPS):
        assert not fit.known, step
        fit.observe(StepLoad(0, 1, 100, 0.0), 0.05)
    assert fit.known
    assert fit.predict_s(StepLoad(0, 1, 100, 0.0)) == pytest.approx(0.05)


def test_no_end_is_foretold_for_a_step_of_a_kind_a_size_or_a_context_that_was_hardly_met():
    fit = StepFit()
    decode, prompt = StepLoad(0, 4, 800, 0.0), StepLoad(300, 0, 0, 45_000.0)
    for step in range(MIN_FITTED_STEPS + KNOWN):
        assert (fit.foretell_s(decode) == math.inf) == (step < MIN_FITTED_STEPS), step
        fit.observe(decode, line(decode))
    assert fit.foretell_s(prompt) == math.inf, "its first prompt"
    assert fit.foretell_s(StepLoad(4, 0, 0, 8.0)) == math.inf, "of a known number of tokens too"
    assert fit.foretell_s(StepLoad(0, 8, 800, 0.0)) == math.inf, "more sequences than ever"
    assert fit.foretell_s(StepLoad(0, 4, 1601, 0.0)) == math.inf, "with more than twice the context"
    assert fit.foretell_s(StepLoad(0, 4, 1600, 0.0)) < 1.0
    for _ in range(2 * KNOWN):
        fit.observe(prompt, line(prompt))
    assert fit.foretell_s(prompt) == pytest.approx(line(prompt), rel=0.2)
    assert fit.foretell_s(StepLoad(512, 0, 0, 45_000.0)) == math.inf, "a longer chunk than ever"
    assert fit.foretell_s(StepLoad(300, 0, 0, 300 * 3000.0)) == math.inf, "behind a longer context than ever"


def test_to_foretell_a_step_costs_the_engine_no_more_than_a_step_itself():
    fit, draw = fitted(600, line), random.Random(2)
    loads = [any_load(draw) for _ in range(500)]
    began_s = time.process_time()
    for load in loads:
        fit.foretell_s(load)
    assert (time.process_time() - began_s) / len(loads) < 100e-6


def test_a_step_costs_the_engine_less_than_a_tenth_of_a_millisecond():
    draw = random.Random(2)
    steps = [(load := any_load(draw), line(load)) for _ in range(2000)]
    fit, costs_s = StepFit(), []
    for first in range(0, len(steps), 100):
        began_s = time.process_time()
        for load, took_s in steps[first : first + 100]:
            fit.observe(load, took_s)
        costs_s.append((time.process_time() - began_s) / 100)
    assert min(costs_s) < 100e-6, "all of them cost the same, and a busy machine makes some of them dearer"


@pytest.mark.parametrize("sequences", [0, 1, 3.5, 40])
@pytest.mark.parametrize("corrections", [(), (1.0, 0.9, 1.2), (1.0,) * 6 + (1.3,)])
def test_a_step_without_prompts_takes_what_one_with_no_prompt_tokens_takes(sequences, corrections):
    model = msgspec.structs.replace(TRUE, corrections=corrections)
    assert model.decode_s(sequences, 1000) == pytest.approx(model.step_s(0, sequences, 1000, 0))


def test_a_fit_to_prompts_alone_says_that_it_does_not_know_what_decoding_takes():
    def prompts(draw: random.Random) -> StepLoad:
        tokens = draw.choice([512, 512, 512, 300, 77])
        return StepLoad(tokens, 0, 0, tokens * tokens / 2)

    # Dearer than a line, so that the fit finds no base: such a model once said that a decode step takes no time.
    fit = fitted(120, lambda load: 0.005 + 0.0017 * load.prefill_tokens**1.15, loads=prompts)
    assert fit.model.decode_s(1, 100) < 0.001
    assert (fit.model.knows_prompts, fit.model.knows_decode) == (True, False)
    for _ in range(KNOWN):
        fit.observe(StepLoad(0, 1, 100, 0.0), 0.04)
    assert fit.model.is_whole
    assert fit.model.decode_s(1, 100) == pytest.approx(0.04, rel=0.1)


def test_a_fit_to_decoding_alone_says_that_it_only_guesses_what_prompts_take():
    fit = StepFit()
    for _ in range(MIN_FITTED_STEPS):
        fit.observe(StepLoad(0, 2, 200, 0.0), 0.04)
    assert (fit.model.knows_prompts, fit.model.knows_decode) == (False, True)


# --- from when to when a step lasts


ONE, TWO = StepLoad(0, 1, 10, 0.0), StepLoad(0, 2, 20, 0.0)


def test_a_step_after_a_pause_lasts_from_when_it_was_scheduled():
    clock = StepClock()
    clock.begin(5.0, ONE, 0.0)
    assert clock.end(5.25) == (ONE, 0.25)
    clock.then(more_to_run=False)
    clock.begin(9.0, TWO, 0.0)
    assert clock.end(9.5) == (TWO, 0.5)


def test_a_step_that_follows_another_lasts_from_output_to_output():
    clock = StepClock()
    clock.begin(5.0, ONE, 0.0)
    clock.end(5.25)
    clock.then(more_to_run=True)
    clock.begin(5.375, TWO, 0.0)  # the engine has sent outputs meanwhile: a stream waits for that as well
    assert clock.end(5.75) == (TWO, 0.5)


def test_of_two_steps_in_flight_no_time_counts_twice():
    clock = StepClock()
    clock.begin(1.0, ONE, 0.5)
    clock.begin(1.125, TWO, 0.25)
    assert clock.remaining_s(1.25) == pytest.approx(0.5)
    assert clock.end(1.5) == (ONE, 0.5)
    clock.then(more_to_run=False)
    assert clock.remaining_s(1.5) == pytest.approx(0.25)
    assert clock.end(1.75) == (TWO, 0.25)
    assert clock.remaining_s(2.0) == 0.0
    assert clock.end(2.0) is None
