"""Which models are served, told from their own configuration: as transformers makes it, and as an old file has it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

from ridgeline.engine.connector.transferable_models import keeps_every_token, keeps_states, why_unsupported
from tests.support.model_families import FAMILIES_TABLE, MODELS, families_table

MIXTURE = ["sliding_attention", "full_attention"]


def reason(config: object, *, on_cpu: bool = True, prefix_caching: bool = True) -> str | None:
    return why_unsupported(values(config), on_cpu=on_cpu, prefix_caching=prefix_caching)


def values(config: object) -> Any:
    if isinstance(config, str):
        config = getattr(transformers, config)()
    return config if isinstance(config, dict) else config.to_dict()  # type: ignore[attr-defined]


EVERY_TOKEN = ("LlamaConfig", "Qwen2Config", "Qwen3Config", "Qwen3MoeConfig", "DeepseekV3Config", "GPT2Config")
WINDOWS = ("Gemma2Config", "Gemma3TextConfig", "GptOssConfig", "Cohere2Config", "Olmo3Config", "Llama4TextConfig",
           "Gemma4TextConfig", "MistralConfig")  # fmt: skip
STATES = ("Qwen3NextConfig", "Qwen3_5TextConfig", "KimiLinearConfig")
MAMBA_2 = ("BambaConfig", "NemotronHConfig", "FalconH1Config", "GraniteMoeHybridConfig", "Zamba2Config")
MAMBA = ("JambaConfig", "MambaConfig", "FalconMambaConfig")


@pytest.mark.parametrize("name", [*EVERY_TOKEN, *WINDOWS, *STATES])
def test_speculation_is_refused_with_recurrent_states_only(name: str):
    refused = why_unsupported(values(name), on_cpu=False, prefix_caching=True, speculates=True)
    assert (refused is not None) == (name in STATES)


@pytest.mark.parametrize("name", [*EVERY_TOKEN, *WINDOWS, *STATES])
def test_models_with_any_kinds_of_layers_are_served(name: str):
    assert reason(name) is None
    assert keeps_every_token(values(name)) is (name in EVERY_TOKEN)
    assert keeps_states(values(name)) is (name in STATES)


@pytest.mark.parametrize("name", [*MAMBA_2, *MAMBA])
def test_mamba_layers_are_refused_where_vllm_fails_with_them(name: str):
    assert keeps_states(values(name))
    assert reason(name, on_cpu=False) is None
    assert reason(name) is not None
    assert (reason(name, prefix_caching=False) is None) is (name in MAMBA_2)


def test_short_convolutions_are_refused_on_cpus_where_vllms_answers_depend_on_the_steps_of_a_prompt():
    config = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
    assert "short convolutions" in (reason(config, prefix_caching=False) or "")
    assert reason(config, on_cpu=False) is None


def test_layers_of_mamba_that_a_model_could_have_and_has_not_do_not_count():
    attention = transformers.GraniteMoeHybridConfig(layer_types=["attention"] * 32)
    assert reason(attention) is None
    assert not keeps_states(values(attention))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("DeepseekV32Config", "keeps an index beside the KV"),
        ("GlmMoeDsaConfig", "keeps an index beside the KV"),
        ("DeepseekV4Config", "keep one entry for several tokens"),
        ({"compress_ratios": [128, 128, 4, 128], "index_topk": 1024, "head_dim": 512}, "one entry for several tokens"),
        ({"head_dim": 128, "per_layer_config": {"1": {"head_dim": 256}}}, "heads of different sizes (128 and 256)"),
    ],
)
def test_blocks_of_several_sizes_are_refused_by_what_makes_them(config, sentence):
    assert sentence in (reason(config) or "")


@pytest.mark.parametrize(
    ("config", "every_token"),
    [
        ({"sliding_window": None}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"sliding_window": 4096}, False),
        ({"text_config": {"sliding_window": 1024}}, False),
        ({"attention_chunk_size": 8192, "layer_types": MIXTURE}, False),
        ({"layer_types": ["full_attention", "conv"]}, False),
        ({"layer_types": ["full_attention"] * 2}, True),
    ],
)
def test_files_say_in_several_ways_whether_every_layer_keeps_every_token(config, every_token):
    assert keeps_every_token(config) is every_token


def test_an_index_beside_the_kv_is_refused_by_name():
    sentence = reason({"model_type": "deepseek_v32", "kv_lora_rank": 512, "index_topk": 2048})
    assert sentence is not None
    assert "sparse attention (index_topk 2048)" in sentence


def test_an_encoder_is_refused_by_name():
    assert "it has an encoder" in str(reason(transformers.T5Config()))


def test_nothing_is_said_of_a_model_of_which_nothing_is_known():
    assert reason({}) is None


def test_the_table_of_families_is_what_the_checks_say():
    table = FAMILIES_TABLE.search(MODELS.read_text())
    assert table is not None
    assert table[0] == families_table(), "run `python -m tests.support.model_families` to write it anew"
