"""Which models are served, told from their own configuration: as transformers makes it, and as an old file has it."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

from ridgeline.engine.connector.transferable_models import why_unsupported
from tests.support.model_families import FAMILIES_TABLE, MODELS, families_table

MIXTURE = ["sliding_attention", "full_attention"]


def reason(config: object, longest: int = 8192, hands_over: bool = True) -> str | None:
    values = config if isinstance(config, dict) else config.to_dict()  # type: ignore[attr-defined]
    return why_unsupported(values, max_model_len=longest, hands_over=hands_over)


@pytest.mark.parametrize(
    "name",
    [
        "LlamaConfig",
        "Qwen2Config",
        "Qwen3Config",
        "Qwen3MoeConfig",
        "MixtralConfig",
        "Gemma2Config",
        "Gemma3TextConfig",
        "GptOssConfig",
        "Cohere2Config",
        "Olmo3Config",
        "Exaone4Config",
        "DeepseekV3Config",
        "GPT2Config",
        "FalconConfig",
        "Llama4TextConfig",
    ],
)
def test_models_that_keep_every_tokens_kv_in_some_layer_are_served(name: str):
    assert reason(getattr(transformers, name)()) is None


@pytest.mark.parametrize(
    "name",
    ["Qwen3NextConfig", "JambaConfig", "BambaConfig", "NemotronHConfig", "FalconH1Config", "MambaConfig"],
)
@pytest.mark.parametrize("hands_over", [True, False])
def test_recurrent_layers_are_refused_by_their_name_in_every_mode(name: str, hands_over: bool):
    sentence = reason(getattr(transformers, name)(), hands_over=hands_over)
    assert sentence is not None
    assert "recurrent state" in sentence


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("DeepseekV32Config", "keeps an index beside the KV"),
        ("GlmMoeDsaConfig", "keeps an index beside the KV"),
        ("DeepseekV4Config", "keep one entry for several tokens"),
        ("Gemma4TextConfig", "heads of different sizes (256 and 512)"),
    ],
)
@pytest.mark.parametrize("hands_over", [True, False])
def test_other_shapes_of_kv_are_refused_by_what_they_are_and_not_as_recurrent_states(name, sentence, hands_over):
    said = reason(getattr(transformers, name)(), hands_over=hands_over)
    assert said is not None
    assert sentence in said


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"compress_ratios": [128, 128, 4, 128], "index_topk": 1024, "head_dim": 512}, "one entry for several tokens"),
        (
            {"layer_types": MIXTURE, "head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
            "heads of different sizes (256 and 512)",
        ),
    ],
)
def test_so_they_are_in_the_files_of_their_checkpoints(config, sentence):
    assert sentence in (reason(config) or "")


def test_layers_of_a_kind_that_nobody_knows_here_are_refused_too():
    sentence = reason({"layer_types": ["full_attention", "conv", "linear_attention"]})
    assert sentence is not None
    assert "(conv, linear_attention)" in sentence


WINDOWED = {"model_type": "mistral", "sliding_window": 4096}


def test_a_window_in_every_layer_is_refused_where_a_request_may_be_longer():
    sentence = reason(WINDOWED)
    assert sentence is not None
    assert "every layer has a sliding window of 4096 tokens" in sentence
    assert "set model.max_model_len to at most 4096" in sentence
    assert "mode colocated" in sentence
    assert reason(WINDOWED, longest=4096) is None, "the window never leaves anything out"
    assert reason(WINDOWED, hands_over=False) is None


@pytest.mark.parametrize(
    ("values", "served"),
    [
        ({"sliding_window": None}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"sliding_window": 4096, "layer_types": MIXTURE}, True),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 2}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, True),
        ({"sliding_window": 4096, "sliding_window_pattern": 6}, True),
        ({"sliding_window": 4096, "model_type": "gemma2"}, True),
        ({"sliding_window": 2047, "model_type": "phi3"}, False),
        ({"text_config": {"sliding_window": 1024, "model_type": "mistral"}}, False),
        ({"text_config": {"sliding_window": 1024, "layer_types": MIXTURE}}, True),
    ],
)
def test_files_say_in_several_ways_whether_every_layer_has_the_window(values: dict[str, object], served: bool):
    assert (reason(values) is None) is served


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
