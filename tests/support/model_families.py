"""The table of model families in docs/how-to/serve.md: what the checks before a start say of a tiny model of each.

`python -m tests.support.model_families` writes it again. The configurations are made by transformers' own classes and
read back from `config.json`, as `ridgeline doctor` reads a model's.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import read_model_facts
from ridgeline.cluster.doctor.model_support import model_conflicts

MODELS = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"
FAMILIES_TABLE = re.compile(r"(?<=<!-- families -->\n).*(?=<!-- /families -->)", re.DOTALL)
WINDOW_TOKENS = 128
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
MLA: dict[str, Any] = {"num_key_value_heads": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                       "v_head_dim": 8, "q_lora_rank": 16}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Family:
    """A family, its class in transformers, and what makes a tiny one of it."""

    name: str
    config_class: str
    sizes: dict[str, Any] = field(default_factory=dict)


FAMILIES = (
    Family("Llama 2 and 3, SmolLM2, Yi", "LlamaConfig"),
    Family("Qwen 2.5", "Qwen2Config"),
    Family("Qwen 3", "Qwen3Config"),
    Family("Qwen 3 MoE, Qwen 3 Coder", "Qwen3MoeConfig", EXPERTS),
    Family("Mistral Small, Ministral 3", "Ministral3Config"),
    Family("Mixtral", "MixtralConfig", {"sliding_window": None}),
    Family("GLM 4.5, 4.6", "Glm4MoeConfig", EXPERTS),
    Family("MiniMax M2", "MiniMaxM2Config", EXPERTS),
    Family("Llama 4, its text", "Llama4TextConfig", {"attention_chunk_size": WINDOW_TOKENS}),
    Family("gpt-oss", "GptOssConfig", {"layer_types": MIXED, "sliding_window": WINDOW_TOKENS}),
    Family("Gemma 3", "Gemma3TextConfig", {"layer_types": MIXED, "sliding_window": WINDOW_TOKENS}),
    Family("OLMo 3", "Olmo3Config", {"layer_types": MIXED, "sliding_window": WINDOW_TOKENS}),
    Family("Cohere 2 (Command A)", "Cohere2Config", {"layer_types": MIXED, "sliding_window": WINDOW_TOKENS}),
    Family("Mistral 7B v0.1", "MistralConfig", {"sliding_window": WINDOW_TOKENS}),
    Family("Phi-3 mini", "Phi3Config", {"sliding_window": WINDOW_TOKENS, "pad_token_id": 0}),
    Family("DeepSeek V3 and R1, Kimi K2", "DeepseekV3Config", MLA | EXPERTS),
    Family("Mistral 4", "Mistral4Config", MLA | EXPERTS),
    Family("DeepSeek V3.2", "DeepseekV32Config", MLA | EXPERTS | {"index_topk": 16}),
    Family("GLM 5", "GlmMoeDsaConfig", MLA | EXPERTS | {"index_topk": 16}),
    Family("DeepSeek V4", "DeepseekV4Config", EXPERTS | {"num_key_value_heads": 1}),
    Family("Gemma 4", "Gemma4TextConfig", {"global_head_dim": 32}),
    Family("Qwen 3 Next", "Qwen3NextConfig", EXPERTS),
    Family("Qwen 3.5", "Qwen3_5TextConfig"),
    Family("Kimi Linear", "KimiLinearConfig", MLA | EXPERTS),
    Family("Nemotron H", "NemotronHConfig"),
    Family("Granite 4 H", "GraniteMoeHybridConfig", {"layer_types": ["mamba", "attention"] * 2}),
    Family("LFM 2", "Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    Family("Jamba", "JambaConfig"),
)


def deployment(directory: Path, mode: str, prefill_ranks: int = 1) -> RidgelineConfig:
    """Return a deployment of this model; a prefill engine has so many ranks, a decode engine one."""
    ranks = {
        "pools.prefill.tensor_parallel_size": str(prefill_ranks),
        "pools.prefill.cores_per_worker": str(prefill_ranks),
    }
    return load_config(None, {"model.path": str(directory), "mode": mode, **ranks}).config


def verdicts(family: Family) -> list[list[str]]:
    """Return what stands in the way with equal ranks, with unequal ranks, and in mode colocated; empty: nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model = getattr(transformers, family.config_class)(**{**SIZES, **family.sizes})
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.save_pretrained(directory)
        facts = read_model_facts(name)
        asked = (deployment(directory, "disaggregated"), deployment(directory, "disaggregated", 2),
                 deployment(directory, "colocated"))  # fmt: skip
        return [[sentence.replace(name, "It") for sentence in model_conflicts(one, facts)] for one in asked]


def families_table() -> str:
    """Return the table, and below it each sentence once."""
    sentences: list[str] = []

    def cell(reasons: list[str]) -> str:
        sentences.extend(sentence for sentence in reasons if sentence not in sentences)
        numbers = ", ".join(str(sentences.index(sentence) + 1) for sentence in reasons)
        return f"no ({numbers})" if reasons else "yes"

    lines = ["| family | two pools, equal ranks | two pools, 2 ranks to 1 | colocated |\n", "|---|---|---|---|\n"]
    lines += [f"| {family.name} | {' | '.join(map(cell, verdicts(family)))} |\n" for family in FAMILIES]
    return "".join([*lines, "\n", *(f"{number}. {text}\n" for number, text in enumerate(sentences, 1))])


if __name__ == "__main__":
    MODELS.write_text(FAMILIES_TABLE.sub(lambda _: families_table(), MODELS.read_text()))
