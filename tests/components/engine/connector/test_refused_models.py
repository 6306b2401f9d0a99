"""A model that cannot be served is refused on vLLM's own configuration of it, before anything is loaded.

Which models are: `test_transferable_models.py`.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PretrainedConfig

from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine import vllm_engine
from ridgeline.engine.connector.transferable_models import UnsupportedModel
from ridgeline.engine.vllm_engine import VllmEngine
from tests.support.samples import engine_config

SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations with which an engine would have been loaded."""
    configs: list[Any] = []

    def load(vllm_config: Any, **options: Any) -> Any:
        configs.append(vllm_config)
        return SimpleNamespace(renderer=SimpleNamespace(tokenizer=None))

    monkeypatch.setattr(vllm_engine.AsyncLLM, "from_vllm_config", load)
    return configs


def start(
    directory: Path, model: PretrainedConfig, architecture: str, pool: Pool = "decode", draft: Path | None = None
) -> None:
    model.architectures = [architecture]
    model.save_pretrained(directory)
    changed = {"model_path": str(directory), "dtype": "float32", "kv_cache_bytes_per_rank": 1 << 24}
    changed["hands_over"] = pool != "colocated"
    if draft is not None:
        changed["passed"] = {
            "speculative_config": {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        }
    VllmEngine(dataclasses.replace(engine_config(pool), **changed)).start()


def test_a_property_that_cannot_be_served_is_refused_before_anything_is_loaded(tmp_path: Path, loaded: list[Any]):
    with pytest.raises(UnsupportedModel):
        start(tmp_path, MistralConfig(**SMALL, **HEADS, index_topk=16), "MistralForCausalLM")
    assert loaded == []
    start(tmp_path, MistralConfig(**SMALL, **HEADS, sliding_window=128), "MistralForCausalLM")
    assert len(loaded) == 1


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_draft_model_is_refused_if_its_kv_blocks_have_another_size(tmp_path: Path, loaded: list[Any], kv_heads: int):
    draft = LlamaConfig(**SMALL, **{**HEADS, "num_key_value_heads": kv_heads}, architectures=["LlamaForCausalLM"])
    draft.save_pretrained(tmp_path / "draft")
    refused = pytest.raises(UnsupportedModel) if kv_heads == 1 else nullcontext()
    with refused:
        start(tmp_path / "model", LlamaConfig(**SMALL, **HEADS), "LlamaForCausalLM", draft=tmp_path / "draft")
    assert len(loaded) == kv_heads - 1
