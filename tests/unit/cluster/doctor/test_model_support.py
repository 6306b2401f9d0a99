"""A model that cannot be served as configured is refused before anything starts, by the doctor and by the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import ModelFacts, read_model_facts
from ridgeline.cluster.doctor.model_support import model_conflicts
from ridgeline.cluster.model_store import ModelError
from ridgeline.cluster.runtime.plan import make_plan

MISTRAL = {"model_type": "mistral", "sliding_window": 4096}
DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512}


def conflicts_of(values: dict[str, object], **flags: str) -> list[str]:
    settings = {name.replace("__", "."): value for name, value in flags.items()}
    return model_conflicts(load_config(None, {"model.path": "mine", **settings}).config, ModelFacts(config=values))


def test_the_sentence_names_the_model_and_the_property():
    [sentence] = conflicts_of(MISTRAL, model__max_model_len="8192")
    assert sentence.startswith("mine cannot be served: every layer has a sliding window of 4096 tokens")
    assert sentence.endswith(".")


def test_requests_that_fit_into_the_window_are_served_and_so_is_every_length_without_a_hand_over():
    assert conflicts_of(MISTRAL, model__max_model_len="4096") == []
    assert conflicts_of(MISTRAL, model__max_model_len="8192", mode="colocated") == []


def test_ranks_of_a_latent_cache_must_be_equal_in_number_where_kv_is_handed_over():
    two = {"pools__decode__tensor_parallel_size": "2", "pools__decode__cores_per_worker": "2"}
    [sentence] = conflicts_of(DEEPSEEK, **two)
    assert "keeps one latent vector a token (MLA)" in sentence
    assert "the 1 ranks of a prefill engine" in sentence
    assert conflicts_of(DEEPSEEK) == []
    assert conflicts_of(DEEPSEEK, **two, mode="colocated") == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_directory_is_judged_by_its_file_before_it_is_loaded(tmp_path: Path, nested: bool):
    shape = {"num_attention_heads": 4, **MISTRAL, "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape} if nested else shape))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_model_facts(str(tmp_path)).state == "ready"
    with pytest.raises(ModelError, match="every layer has a sliding window of 512 tokens"):
        make_plan(load_config(None, {"model.path": str(tmp_path)}).config)


def test_a_model_of_embeddings_with_the_architecture_of_one_that_makes_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    pooled = [{"idx": 0, "type": "sentence_transformers.models.Transformer"},
              {"idx": 1, "type": "sentence_transformers.models.Pooling"}]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(pooled))
    [sentence] = model_conflicts(RidgelineConfig(), read_model_facts(str(tmp_path)))
    assert "its modules.json makes it a model of embeddings" in sentence
