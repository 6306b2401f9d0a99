"""Figures follow the formats in which weights and KV are stored, not the one that is computed in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

from ridgeline.engine.connector.accounting import kv_element_bytes, step_cost_model, stored_weight_bytes
from ridgeline.roofline.model_shape import ModelShape
from tests.support.model_families import FAMILIES, tiny_config

FP8 = {"quant_method": "fp8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def model(scheme: dict[str, Any] | None = None, asked: str | None = None, **sizes: Any) -> Any:
    config = LlamaConfig(**sizes)
    if scheme is not None:
        config.quantization_config = scheme
    return SimpleNamespace(
        hf_config=config, hf_text_config=config, quantization=asked, dtype=torch.bfloat16, model="any"
    )


@pytest.mark.parametrize(
    ("scheme", "asked", "expected"),
    [(None, None, 2.0), (FP8, "fp8", 1.0), (AWQ, "awq_marlin", 0.5 + 2 / 128), (None, "fp8", 1.0)],
)
def test_weights_have_the_bytes_of_their_scheme(scheme, asked, expected):
    assert stored_weight_bytes(model(scheme, asked)) == expected


def plain(dtype: torch.dtype, mode: KVQuantMode = KVQuantMode.NONE) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=32, num_kv_heads=8, head_size=128, dtype=dtype, kv_quant_mode=mode)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (plain(torch.bfloat16), 2.0),
        (plain(torch.float32), 4.0),
        (plain(torch.uint8, KVQuantMode.FP8_PER_TENSOR), 1.0),
        (
            FullAttentionSpec(block_size=32, num_kv_heads=8, head_size=128, dtype=torch.uint8, state_content_bytes=144),
            0.5625,
        ),
        (MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16), 2.0),
    ],
    ids=["bfloat16", "float32", "fp8", "nvfp4, four bits and a scale for sixteen", "latent"],
)
def test_kv_has_the_bytes_of_the_cache(spec, expected):
    assert kv_element_bytes(spec) == expected


def test_a_decode_step_of_an_fp8_model_moves_half_the_weights():
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 64}

    def bytes_of(scheme: dict[str, Any] | None) -> float:
        config: Any = SimpleNamespace(
            model_config=model(scheme, **sizes),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            num_speculative_tokens=0,
        )
        cost = step_cost_model(config, plain(torch.bfloat16))
        assert cost is not None
        return cost.decode(1, 2).weight_bytes

    assert bytes_of(FP8) == bytes_of(None) / 2


def test_a_scheme_whose_bytes_are_not_known_costs_the_figures_and_not_the_engine():
    config: Any = SimpleNamespace(
        model_config=model({"quant_method": "invented"}), parallel_config=SimpleNamespace(tensor_parallel_size=1)
    )
    assert step_cost_model(config, plain(torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("key", "layers"),
    [  # with attention, of them with a window, and with a state
        ("llama4", (4, 3, 0)),
        ("gpt_oss", (4, 2, 0)),
        ("gemma3", (6, 5, 0)),
        ("mistral", (3, 3, 0)),
        ("qwen3_next", (1, 0, 3)),
        ("qwen3_5", (1, 0, 3)),
        ("nemotron_h", (1, 0, 2)),
        ("granite4h", (2, 0, 2)),
        ("falcon_h1", (4, 0, 4)),
    ],
)
def test_a_family_is_counted_as_transformers_resolves_its_configuration(key: str, layers: tuple[int, int, int]):
    [family] = [one for one in FAMILIES if one.key == key]
    config = tiny_config(family, vocab_size=512)
    shape = ModelShape.from_hf_config(config.to_dict(), weight_bytes_per_param=2, kv_bytes_per_element=2, name=key)
    assert (shape.num_attention_layers, shape.num_window_layers, shape.num_state_layers) == layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert shape.num_params == pytest.approx(counted, rel=0.01)  # without norms of heads and gates, and without biases
