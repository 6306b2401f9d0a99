"""The table of model families in docs/how-to/serve.md: what the checks before a start say of a tiny model of each.

`python -m tests.support.model_families` writes it again. The configurations are made by transformers' own classes and
read back from `config.json`, as `ridgeline doctor` reads a model's.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.cluster.config.loader import load_config
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.facts import read_model_facts
from ridgeline.cluster.doctor.model_support import model_conflicts
from ridgeline.engine.connector.transferable_models import why_unsupported
from tests.support.quantised import quantise

MODELS = Path(__file__).parents[2] / "docs" / "how-to" / "serve.md"
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "families.json"
FAMILIES_TABLE = re.compile(r"(?<=<!-- families -->\n).*(?=<!-- /families -->)", re.DOTALL)
RAN_WITH_UNEQUAL_RANKS = "llama"
"""In `tests/engines/test_tensor_parallel.py`."""
DRAFTED_BY = ("eagle", "eagle3", "mtp")
WINDOW_TOKENS = 128
SEED = 11
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MLA: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
                       "v_head_dim": 128, "q_lora_rank": None, "head_dim": 64, "n_group": 1,
                       "topk_group": 1}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
                           "moe_intermediate_size": 64}  # fmt: skip
FIRST_DENSE: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
SPARSE_MLA: dict[str, Any] = {**EXPERTS, **MLA, **FIRST_DENSE, "index_topk": 2048, "q_lora_rank": 128}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW_TOKENS}
GATED_DELTA: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
                               "linear_value_head_dim": 128, "head_dim": 256,
                               "layer_types": ["linear_attention"] * 3 + ["full_attention"]}  # fmt: skip
MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32,
                           "mamba_expand": 2}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family, its class in transformers, and what makes a tiny one of it."""

    key: str
    name: str
    config_class: str
    sizes: dict[str, Any] = field(default_factory=dict)
    not_run: str = ""
    """Why a tiny one has not run here, although no check refuses it."""


