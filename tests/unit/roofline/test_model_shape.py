"""Model sizes: published parameter counts, KV bytes per token, and configs that cannot be read."""

import json
import pickle

import pytest

from ridgeline.roofline.errors import ModelConfigError, UnknownNameError
from ridgeline.roofline.known_models import KNOWN_MODELS
from ridgeline.roofline.model_shape import ModelShape, load_model_shape
from ridgeline.roofline.quantisation import multiplies_in_fp8, weight_bytes_per_param

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def compressed(kind, group_size):
    """Compressed-tensors' weights of four bits: NVFP4 in groups of 16, MXFP4 of 32, or integers."""
    weights = {"num_bits": 4, "type": kind, "group_size": group_size}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


def from_config(config, name="test"):
    return ModelShape.from_hf_config(config, weight_bytes_per_param=2.0, kv_bytes_per_element=2.0, name=name)


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("smollm2-135m", 134_515_008),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameter_counts_equal_the_published_checkpoints_exactly(name, num_params):
    assert load_model_shape(name).num_params == num_params


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [
        ("deepseek-v3", 671, 37.5),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("qwen3-235b-a22b", 235, 22),
        ("kimi-k2", 1026, 32.8),
        ("deepseek-v4-pro", 1600, 49),
        ("deepseek-v4-flash", 284, 13),
        ("glm-4.5", 355, 32),
        ("glm-4.5-air", 106, 12),
        ("glm-5", 744, 40),
        ("minimax-m2", 230, 10),
        ("llama-4-scout", 109, 17),
        ("qwen3-coder-480b-a35b", 480, 35),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gpt-oss-120b", 117, 5.1),
        ("mixtral-8x22b", 141, 39),
        *(("qwen3-1.7b", 1.72, 1.72), ("qwen3-4b", 4.02, 4.02), ("qwen3-14b", 14.8, 14.8)),
        *(("gemma-3-4b", 3.88, 3.88), ("gemma-3-12b", 11.8, 11.8), ("gemma-3-27b", 27.0, 27.0)),
        ("mistral-small-24b", 23.6, 23.6),
    ],
)
def test_a_model_has_its_advertised_total_and_active_parameters(name, billions, active_billions):
    """Cards round, and count an input embedding or not."""
    shape = load_model_shape(name)
    assert shape.num_params / 1e9 == pytest.approx(billions, rel=0.02)
    assert (shape.num_active_params - shape.embedding_params) / 1e9 < active_billions * 1.07
    assert shape.num_active_params / 1e9 > active_billions * 0.97


def test_deepseek_v4_keeps_one_vector_for_four_or_for_128_tokens():
    shape = load_model_shape("deepseek-v4-pro")
    assert shape.kv_bytes_per_token == pytest.approx((30 / 4 + 31 / 128) * 512 * 2)
    plain = load_model_shape("deepseek-v3").kv_bytes_per_token
    assert shape.kv_bytes_per_token / plain == pytest.approx(0.113, abs=0.001)  # its authors: 10 % of V3.2's


def test_ratios_that_do_not_cover_the_layers_are_refused():
    with pytest.raises(ModelConfigError, match="compress_ratios"):
        from_config(dict(KNOWN_MODELS["deepseek-v4-pro"], compress_ratios=[4, 128]))


