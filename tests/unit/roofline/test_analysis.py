"""The checked figures of decode floors, batching, KV, transfer, balance, speculation and efficiency."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline import analysis
from roofline.cost import StepCost, StepCostModel
from roofline.hardware import Hardware, hardware_by_name
from roofline.model_shape import load_model_shape
from roofline.table import roofline_table

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


def test_a_mixture_with_49b_of_1600b_active_reads_3_06_percent_of_its_weights_per_token():
    active_s, all_s = (analysis.decode_floor_s(params, 2, H100) for params in (49e9, 1600e9))
    assert active_s / all_s == pytest.approx(0.0306, abs=5e-5)


def test_compute_alone_of_a_13b_token_on_a100_is_83_microseconds():
    assert 2 * 13e9 / A100_ROUNDED.peak_flops * 1e6 == pytest.approx(83, rel=5e-3)


@pytest.mark.parametrize(
    ("batch", "tokens_per_s"),
    # Sources print about 11,800 at 156 and 12,100 at 300; the simple roofline is flat at 12,000.
    [(1, 76.9), (10, 769), (50, 3846), (100, 7692), (156, 12_000), (300, 12_000), (1000, 12_000)],
)
def test_batched_decode_of_llama_2_13b_on_a100_rises_to_12000_and_stays_there(batch, tokens_per_s):
    assert analysis.decode_tokens_per_s(batch, 13e9, 2, A100_ROUNDED) == pytest.approx(tokens_per_s, rel=1e-3)


def test_the_weights_only_ridge_batch_is_the_ridge_for_two_byte_weights():
    assert analysis.ridge_batch(A100_ROUNDED, 2) == pytest.approx(156)
    assert analysis.ridge_batch(H100, 2) == pytest.approx(295, abs=0.5)
    assert analysis.ridge_batch(H100, 1) == pytest.approx(147.6, abs=0.1)


def test_llama_2_13b_kv_fits_as_checked():
    kv_bytes = load_model_shape("llama-2-13b").kv_bytes_per_token
    assert 2048 * kv_bytes == pytest.approx(1.68e9, rel=2e-3)
    assert analysis.sequences_that_fit(54e9, 2048, kv_bytes) == 32
    assert 300 * kv_bytes == pytest.approx(245.8e6, rel=1e-3)
    assert analysis.sequences_that_fit(54e9, 300, kv_bytes) == 219


def test_llama_70b_kv_is_2_68_gb_at_8k_and_335_gb_for_eight_at_128k():
    kv_bytes = load_model_shape("llama-3.1-70b").kv_bytes_per_token
    assert 8192 * kv_bytes == pytest.approx(2.68e9, rel=2e-3)  # one source prints 26.8 GB
    assert 128_000 * 8 * kv_bytes == pytest.approx(335.5e9, rel=1e-3)  # and 3.3 TB


def test_prefix_sharing_of_64_requests_saves_63_prefills():
    assert analysis.shared_prefix_saved_tokens(64, 2_000) == 126_000
    assert analysis.shared_prefix_saved_tokens(0, 2_000) == 0


def test_speculative_decoding_expects_3_36_tokens_and_a_speed_up_of_2_8():
    assert analysis.speculative_tokens_per_pass(0.8, 4) == pytest.approx(3.36, abs=2e-3)  # not 3.77
    assert analysis.speculative_speedup(0.8, 4, draft_cost=0.2) == pytest.approx(2.8, abs=2e-3)
    assert analysis.speculative_tokens_per_pass(1.0, 4) == 5.0
    assert analysis.speculative_tokens_per_pass(0.0, 4) == 1.0


def test_a_speculative_sum_that_runs_to_k_gives_the_wrong_3_77():
    wrong = sum((k + 1) * 0.8**k * 0.2 for k in range(5)) + 5 * 0.8**4
    assert wrong == pytest.approx(3.77, abs=5e-3)
    assert analysis.speculative_tokens_per_pass(0.8, 4) < wrong - 0.4


def test_speculation_at_a_fifth_of_a_pass_per_drafted_token_stops_paying_below_one_half():
    assert analysis.speculative_speedup(0.5, 4, draft_cost=4 * 0.2) > 1.0
    assert analysis.speculative_speedup(0.45, 4, draft_cost=4 * 0.2) < 1.0


@given(acceptance=st.floats(0.0, 0.999), drafted=st.integers(1, 16))
def test_the_closed_form_of_speculation_equals_the_expectation(acceptance, drafted):
    expectation = sum((k + 1) * acceptance**k * (1 - acceptance) for k in range(drafted))
    expectation += (drafted + 1) * acceptance**drafted
    assert analysis.speculative_tokens_per_pass(acceptance, drafted) == pytest.approx(expectation)


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
        ("gpt-oss-120b", (3.8, 3.2, 2.0)),
        ("deepseek-v3", (0.46, 0.38, 0.23)),
        ("kimi-k2", (0.55, 0.49, 0.34)),
    ],
)
def test_links_that_hide_the_transfer_behind_prefill_match_the_checked_table(name, gb_per_s_by_prompt):
    shape = load_model_shape(name)
    for prompt_tokens, gb_per_s in zip((2048, 8192, 32_768), gb_per_s_by_prompt, strict=True):
        rate = analysis.prefill_tokens_per_s(shape, H100, prompt_tokens, mfu=0.5)
        assert analysis.kv_link_bytes_per_s(shape.kv_bytes_per_token, rate) / 1e9 == pytest.approx(gb_per_s, rel=0.035)


@pytest.mark.parametrize(("name", "gflops"), [("llama-3.1-8b", 16.1), ("qwen3-32b", 71.0), ("llama-3.1-70b", 147.6)])
def test_prefill_flops_per_token_at_8k_match_the_checked_table(name, gflops):
    cost = StepCostModel(load_model_shape(name)).prefill(8192)
    assert cost.flops / 8192 / 1e9 == pytest.approx(gflops, rel=5e-3)


def test_only_the_last_layer_of_a_layerwise_transfer_is_exposed():
    assert analysis.exposed_transfer_s(2.68e9, 80, 50e9, latency_s=0.001) == pytest.approx(0.00167)


def test_pool_balance_is_uncached_prompt_time_against_decode_time():
    balance = analysis.pool_balance(1e15, 0.5, H100, output_tokens=200, decode_step_s=0.02, decode_batch=16)
    assert balance.prefill_s == pytest.approx(1e15 / (0.5 * 989e12))
    assert balance.decode_s == pytest.approx(0.25)
    assert balance.prefill_per_decode == pytest.approx(balance.prefill_s / 0.25)
    assert balance.prefill_share == pytest.approx(balance.prefill_per_decode / (1 + balance.prefill_per_decode))


def test_a_step_that_takes_exactly_its_floor_has_full_utilisation_of_the_limit_that_binds():
    model = StepCostModel(load_model_shape("llama-3.1-8b"))
    prefill, decode = model.prefill(4096), model.decode(8, 1024)
    assert analysis.mfu(prefill.flops, analysis.step_floor_s(prefill, H100), H100) == pytest.approx(1.0)
    assert analysis.mbu(decode.bytes, analysis.step_floor_s(decode, H100), H100) == pytest.approx(1.0)
    assert analysis.bound(prefill.arithmetic_intensity, H100) == "compute"
    assert analysis.bound(decode.arithmetic_intensity, H100) == "memory"


def test_a_cached_prefix_shortens_prefill():
    shape = load_model_shape("llama-3.1-8b")
    whole, half = (analysis.prefill_floor_s(shape, H100, 8192, cached) for cached in (0, 4096))
    assert whole / 2 < half < whole


def test_kv_share_counts_what_batching_does_not_amortise():
    assert analysis.kv_share_of_bytes(StepCost(1.0, 75.0, 20.0, 5.0)) == 0.25


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