class Proof(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a tiny model of a family came to beside plain vLLM: greedy answers that are equal, of so many prompts."""

    family: str
    dtype: str
    date: str
    prompts: int
    colocated: int
    """Through Ridgeline's engine, nothing handed over."""
    handed_over: int
    """After prefill, and again while prefill computes: both answers must be right."""
    bytes_moved: int
    """Of the first of these."""
    far_tokens_matter: int
    """Prompts whose answer changes with their first 16 tokens; if few do, equal answers show little."""
    served: dict[str, int] = {}
    """Of `ridgeline serve`, by mode."""
    failed: str = ""


def proofs() -> dict[str, Proof]:
    """Return what docs/results has, by family."""
    if not RESULTS.exists():
        return {}
    return {proof.family: proof for proof in msgspec.json.decode(RESULTS.read_bytes(), type=list[Proof])}


def write_proofs(proofs: dict[str, Proof]) -> None:
    """Write them in the order of the table."""
    known = [proofs[family.key] for family in FAMILIES if family.key in proofs]
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")


FAMILIES = (
    Family("llama", "Llama 2 and 3, SmolLM2, Yi", "LlamaConfig"),
    Family("smollm3", "SmolLM3", "SmolLM3Config"),
    Family("qwen2", "Qwen 2.5", "Qwen2Config"),
    Family("qwen3", "Qwen 3", "Qwen3Config"),
    Family("qwen3_moe", "Qwen 3 MoE, Qwen 3 Coder", "Qwen3MoeConfig", EXPERTS),
    Family("ministral3", "Mistral Small, Ministral 3", "Ministral3Config"),
    Family("mixtral", "Mixtral", "MixtralConfig", {**EXPERTS, "sliding_window": None}),
    Family("phi3", "Phi-3 and Phi-4 mini", "Phi3Config", {"sliding_window": None}),
    Family("granite", "Granite 3", "GraniteConfig"),
    Family("olmo2", "OLMo 2", "Olmo2Config"),
    Family("glm4", "GLM 4", "Glm4Config"),
    Family("glm4_moe", "GLM 4.5, 4.6", "Glm4MoeConfig", {**EXPERTS, **FIRST_DENSE}),
    Family(
        "minimax_m2",
        "MiniMax M2",
        "MiniMaxM2Config",
        {**EXPERTS, "rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
        not_run="vLLM's build for CPUs chooses experts by softmax alone, and this model has a sigmoid",
    ),
    Family("ernie4_5", "ERNIE 4.5", "Ernie4_5Config"),
    Family("seed_oss", "Seed-OSS", "SeedOssConfig"),
    Family(
        "llama4",
        "Llama 4, its text",
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW_TOKENS,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Family("gpt_oss", "gpt-oss", "GptOssConfig", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "gemma2",
        "Gemma 2",
        "Gemma2Config",
        {"sliding_window": WINDOW_TOKENS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    ),
    Family(
        "gemma3",
        "Gemma 3",
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "sliding_window": WINDOW_TOKENS,
            "query_pre_attn_scalar": 32,
        },
    ),
    Family("olmo3", "OLMo 3", "Olmo3Config", MIXED),
    Family("cohere2", "Cohere 2 (Command A)", "Cohere2Config", {**MIXED, "logit_scale": 1.0}),
    Family("exaone4", "EXAONE 4", "Exaone4Config", MIXED),
    Family("mistral", "Mistral 7B v0.1", "MistralConfig", {"num_hidden_layers": 3, "sliding_window": WINDOW_TOKENS}),
    Family("phi3_window", "Phi-3 mini", "Phi3Config", {"sliding_window": WINDOW_TOKENS}),
    Family(
        "gemma4",
        "Gemma 4",
        "Gemma4TextConfig",
        {
            **MIXED,
            "global_head_dim": 64,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "num_global_key_value_heads": 1,
        },
    ),
    Family("deepseek_mla", "DeepSeek V3 and R1, Kimi K2", "DeepseekV3Config", {**EXPERTS, **MLA, **FIRST_DENSE}),
    Family(
        "mistral4",
        "Mistral 4",
        "Mistral4Config",
        {**EXPERTS, **MLA, **FIRST_DENSE},
        not_run="transformers has no text model of it, of which a tiny one could be made",
    ),
    Family(
        "deepseek_v32",
        "DeepSeek V3.2",
        "DeepseekV32Config",
        SPARSE_MLA,
    ),
    Family("glm5", "GLM 5", "GlmMoeDsaConfig", SPARSE_MLA),
    Family("deepseek_v4", "DeepSeek V4", "DeepseekV4Config", {**EXPERTS, "num_key_value_heads": 1}),
    Family(
        "qwen3_next",
        "Qwen 3 Next",
        "Qwen3NextConfig",
        {**EXPERTS, **GATED_DELTA, "shared_expert_intermediate_size": 64},
    ),
    Family(
        "qwen3_5",
        "Qwen 3.5",
        "Qwen3_5TextConfig",
        GATED_DELTA,
        not_run="vLLM's code of it imports torchvision, which the installation for CPUs leaves out",
    ),
    Family(
        "kimi_linear",
        "Kimi Linear",
        "KimiLinearConfig",
        {**EXPERTS, **MLA},
        not_run="vLLM's build for CPUs fails at its start, where it replaces the Triton kernels of this family",
    ),
    Family("lfm2", "LFM 2", "Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}),
    Family(
        "nemotron_h",
        "Nemotron H",
        "NemotronHConfig",
        {
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 1,
            "ssm_state_size": 32,
            "expand": 2,
        },
    ),
    Family(
        "granite4h",
        "Granite 4 H",
        "GraniteMoeHybridConfig",
        {
            **MAMBA_2,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "nope",
        },
    ),
    Family("falcon_h1", "Falcon H1", "FalconH1Config", {**MAMBA_2, "mamba_d_ssm": 256}),
    Family("jamba", "Jamba", "JambaConfig"),
)


def tiny_config(family: Family, **more: Any) -> Any:
    """Return the configuration of a tiny model of this family, as transformers has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return getattr(transformers, family.config_class)(**{**SIZES, **family.sizes, **more})


def make_family(key: str, directory: Path, vocabulary_tokens: int = 512, max_positions: int = 2048) -> Path:
    """Write a random float32 model without a tokenizer; the same bytes every time. `llama-awq` is quantised.

    For `llama-eagle` and `glm4_moe-mtp` see `add_drafts`.

    The weights are large enough that far tokens decide which comes next, else equal answers would show nothing.
    """
    import torch
    import transformers

    name, _, variant = key.partition("-")
    [family] = [one for one in FAMILIES if one.key == name]
    drafts = {"num_hidden_layers": 1, "first_k_dense_replace": 0} if variant in DRAFTED_BY else {}
    config = tiny_config(family, vocab_size=vocabulary_tokens, max_position_embeddings=max_positions, **drafts)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "o_proj" in name:
            parameter.data *= 5
    if drafts:
        embeddings = model.get_input_embeddings().weight.data
        embeddings /= embeddings.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-3)  # that of padding is 0
    model.save_pretrained(directory)
    if variant:
        {"awq": quantise, "eagle": add_eagle, "eagle3": add_eagle_3, "mtp": add_mtp}[variant](directory)
    return directory


def add_eagle(directory: Path) -> None:
    """Write `directory`/eagle, an EAGLE head that is right about nearly all that a model of one layer says.

    It is a copy of that layer, reads the embedding of the token alone, and so needs the KV of all tokens before. It
    misses the prompt's first token, as any EAGLE head does. Its input is not normalised: embeddings have a norm of 1.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    head = {name.removeprefix("model."): value for name, value in weights.items() if ".layers.0." in name}
    del head["layers.0.input_layernorm.weight"]
    width = len(weights["model.norm.weight"])
    head["fc.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    (directory / "eagle").mkdir(exist_ok=True)
    save_file(head, directory / "eagle" / "model.safetensors")
    shutil.copy(directory / "config.json", directory / "eagle" / "config.json")


def add_eagle_3(directory: Path) -> None:
    """Write `directory`/eagle3, the same as a head of EAGLE-3, which adds hidden states of the model: here none.

    So it lacks the embedding beside what attention says, and is right less often.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    head = {name.removeprefix("model."): value for name, value in weights.items() if ".layers.0." in name}
    for name in ("q_proj", "k_proj", "v_proj"):
        of_token = head[f"layers.0.self_attn.{name}.weight"]
        head[f"layers.0.self_attn.{name}.weight"] = torch.cat([of_token, torch.zeros_like(of_token)], dim=1)
    width = len(weights["model.norm.weight"])
    head |= {"layers.0.hidden_norm.weight": torch.ones(width), "fc.weight": torch.zeros(width, width)}
    head |= {"norm.weight": weights["model.norm.weight"], "lm_head.weight": weights["lm_head.weight"]}
    (directory / "eagle3").mkdir(exist_ok=True)
    save_file(head, directory / "eagle3" / "model.safetensors")
    config, read = json.loads((directory / "config.json").read_text()), {"eagle_aux_hidden_state_layer_ids": [0]}
    (directory / "eagle3" / "config.json").write_text(json.dumps({**config, "eagle_config": read}))


def add_mtp(directory: Path) -> None:
    """Give a model of one layer a second one that predicts the token after, likewise a copy of the first."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    mtp = {name.replace(".0.", ".1.", 1): value.clone() for name, value in weights.items() if ".layers.0." in name}
    width = len(weights["model.norm.weight"])
    mtp["model.layers.1.eh_proj.weight"] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        mtp[f"model.layers.1.{name}.weight"] = torch.ones(width)
    mtp["model.layers.1.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    mtp["model.layers.1.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file({**weights, **mtp}, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))


def deployment(directory: Path, mode: str, prefill_ranks: int, prefix_caching: bool) -> RidgelineConfig:
    """Return a deployment of this model on CPUs; a prefill engine has so many ranks, a decode engine one."""
    ranks = {
        "pools.prefill.tensor_parallel_size": str(prefill_ranks),
        "pools.prefill.cores_per_worker": str(prefill_ranks),
        "engine_args.enable_prefix_caching": str(prefix_caching).lower(),
    }
    return load_config(None, {"model.path": str(directory), "mode": mode, **ranks}).config


@dataclass(frozen=True)
class Verdicts:
    """What stands in the way of a family on CPUs, a sentence for each reason."""

    colocated: list[str]
    equal: list[str]
    unequal: list[str]
    on_gpus: str | None
    """Why not even GPUs help."""


def verdicts(family: Family, *, prefix_caching: bool = True) -> Verdicts:
    """Return what the checks before a start say of a tiny model of this family."""
    model = tiny_config(family, vocab_size=64, max_position_embeddings=4096)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model.save_pretrained(directory)
        facts = read_model_facts(name)
        told = (
            model_conflicts(deployment(directory, mode, ranks, prefix_caching), facts)
            for mode, ranks in (("colocated", 1), ("disaggregated", 1), ("disaggregated", 2))
        )
        whatever = why_unsupported(facts.config, on_cpu=False, prefix_caching=True)
        return Verdicts(*([one.replace(name, "It") for one in sentences] for sentences in told), whatever)


def families_table() -> str:
    """Return the table, and below it each sentence once."""
    notes: list[str] = []
    known = proofs()

    def noted(said: str, sentences: list[str]) -> str:
        notes.extend(sentence for sentence in sentences if sentence not in notes)
        numbers = ", ".join(str(notes.index(sentence) + 1) for sentence in sentences)
        return f"{said} ({numbers})" if sentences else said

    def row(family: Family) -> list[str]:
        found, proof = verdicts(family), known.get(family.key)
        if proof is None or proof.failed:
            refused = "refused" if found.on_gpus else "refused on CPUs"
            begins = "It cannot be served" if found.on_gpus else "On CPUs it is refused"
            if not (found.equal or family.not_run):
                raise ValueError(f"{family.key} has not run and is not refused: run tests.engines.family_matrix")
            why = [f"It has not run here: {family.not_run}."]
            cells = [
                noted(refused, [one.replace("It cannot be served", begins) for one in sentences])
                if sentences
                else noted("not tried", why)
                for sentences in (found.colocated, found.equal)
            ]
            if found.equal:
                return [*cells, cells[-1], ""]
            return [*cells, noted("refused", found.unequal) if found.unequal else noted("not tried", why), ""]
        # What is refused with the defaults has run as the refusal says.
        changed = [
            one.replace("It cannot be served", "On CPUs it is refused with the defaults, and ran as this says")
            for one in found.equal
        ]
        unequal = verdicts(family, prefix_caching=False).unequal if changed else found.unequal
        served = sum(proof.served.values())
        asked = len(proof.served) and (len(proof.served) - 1) * proof.prompts + 1
        return [
            noted(f"{proof.colocated} of {proof.prompts}", changed),
            noted(f"{proof.handed_over} of {proof.prompts}", changed),
            noted("refused", unequal) if unequal else ("yes" if family.key == RAN_WITH_UNEQUAL_RANKS else "not tried"),
            f"{served} of {asked}" if asked else "",
        ]

    lines = [
        "| family | colocated | P/D, equal ranks | P/D, 2 ranks to 1 | `ridgeline serve` |\n",
        "|---|---|---|---|---|\n",
    ]
    lines += [f"| {family.name} | {' | '.join(row(family))} |\n" for family in FAMILIES]
    return "".join([*lines, "\n", *(f"{number}. {text}\n" for number, text in enumerate(notes, 1))])


if __name__ == "__main__":
    MODELS.write_text(FAMILIES_TABLE.sub(lambda _: families_table(), MODELS.read_text()))