GRANITE_4_H = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100_352,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "layer_types": ["mamba", "mamba", "mamba", "mamba", "mamba", "attention", *["mamba"] * 4] * 4,
    "num_hidden_layers": 40,
}
EXPERTS = {"num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768}
STATES = {
    # What transformers counts, and of that what no product of matrices has: gates' norms, biases of convolutions, and
    # three numbers a head; per layer with a state, and in Qwen's layers with attention two norms of 256.
    "qwen3-next-80b-a3b": (KNOWN_MODELS["qwen3-next-80b-a3b"], 79_674_391_296, 36 * (128 + 2 * 32) + 12 * 2 * 256),
    "nemotron-h-8b": (KNOWN_MODELS["nemotron-h-8b"], 8_100_852_736, 24 * (8192 + 10_240 + 3 * 128)),
    "granite-4.0-h-small": (
        GRANITE_4_H | EXPERTS | {"hidden_size": 4096, "shared_intermediate_size": 1536, "mamba_n_heads": 128},
        32_207_337_984,
        36 * (8192 + 8448 + 3 * 128),
    ),
    "granite-4.0-h-micro": (
        GRANITE_4_H | {"hidden_size": 2048, "shared_intermediate_size": 8192, "mamba_n_heads": 64},
        3_191_396_096,
        36 * (4096 + 4352 + 3 * 64),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_model_with_states_has_as_many_parameters_as_in_transformers(name):
    config, parameters, not_counted = STATES[name]
    shared_gates = 48 * 2048 if name.startswith("qwen") else 0
    assert from_config(config).num_params == parameters - not_counted - shared_gates


@pytest.mark.parametrize(
    ("name", "full", "windows", "window_tokens", "token_bytes"),
    [
        ("gemma-3-4b", 5, 29, 1024, 2 * 4 * 256 * 2),
        ("gemma-3-27b", 10, 52, 1024, 2 * 16 * 128 * 2),
        ("gpt-oss-20b", 12, 12, 128, 2 * 8 * 64 * 2),
        ("gpt-oss-120b", 18, 18, 128, 2 * 8 * 64 * 2),
        ("llama-4-scout", 12, 36, 8192, 2 * 8 * 128 * 2),
    ],
)
def test_layers_with_a_window_keep_the_tokens_in_it(name, full, windows, window_tokens, token_bytes):
    shape = load_model_shape(name)
    assert (shape.num_attention_layers, shape.num_window_layers) == (full + windows, windows)
    assert shape.kv_bytes(100) == (full + windows) * token_bytes * 100 == 100 * shape.kv_bytes_per_token
    assert shape.kv_bytes(100_000) == token_bytes * (full * 100_000 + windows * window_tokens)
    listed = dict(KNOWN_MODELS[name], layer_types=["sliding_attention"] * windows + ["full_attention"] * full)
    assert from_config(listed, name) == shape
    assert from_config(dict(KNOWN_MODELS[name], model_type="another"), name).num_window_layers == 0, "an upper bound"


@pytest.mark.parametrize(
    ("name", "layers", "token_bytes", "state_bytes"),
    [
        # 32 heads of 128 x 128, and the last 3 inputs of a convolution of 2 x 16 x 128 + 32 x 128 channels, in 16 bits
        ("qwen3-next-80b-a3b", 12, 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 + 3 * 8192) * 2),
        # 128 heads of 64 x 128 in 32 bits, and the last 3 inputs of 128 x 64 + 2 x 8 x 128 channels in 16
        ("nemotron-h-8b", 4, 2 * 8 * 128 * 2, 24 * (128 * 64 * 128 * 4 + 3 * 10_240 * 2)),
    ],
)
def test_a_state_takes_the_same_after_any_number_of_tokens(name, layers, token_bytes, state_bytes):
    shape = load_model_shape(name)
    assert shape.kv_bytes(1) - shape.kv_bytes_per_token == shape.state_bytes == state_bytes
    assert shape.kv_bytes(8192) == layers * token_bytes * 8192 + state_bytes


def test_a_falcon_h1_has_attention_and_a_state_in_each_layer():
    falcon = {"model_type": "falcon_h1", "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128}
    sizes = {"hidden_size": 1024, "num_hidden_layers": 36, "intermediate_size": 2048, "vocab_size": 32_784}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False}
    shape = from_config(falcon | sizes | heads | {"mamba_n_groups": 1, "mamba_d_conv": 4})
    assert (shape.num_attention_layers, shape.num_state_layers, shape.num_mlp_layers) == (36, 36, 36)
    assert shape.num_params == 521_411_104 - 36 * (1792 + 3 * 24)  # those of transformers; there are no gates' norms


@pytest.mark.parametrize(
    ("name", "kv_bytes_per_token"),
    [
        ("llama-2-13b", 819_200),
        ("llama-2-70b", 327_680),
        ("llama-3.1-70b", 327_680),
        ("smollm2-135m", 23_040),
        ("llama-3.1-8b", 131_072),
        ("qwen3-0.6b", 114_688),
        ("qwen3-32b", 262_144),
        ("deepseek-v3", 61 * 1_152),
    ],
)
def test_kv_bytes_per_token_match_the_checked_figures(name, kv_bytes_per_token):
    assert load_model_shape(name).kv_bytes_per_token == kv_bytes_per_token


def test_kv_quantisation_to_one_byte_halves_the_cache():
    half = load_model_shape("llama-3.1-70b", kv_bytes_per_element=1.0)
    assert half.kv_bytes_per_token == 163_840


def test_a_directory_with_a_config_gives_the_same_shape_as_the_table(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"dtype": "bfloat16"}))
    table = load_model_shape("smollm2-135m")
    assert load_model_shape(tmp_path) == ModelShape(**(vars(table) | {"name": tmp_path.name}))


