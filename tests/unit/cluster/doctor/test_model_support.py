"""A model that cannot be served as configured is refused before anything starts, by the doctor and by the plan."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import ModelFacts, read_model_facts
from ridgeline.cluster.doctor.model_support import adapters, model_conflicts
from ridgeline.cluster.doctor.software import CheckResult
from ridgeline.cluster.model_store import ModelError
from ridgeline.cluster.runtime.plan import make_plan
from tests.support.adapter_files import write_adapter

MISTRAL = ModelFacts(config={"model_type": "mistral", "sliding_window": 4096})
QWEN = ModelFacts(config={"layer_types": ["linear_attention", "full_attention"]})
GRANITE = ModelFacts(config={"layer_types": ["mamba", "attention"], "mamba_n_heads": 8})
DEEPSEEK = ModelFacts(config={"model_type": "deepseek_v3", "kv_lora_rank": 512})
LLAMA = ModelFacts(attention_heads=32, kv_heads=8)
ODD = ModelFacts(attention_heads=9, kv_heads=3)
WHOLE, GPUS = {"mode": "colocated"}, {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode")}


def ranks(gpus: bool = False, **of_pools: int) -> dict[str, str]:
    flags = {f"pools.{pool}.gpus_per_worker": "1" for pool in ("prefill", "decode", "colocated") if gpus}
    for pool, count in of_pools.items():
        settings = ("gpus_per_worker",) if gpus else ("tensor_parallel_size", "cores_per_worker")
        flags |= {f"pools.{pool}.{setting}": str(count) for setting in settings}
    return flags


@pytest.mark.parametrize(
    ("model", "flags", "parts"),
    [
        pytest.param(MISTRAL, ranks(decode=2), [], id="window"),
        pytest.param(QWEN, {}, [], id="states"),
        pytest.param(QWEN, ranks(decode=2), [["states", "pools.decode.tensor_parallel_size"]], id="states_of_ranks"),
        pytest.param(QWEN, ranks(decode=2) | WHOLE, [], id="states_without_a_hand_over"),
        pytest.param(GRANITE, {}, [["engine_args.enable_prefix_caching"]], id="mamba_on_a_cpu"),
        pytest.param(GRANITE, {"engine_args.enable_prefix_caching": "false"}, [], id="mamba_without_prefix_caching"),
        pytest.param(GRANITE, GPUS, [], id="mamba_on_a_gpu"),
        pytest.param(DEEPSEEK, ranks(decode=2), [["MLA", "pools.decode.tensor_parallel_size"]], id="latent_cache"),
        pytest.param(DEEPSEEK, {}, [], id="latent_cache_with_equal_ranks"),
        pytest.param(DEEPSEEK, ranks(decode=2) | WHOLE, [], id="latent_cache_without_a_hand_over"),
        pytest.param(LLAMA, ranks(prefill=8, decode=2), [], id="ranks_that_divide_the_heads"),
        pytest.param(
            LLAMA,
            ranks(gpus=True, prefill=16, decode=8),
            [["8 KV heads", "pools.prefill.gpus_per_worker to 1 or 2 or 4 or 8"]],
            id="more_ranks_than_kv_heads",
        ),
        pytest.param(LLAMA, ranks(colocated=16) | WHOLE, [], id="vllm_copies_kv_heads"),
        pytest.param(
            ModelFacts(attention_heads=6, kv_heads=None),
            ranks(decode=4),
            [["6 attention heads", "pools.decode.tensor_parallel_size to 1 or 2 or 3 or 6"]],
            id="attention_heads",
        ),
        pytest.param(ODD, ranks(prefill=2, decode=2, colocated=2), [["prefill"], ["decode"]], id="each_pool_by_itself"),
        pytest.param(ODD, ranks(prefill=2, decode=2, colocated=2) | WHOLE, [["colocated"]], id="pools_of_the_mode"),
        pytest.param(ModelFacts("hub"), ranks(prefill=5, decode=5), [], id="unknown_heads_are_left_to_the_engine"),
    ],
)
def test_a_model_that_cannot_be_served_so_is_named_with_the_fix(model, flags, parts):
    found = model_conflicts(load_config(None, {"model.path": "mine", **flags}).config, model)
    assert len(found) == len(parts), found
    for sentence, of_it in zip(found, parts, strict=True):
        assert all(part in sentence for part in of_it), sentence
        assert sentence.endswith(".")


@pytest.mark.parametrize("nested", [False, True])
def test_a_directory_is_judged_by_its_file_before_it_is_loaded(tmp_path: Path, nested: bool):
    shape = {"num_attention_heads": 4, "index_topk": 512}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape} if nested else shape))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert read_model_facts(str(tmp_path)).state == "ready"
    with pytest.raises(ModelError, match="512"):
        make_plan(load_config(None, {"model.path": str(tmp_path)}).config)


def test_a_model_of_embeddings_with_the_architecture_of_one_that_makes_text_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    kinds = ("Transformer", "Pooling")
    pooled = [{"idx": n, "type": f"sentence_transformers.models.{kind}"} for n, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(pooled))
    [sentence] = model_conflicts(RidgelineConfig(), read_model_facts(str(tmp_path)))
    assert "modules.json" in sentence


def adapters_of(model: ModelFacts, modules: str) -> list[CheckResult]:
    flags = {"engine_args.enable_lora": "true", "engine_args.max_lora_rank": "8", "server_args.lora_modules": modules}
    return list(adapters(load_config(None, flags).config, SimpleNamespace(model=model)))


def test_adapters_are_judged_before_an_engine_loads_them(tmp_path: Path):
    small = ModelFacts(config={"num_hidden_layers": 2, "hidden_size": 64})
    fits, high = write_adapter(tmp_path / "fits"), write_adapter(tmp_path / "high", r=16)
    found = adapters_of(small, f"[fits={fits}, high={high}, gone={tmp_path}/gone, hub=org/adapter]")
    assert [(result.name, result.ok) for result in found] == [
        ("adapter fits", True),
        ("adapter high", False),
        ("adapter gone", False),
        ("adapter hub", True),
    ]
    assert "max_lora_rank" in found[1].fix
    assert f"{tmp_path}/gone" in found[2].fix
    [other] = adapters_of(ModelFacts(config={"num_hidden_layers": 2, "hidden_size": 128}), f"[fits={fits}]")
    assert "Name an adapter of this model" in other.fix


def test_engines_get_paths_of_adapters_that_mean_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_adapter(tmp_path / "sql")
    monkeypatch.chdir(tmp_path)
    flags = {"engine_args.enable_lora": "true", "server_args.lora_modules": "[sql=sql, hub=org/adapter]"}
    settings = make_plan(load_config(None, flags).config).router_settings()
    assert settings.lora_modules == (
        {"name": "sql", "path": str(tmp_path / "sql")},
        {"name": "hub", "path": "org/adapter"},
    )
    assert "lora_modules" not in settings.server_args


def test_a_draft_model_is_looked_for_before_anything_starts(tmp_path: Path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")

    def drafts_with(model: str) -> str:
        config = f"{{method: draft_model, num_speculative_tokens: 2, model: {model}}}"
        flags = {"engine_args.speculative_config": config}
        return str(make_plan(load_config(None, flags).config).engine_args["speculative_config"]["model"])

    assert drafts_with(str(tmp_path / "draft")) == str(tmp_path / "draft")
    assert drafts_with("org/draft") == "org/draft"
    with pytest.raises(ModelError, match="speculative_config"):
        drafts_with(str(tmp_path / "gone"))
