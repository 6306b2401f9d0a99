"""The checked figures of decode floors, batching, KV and transfer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.roofline import analysis
from ridgeline.roofline.analysis import roofline_table
from ridgeline.roofline.cost import StepCostModel
from ridgeline.roofline.hardware import Hardware, hardware_by_name
from ridgeline.roofline.model_shape import load_model_shape

H100 = hardware_by_name("h100-sxm")
A100_ROUNDED = Hardware("A100 at 2.0 TB/s", 312e12, 2.0e12, "the rounded figures most texts use")


@pytest.mark.parametrize(
    ("params", "hardware", "floor_ms", "tokens_per_s"),
    [(7e9, H100, 4.18, 239), (70e9, H100, 41.8, 23.9), (13e9, A100_ROUNDED, 13.0, 76.9)],
)
def test_decode_floors_match_the_checked_table(params, hardware, floor_ms, tokens_per_s):
    floor_s = analysis.decode_floor_s(params, 2, hardware)
    assert floor_s * 1e3 == pytest.approx(floor_ms, rel=2e-3)
    assert 1 / floor_s == pytest.approx(tokens_per_s, rel=2e-3)


def test_the_weights_only_ridge_batch_is_the_ridge_for_two_byte_weights():
    assert analysis.ridge_batch(A100_ROUNDED, 2) == pytest.approx(156)
    assert analysis.ridge_batch(H100, 2) == pytest.approx(295, abs=0.5)
    assert analysis.ridge_batch(H100, 1) == pytest.approx(147.6, abs=0.1)


def test_llama_2_13b_kv_fits_as_checked():
    kv_bytes = load_model_shape("llama-2-13b").kv_bytes_per_token
    assert 2048 * kv_bytes == pytest.approx(1.68e9, rel=2e-3)
    assert analysis.sequences_that_fit(54e9, 2048 * kv_bytes) == 32
    assert 300 * kv_bytes == pytest.approx(245.8e6, rel=1e-3)
    assert analysis.sequences_that_fit(54e9, 300 * kv_bytes) == 219


@pytest.mark.parametrize(
    ("name", "gb_per_s_by_prompt"),
    [
        ("llama-3.1-70b", (1.16, 1.10, 0.90)),
        ("llama-3.1-8b", (4.5, 4.0, 2.9)),
        ("qwen3-0.6b", (50.8, 31.2, 12.2)),
        ("qwen3-8b", (5.0, 4.5, 3.1)),
        ("qwen3-32b", (2.0, 1.8, 1.3)),
        ("llama-3.1-405b", (0.31, 0.30, 0.27)),
        ("qwen3-30b-a3b", (7.8, 5.6, 2.7)),
        ("qwen3-235b-a22b", (2.1, 1.8, 1.0)),
        ("gpt-oss-120b", (2.05, 1.79, 1.31)),
        ("deepseek-v3", (0.46, 0.38, 0.23)),
        ("kimi-k2", (0.55, 0.49, 0.34)),
    ],
)
def test_links_that_hide_the_transfer_behind_prefill_match_the_checked_table(name, gb_per_s_by_prompt):
    shape = load_model_shape(name)
    for prompt_tokens, gb_per_s in zip((2048, 8192, 32_768), gb_per_s_by_prompt, strict=True):
        prefill_s = StepCostModel(shape).prefill(prompt_tokens).flops / (0.5 * H100.peak_flops)
        assert shape.kv_bytes(prompt_tokens) / prefill_s / 1e9 == pytest.approx(gb_per_s, rel=0.035)


@pytest.mark.parametrize(("name", "gflops"), [("llama-3.1-8b", 16.1), ("qwen3-32b", 71.0), ("llama-3.1-70b", 147.6)])
def test_prefill_flops_per_token_at_8k_match_the_checked_table(name, gflops):
    cost = StepCostModel(load_model_shape(name)).prefill(8192)
    assert cost.flops / 8192 / 1e9 == pytest.approx(gflops, rel=5e-3)


def test_a_cached_prefix_shortens_prefill():
    model = StepCostModel(load_model_shape("llama-3.1-8b"))
    whole, half = (analysis.step_floor_s(model.prefill(8192, cached), H100) for cached in (0, 4096))
    assert whole / 2 < half < whole


def test_the_table_shows_prefill_crossing_the_ridge_and_decode_staying_below_it():
    rows = roofline_table(load_model_shape("llama-3.1-8b"), H100)
    by_size = {(row.phase, row.new_tokens): row for row in rows}
    assert by_size["prefill", 128].bound == "memory"
    assert by_size["prefill", 2048].bound == "compute"
    assert {row.bound for row in rows if row.phase == "decode"} == {"memory"}
    assert by_size["decode", 1].fits is True
    assert by_size["decode", 512].fits is False


@given(batch=st.integers(1, 64), context=st.integers(1, 4096))
def test_table_rows_agree_with_themselves(batch, context):
    shape = load_model_shape("smollm2-135m")
    (row,) = roofline_table(shape, H100, prefill_tokens=(), decode_batches=(batch,), decode_context_tokens=context)
    assert row.arithmetic_intensity == pytest.approx(row.flops / row.bytes)
    assert row.tokens_per_s * row.floor_ms == pytest.approx(1e3 * row.new_tokens)
    assert (row.bound == "compute") == (row.arithmetic_intensity >= H100.ridge)


@pytest.mark.parametrize(
    ("acceptance", "drafted", "tokens"), [(0.8, 4, 3.3616), (0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 0, 1.0)]
)
def test_a_step_makes_one_token_and_the_drafted_ones_up_to_the_first_that_is_rejected(acceptance, drafted, tokens):
    assert analysis.tokens_per_step(acceptance, drafted) == pytest.approx(tokens)


def test_drafts_multiply_the_intensity_of_a_small_batch_and_the_rate_by_what_is_accepted():
    shape = load_model_shape("llama-3.1-8b")
    sizes = {"prefill_tokens": (), "decode_batches": (1,), "decode_context_tokens": 2048}
    (plain,) = roofline_table(shape, H100, **sizes)
    (drafts,) = roofline_table(shape, H100, **sizes, drafted_tokens=4, acceptance=0.8)
    assert (plain.new_tokens, drafts.new_tokens) == (1, 5)
    assert drafts.arithmetic_intensity == pytest.approx(5 * plain.arithmetic_intensity, rel=0.01)
    assert drafts.bytes == pytest.approx(plain.bytes, rel=0.01)
    assert drafts.tokens_per_s == pytest.approx(3.3616 * plain.tokens_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("prompt_tokens", "batch", "context_tokens", "took_ms"),
    [
        (0, 1, 128, 6.8),
        (0, 8, 128, 7.2),
        (0, 32, 128, 7.9),
        (0, 256, 128, 16.3),
        (2048, 0, 0, 62.8),
        (7168, 0, 0, 196.9),
    ],
)
def test_steps_of_a_data_sheet_are_the_floor_of_what_an_h100_took(prompt_tokens, batch, context_tokens, took_ms):
    shape = load_model_shape("llama-3.1-8b")
    steps = analysis.datasheet_steps(shape, H100, 1, 450e9)
    step_s = steps.step_s(prompt_tokens, batch, batch * context_tokens, prompt_tokens**2 / 2)
    cost = StepCostModel(shape).step([(prompt_tokens, 0)] * (prompt_tokens > 0) + [(1, context_tokens)] * batch, batch)
    assert step_s == pytest.approx(analysis.step_floor_s(cost, H100), rel=0.1)
    assert 1.0 < took_ms / 1e3 / step_s < 3.0


@pytest.mark.parametrize(
    ("device", "link_gb_per_s", "prompts_ms", "batches_ms"),
    [
        ("a100-sxm", 300, {128: 81, 512: 197, 2048: 688, 8192: 2990}, {1: 54.9, 2: 59.9, 8: 61.7, 32: 72.2}),
        ("h100-sxm", 450, {128: 48, 512: 84, 2048: 310, 8192: 1340}, {1: 37.0, 2: 37.4, 8: 40.4, 32: 52.3}),
    ],
)
def test_published_steps_of_a_70b_over_two_gpus_are_one_to_three_times_those_of_the_data_sheet(
    device, link_gb_per_s, prompts_ms, batches_ms
):
    """Llama 2 70B, medians of five: data/perf_model.csv of Mutinifni/splitwise-sim at 37808801 (Splitwise, ISCA 2024).

    One prompt of so many tokens; a step of so many sequences of 512 to 640 tokens.
    """
    steps = analysis.datasheet_steps(load_model_shape("llama-2-70b"), hardware_by_name(device), 2, link_gb_per_s * 1e9)
    ratios = [ms / 1e3 / steps.step_s(tokens, 0, 0, tokens**2 / 2) for tokens, ms in prompts_ms.items()]
    ratios += [ms / 1e3 / steps.step_s(0, batch, batch * 576, 0) for batch, ms in batches_ms.items()]
    assert 1.0 < min(ratios) <= max(ratios) < 3.0


def test_more_devices_take_less_by_a_data_sheet_but_not_as_many_times_less():
    shape = load_model_shape("llama-3.1-8b")
    one, four = (analysis.datasheet_steps(shape, H100, devices, 450e9) for devices in (1, 4))
    for load in ((0, 8, 8 * 512, 0), (2048, 0, 0, 2048**2 / 2)):
        assert one.step_s(*load) / 4 < four.step_s(*load) < one.step_s(*load)