def test_the_dtype_of_a_directory_decides_its_weight_bytes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2 | {"torch_dtype": "float32"}))
    assert load_model_shape(tmp_path).weight_bytes == 4 * 134_515_008


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "LLAMA-3.1-8b", "Llama-3.1-8B"])
def test_hub_spellings_of_a_known_model_find_it(name):
    assert load_model_shape(name).name == "llama-3.1-8b"


@pytest.mark.parametrize("name", ["gpt-17", "/models/llama-3.1-8b", "./llama-3.1-8b", "a/b/llama-3.1-8b"])
def test_an_unknown_model_name_is_refused_with_the_valid_names(name):
    with pytest.raises(UnknownNameError, match=r"smollm2-135m") as caught:
        load_model_shape(name)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_config_key_is_named(key):
    with pytest.raises(ModelConfigError) as caught:
        from_config({name: value for name, value in SMOLLM2.items() if name != key})
    assert caught.value.key == key
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("bad", ["30", -1, 3.5])
def test_a_config_value_that_is_no_count_is_refused(bad):
    with pytest.raises(ModelConfigError, match="num_hidden_layers"):
        from_config(SMOLLM2 | {"num_hidden_layers": bad})


def test_kv_heads_that_do_not_divide_the_query_heads_are_refused():
    with pytest.raises(ModelConfigError, match="num_key_value_heads"):
        from_config(SMOLLM2 | {"num_key_value_heads": 2})


def test_layers_without_attention_are_refused():
    with pytest.raises(ModelConfigError, match="linear_attention"):
        from_config(SMOLLM2 | {"layer_types": ["linear_attention", "full_attention"]})


@pytest.mark.parametrize("key", ["attn_type_list", "linear_attn_config", "lru_width", "mamba_d_state"])
def test_recurrent_layers_that_no_list_of_layers_names_are_refused(key):
    with pytest.raises(ModelConfigError, match=f"{key}' is of recurrent layers"):
        from_config(SMOLLM2 | {key: 16})
    assert from_config(SMOLLM2 | {key: 16, "layer_types": ["attention"] * 30}) == from_config(SMOLLM2)


def test_a_mixture_of_experts_whose_keys_are_not_read_is_refused_and_not_taken_for_a_dense_model():
    with pytest.raises(ModelConfigError, match="moe_num_experts"):
        from_config(SMOLLM2 | {"moe_num_experts": 64, "moe_k": 6})


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"model_type": "jetmoe", "num_local_experts": 8, "num_experts_per_tok": 2}, "model_type"),
        ({"model_type": "hrm_text", "num_layers_per_stack": 2}, "model_type"),
        ({"model_type": "doge", "is_moe": True, "num_experts": 1024, "num_experts_per_tok": 8}, "is_moe"),
    ],
)
def test_a_family_with_matrices_that_no_field_counts_is_refused(family, key):
    with pytest.raises(ModelConfigError, match="this arithmetic does not cover") as caught:
        from_config(SMOLLM2 | family)
    assert caught.value.key == key


