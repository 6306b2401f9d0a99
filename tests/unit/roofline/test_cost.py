"""FLOPs and bytes of one step: a step worked out by hand, known intensities, and laws that hold for any batch."""

import dataclasses
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.roofline.cost import StepCost, StepCostModel
from ridgeline.roofline.model_shape import load_model_shape

SMOLLM2 = StepCostModel(load_model_shape("smollm2-135m"))
MODELS = {name: StepCostModel(load_model_shape(name)) for name in ("smollm2-135m", "mixtral-8x7b", "deepseek-v3")}
any_model = st.sampled_from(sorted(MODELS)).map(MODELS.__getitem__)
segments = st.lists(st.tuples(st.integers(1, 512), st.integers(0, 4096)), min_size=1, max_size=8)


def test_a_mixed_step_of_smollm2_equals_the_sum_done_by_hand():
    # Two decodes at 99 and 199 computed tokens, and a 16-token chunk after 32; the two decodes sample.
    cost = SMOLLM2.step([(1, 99), (1, 199), (16, 32)], sampled_tokens=2)
    layer_params = 576 * 64 * (9 + 3 + 3 + 9) + 3 * 576 * 1536
    assert layer_params == 3_538_944
    gemm = 2 * 18 * 30 * layer_params
    lm_head = 2 * 2 * 576 * 49_152
    pairs = 100 + 200 + (16 * 32 + 16 * 17 // 2)
    attention = 4 * 9 * 64 * 30 * pairs
    assert (gemm, lm_head, attention) == (3_822_059_520, 113_246_208, 65_525_760)
    assert cost == StepCost(
        flops=4_000_831_488,
        weight_bytes=2 * 134_515_008,
        kv_read_bytes=(100 + 200 + 48) * 23_040,
        kv_write_bytes=18 * 23_040,
    )
    assert cost.bytes == 277_462_656
    assert cost.arithmetic_intensity == pytest.approx(14.419, rel=1e-4)


def test_a_step_without_tokens_costs_nothing():
    assert SMOLLM2.step([], 0) == StepCost()
    assert StepCost().arithmetic_intensity == 0.0


def test_the_lm_head_is_read_only_when_a_token_is_sampled():
    chunk, last_chunk = SMOLLM2.step([(64, 0)], 0), SMOLLM2.step([(64, 0)], 1)
    assert last_chunk.weight_bytes - chunk.weight_bytes == 2 * 49_152 * 576
    assert last_chunk.flops - chunk.flops == 2 * 49_152 * 576


def test_an_untied_embedding_table_is_not_read_as_a_matrix():
    shape = load_model_shape("llama-3.1-8b")
    cost = StepCostModel(shape).decode(batch=1, context_tokens=1)
    assert cost.weight_bytes == shape.weight_bytes - 2 * 128_256 * 4096


def test_causal_prefill_attention_is_half_of_the_full_square():
    n = 8192
    linear = SMOLLM2.prefill(1).flops - 4 * 9 * 64 * 30
    attention = SMOLLM2.prefill(n).flops - (linear - 2 * 49_152 * 576) * n - 2 * 49_152 * 576
    assert attention == pytest.approx(4 * 9 * 64 * 30 * n * n / 2, rel=1e-3)


def test_decode_attention_intensity_is_the_group_size_for_gqa_and_near_the_ridge_for_mla():
    llama, deepseek = StepCostModel(load_model_shape("llama-3.1-70b")), MODELS["deepseek-v3"]

    def attention_intensity(model):
        near, far = model.decode(1, 1_000), model.decode(1, 2_000)
        return (far.flops - near.flops) / (far.kv_read_bytes - near.kv_read_bytes)

    assert attention_intensity(llama) == pytest.approx(8.0)
    assert attention_intensity(deepseek) == pytest.approx(242, rel=2e-3)


def test_mla_prefill_uses_plain_keys_and_short_drafts_can_use_latent_ones():
    plain = StepCostModel(load_model_shape("deepseek-v3")).step([(4, 1000)], 4)
    absorbed = StepCostModel(load_model_shape("deepseek-v3"), absorbed_max_new_tokens=4).step([(4, 1000)], 4)
    pairs = 4 * 1000 + 10
    assert absorbed.flops - plain.flops == pytest.approx(61 * 2 * 128 * pairs * (1088 - 320))


def test_a_mixture_reads_only_the_experts_its_tokens_hit():
    shape = load_model_shape("mixtral-8x7b")
    one, many = MODELS["mixtral-8x7b"].decode(1, 1), MODELS["mixtral-8x7b"].decode(256, 1)
    embedding_params = 32_000 * 4096
    assert one.weight_bytes == pytest.approx(2 * (shape.num_active_params - embedding_params))
    assert many.weight_bytes == pytest.approx(2 * (shape.num_params - embedding_params))


def test_one_token_of_a_mixture_reads_its_active_share_of_the_weights():
    kimi = load_model_shape("kimi-k2")
    read = StepCostModel(kimi).decode(1, 1).weight_bytes / kimi.weight_bytes
    assert read == pytest.approx((kimi.num_active_params - kimi.embedding_params) / kimi.num_params)


def test_tensor_parallel_ranks_beyond_the_kv_heads_replicate_kv():
    shape = load_model_shape("llama-3.1-8b")
    split, replicated = (StepCostModel(shape, tensor_parallel_size=t).decode(1, 100) for t in (8, 16))
    assert split == StepCostModel(shape).decode(1, 100)
    assert replicated.kv_read_bytes == 2 * split.kv_read_bytes
    mla = StepCostModel(load_model_shape("deepseek-v3"), tensor_parallel_size=8).decode(1, 100)
    assert mla.kv_read_bytes == 8 * MODELS["deepseek-v3"].decode(1, 100).kv_read_bytes


@given(prompt=st.integers(1, 4096), cut=st.integers(1, 4095), name=st.sampled_from(["smollm2-135m", "mixtral-8x7b"]))
def test_prefill_in_chunks_does_the_flops_of_one_shot_and_moves_at_least_its_bytes(prompt, cut, name):
    model, chunk = MODELS[name], min(cut, prompt)
    whole = model.prefill(prompt)
    starts = range(0, prompt, chunk)
    chunks = [(min(chunk, prompt - start), start) for start in starts]
    total = StepCost()
    for new, computed in chunks:
        total += model.step([(new, computed)], 1 if new + computed == prompt else 0)
    assert total.flops == pytest.approx(whole.flops)
    assert total.kv_write_bytes == whole.kv_write_bytes
    assert total.kv_read_bytes >= whole.kv_read_bytes
    assert total.weight_bytes >= whole.weight_bytes * (1 - 1e-9)


@given(model=any_model, batch=segments)
def test_batching_adds_flops_and_kv_but_reads_weights_less_often(model, batch):
    together = model.step(batch, len(batch))
    apart = sum((model.step([segment], 1) for segment in batch), StepCost())
    assert together.flops == pytest.approx(apart.flops)
    assert together.kv_read_bytes == pytest.approx(apart.kv_read_bytes)
    assert together.kv_write_bytes == pytest.approx(apart.kv_write_bytes)
    assert together.weight_bytes <= apart.weight_bytes * (1 + 1e-9)


@given(model=any_model, batch=segments, more=st.tuples(st.integers(1, 512), st.integers(0, 4096)))
def test_one_more_request_never_makes_a_step_cheaper(model, batch, more):
    fewer, extra = model.step(batch, len(batch)), model.step([*batch, more], len(batch) + 1)
    assert extra.flops > fewer.flops
    assert extra.bytes > fewer.bytes


@settings(max_examples=30)
@given(context=st.integers(1, 100_000), batch=st.integers(1, 256))
def test_decode_is_the_step_of_single_tokens(context, batch):
    assert SMOLLM2.decode(batch, context) == SMOLLM2.step([(1, context - 1)] * batch, batch)
    assert SMOLLM2.decode(batch, context).kv_read_bytes == batch * context * 23_040


def test_a_step_of_256_requests_takes_no_longer_than_ten_times_adding_up_their_tokens():
    batch = [(1, 1000 + i) for i in range(256)]

    def add_up():
        return sum(new + computed for new, computed in batch)

    def best_s(function):  # of CPU time: what other processes take counts for nothing
        times_s = []
        for _ in range(50):
            start_s = time.thread_time()
            for _ in range(10):
                function()
            times_s.append(time.thread_time() - start_s)
        return min(times_s)

    assert best_s(lambda: SMOLLM2.step(batch, len(batch))) < 10 * best_s(add_up)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-3-4b"])
@given(new=st.integers(1, 3000), computed=st.integers(0, 3000))
def test_a_window_reads_and_attends_to_what_each_token_sees(name, new, computed):
    shape = load_model_shape(name)
    seen = [min(token, shape.window_tokens) for token in range(computed + 1, computed + new + 1)]
    full = StepCostModel(dataclasses.replace(shape, num_window_layers=0)).step([(new, computed)], 1)
    cost = StepCostModel(shape).step([(new, computed)], 1)
    layer_bytes = shape.kv_bytes_per_token / shape.num_attention_layers
    unread = computed - min(computed, shape.window_tokens - 1)
    assert full.kv_read_bytes - cost.kv_read_bytes == shape.num_window_layers * layer_bytes * unread
    unseen = sum(range(computed + 1, computed + new + 1)) - sum(seen)
    pair_flops = 4 * shape.num_q_heads * shape.head_dim * shape.num_window_layers
    assert full.flops - cost.flops == pytest.approx(pair_flops * unseen, rel=1e-9, abs=full.flops * 1e-12)
    assert (cost.weight_bytes, cost.kv_write_bytes) == (full.weight_bytes, full.kv_write_bytes)


def test_a_decode_step_of_gemma_3_reads_a_window_in_52_of_62_layers():
    cost = StepCostModel(load_model_shape("gemma-3-27b")).decode(2, 32_768)
    assert cost.kv_read_bytes == 2 * 8192 * (10 * 32_768 + 52 * 1024)
    assert cost.kv_write_bytes == 2 * 8192 * 62


def test_a_state_is_read_and_written_once_a_step_whatever_the_context():
    shape = load_model_shape("nemotron-h-8b")
    model = StepCostModel(shape)
    short, long = model.decode(3, 100), model.decode(3, 8_192)
    assert long.kv_read_bytes - short.kv_read_bytes == 3 * (8_192 - 100) * 16_384
    assert short.kv_read_bytes == 3 * (100 * 16_384 + shape.state_bytes)
    assert short.kv_write_bytes == long.kv_write_bytes == 3 * (16_384 + shape.state_bytes)
    first, second = model.step([(64, 0)], 0), model.step([(64, 64)], 0)
    assert (first.kv_read_bytes, second.kv_read_bytes) == (64 * 16_384, 128 * 16_384 + shape.state_bytes)
    without = StepCostModel(dataclasses.replace(shape, state_flops_per_element=0)).step([(64, 0)], 0)
    assert first.flops - without.flops == 64 * 24 * 4 * 128 * 64 * 128