def test_gemma_4_without_embeddings_for_each_layer_is_counted():
    assert from_config(SMOLLM2 | {"hidden_size_per_layer_input": 0}) == from_config(SMOLLM2)


def test_a_dense_doge_has_as_many_parameters_as_in_transformers_although_it_names_experts():
    doge = {"model_type": "doge", "is_moe": False, "num_experts": 16384, "num_experts_per_tok": 64}
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
    shape = from_config(doge | sizes | {"intermediate_size": 512, "vocab_size": 1000, "tie_word_embeddings": False})
    assert shape.num_params == pytest.approx(4_060_824, rel=2e-3)


@pytest.mark.parametrize("family", ["apertus", "arcee", "jais2", "nanochat", "persimmon", "phi"])
def test_a_family_without_a_gate_has_two_matrices_in_its_mlp(family):
    assert from_config(SMOLLM2 | {"model_type": family}).dense_mlp_params == 2 * 576 * 1536


@pytest.mark.parametrize(("experts", "step", "parameters"), [(16, 1, 107_769_861_120), (128, 2, 400_711_848_960)])
def test_llama_4_has_as_many_parameters_as_in_transformers(experts, step, parameters):
    """Scout and Maverick, without what sees: a shared expert, and in Maverick every second layer dense."""
    llama = SMOLLM2 | {
        "model_type": "llama4_text",
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "vocab_size": 202_048,
        "tie_word_embeddings": False,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": step,
    }
    assert from_config(llama).num_params == parameters


def test_an_unreadable_config_file_is_named(tmp_path):
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        load_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        load_model_shape(tmp_path)


def test_the_text_part_of_a_multimodal_config_is_used():
    assert from_config({"text_config": SMOLLM2, "vision_config": {}}) == from_config(SMOLLM2)


def test_sparse_steps_and_listed_layers_leave_dense_layers_in_a_mixture():
    moe = SMOLLM2 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    assert from_config(moe).num_dense_layers == 0
    assert from_config(moe | {"decoder_sparse_step": 2}).num_moe_layers == 15
    assert from_config(moe | {"mlp_only_layers": [0, 7]}).num_dense_layers == 2
    assert from_config(moe | {"shared_expert_intermediate_size": 1024}).num_shared_experts == 2


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "mxfp4"}, 0.53125),
        ({"quant_method": "modelopt"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, 0.5625),
        ({"quant_method": "modelopt_fp4"}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1.0),
        (compressed("float", 16), 0.5625),
        (compressed("float", 32), 0.53125),
        (compressed("int", 128), 0.5 + 2 / 128),
    ],
)
def test_weight_bytes_follow_the_quantisation_scheme(scheme, expected):
    assert weight_bytes_per_param({"torch_dtype": "bfloat16", "quantization_config": scheme}) == expected


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "invented"}},
        {"quantization_config": {"quant_method": "awq"}},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"torch_dtype": "int5"},
    ],
)
def test_a_scheme_of_unknown_size_is_refused_rather_than_guessed(config):
    with pytest.raises(ModelConfigError):
        weight_bytes_per_param(config)


@pytest.mark.parametrize(
    ("scheme", "asked", "expected"),
    [
        ({}, None, False),
        ({}, "fp8", True),
        ({"quant_method": "fp8"}, None, True),
        ({"quant_method": "awq", "bits": 4}, None, False),
        ({"quant_method": "mxfp4"}, None, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, None, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None, False),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"input_activations": {"num_bits": 8, "type": "float"}}},
            },
            None,
            True,
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"0": {"input_activations": None}}},
            None,
            False,
        ),
    ],
)
def test_only_schemes_with_activations_in_fp8_multiply_in_fp8(scheme, asked, expected):
    assert multiplies_in_fp8({"quantization_config": scheme}, asked) is expected
