"""Shapes of well-known models, so that a roofline needs no download.

Each entry has exactly the keys of the model's Hugging Face `config.json` that `hf_config` reads. So there is only one
way to make a shape, and an entry can be checked against the published file: its source is `config.json` of the
repository of that name on huggingface.co, whose organisation stands beside the entry. A test compares the totals with
those that the model cards give.
"""

from collections.abc import Mapping
from typing import Any


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, head_dim: int = 0, tied: bool = False
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "head_dim": head_dim or hidden // heads,
        "tie_word_embeddings": tied,
    }


def _mixture(dense: dict[str, Any], experts: int, per_token: int, expert_mlp: int) -> dict[str, Any]:
    return dense | {"num_experts": experts, "num_experts_per_tok": per_token, "moe_intermediate_size": expert_mlp}


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    dense = _dense(layers, 2880, 64, 8, 2880, 201088, head_dim=64)
    return _mixture(dense, experts, 4, 2880) | {"model_type": "gpt_oss", "sliding_window": 128}


def _gemma_3(layers: int, hidden: int, heads: int, mlp: int, head_dim: int) -> dict[str, Any]:
    dense = _dense(layers, hidden, heads, heads // 2, mlp, 262208, head_dim, tied=True)
    return dense | {"model_type": "gemma3_text", "sliding_window": 1024}


def _latent(
    dense: dict[str, Any], experts: int, dense_layers: int, q_rank: int = 1536, nope: int = 128, value: int = 128
) -> dict[str, Any]:
    """Return DeepSeek-V3's layer structure, which Kimi-K2 and GLM-5 use with other counts; indexers are left out."""
    return _mixture(dense, experts, 8, 2048) | {
        "n_shared_experts": 1,
        "first_k_dense_replace": dense_layers,
        "kv_lora_rank": 512,
        "q_lora_rank": q_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": 64,
        "v_head_dim": value,
    }


def _deepseek_v4(
    layers: int, hidden: int, heads: int, experts: int, expert_mlp: int, q_rank: int, groups: int, first: int
) -> dict[str, Any]:
    """Return DeepSeek-V4's structure: one vector a token that is key and value, kept for 4 or 128 tokens together.

    `first` is the ratio of the first two layers (0: a window alone); then ratios 4 and 128 alternate.
    """
    ratios = [first, first] + [4 if layer % 2 == 0 else 128 for layer in range(2, layers)]
    return _mixture(_dense(layers, hidden, heads, 1, expert_mlp, 129280, head_dim=512), experts, 6, expert_mlp) | {
        "n_shared_experts": 1,
        "q_lora_rank": q_rank,
        "o_lora_rank": 1024,
        "o_groups": groups,
        "compress_ratios": ratios,
    }


def _glm_moe(layers: int, hidden: int, mlp: int, experts: int, expert_mlp: int, dense_layers: int) -> dict[str, Any]:
    return _mixture(_dense(layers, hidden, 96, 8, mlp, 151552, head_dim=128), experts, 8, expert_mlp) | {
        "n_shared_experts": 1,
        "first_k_dense_replace": dense_layers,
    }


KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m": _dense(30, 576, 9, 3, 1536, 49152, tied=True),
    "smollm2-360m": _dense(32, 960, 15, 5, 2560, 49152, tied=True),
    "smollm2-1.7b": _dense(24, 2048, 32, 32, 8192, 49152, tied=True),
    "llama-2-7b": _dense(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _dense(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _dense(80, 8192, 64, 8, 28672, 32000),
    "llama-3.1-8b": _dense(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _dense(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": _dense(126, 16384, 128, 8, 53248, 128256),
    "llama-3.2-1b": _dense(16, 2048, 32, 8, 8192, 128256, tied=True),
    "qwen3-0.6b": _dense(28, 1024, 16, 8, 3072, 151936, head_dim=128, tied=True),
    "qwen3-8b": _dense(36, 4096, 32, 8, 12288, 151936),
    "qwen3-32b": _dense(64, 5120, 64, 8, 25600, 151936, head_dim=128),
    "qwen3-30b-a3b": _mixture(_dense(48, 2048, 32, 4, 6144, 151936, head_dim=128), 128, 8, 768),
    "qwen3-235b-a22b": _mixture(_dense(94, 4096, 64, 4, 12288, 151936, head_dim=128), 128, 8, 1536),
    "mixtral-8x7b": _mixture(_dense(32, 4096, 32, 8, 14336, 32000), 8, 2, 14336),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "deepseek-v3": _latent(_dense(61, 7168, 128, 128, 18432, 129280), 256, dense_layers=3),
    "kimi-k2": _latent(_dense(61, 7168, 64, 64, 18432, 163840), 384, dense_layers=1),
    "deepseek-v4-pro": _deepseek_v4(61, 7168, 128, 384, 3072, 1536, 16, first=128),  # deepseek-ai
    "deepseek-v4-flash": _deepseek_v4(43, 4096, 64, 256, 2048, 1024, 8, first=0),  # deepseek-ai
    "glm-4.5": _glm_moe(92, 5120, 12288, 160, 1536, dense_layers=3),  # zai-org
    "glm-4.5-air": _glm_moe(46, 4096, 10944, 128, 1408, dense_layers=1),  # zai-org
    "glm-5": _latent(_dense(78, 6144, 64, 64, 12288, 154880), 256, 3, q_rank=2048, nope=192, value=256),  # zai-org
    "minimax-m2": _mixture(_dense(62, 3072, 48, 8, 1536, 200064, head_dim=128), 256, 8, 1536),  # MiniMaxAI
    "llama-4-scout": _mixture(_dense(48, 5120, 40, 8, 16384, 202048), 16, 1, 8192)
    | {"n_shared_experts": 1, "model_type": "llama4_text", "attention_chunk_size": 8192},  # meta-llama
    "qwen3-1.7b": _dense(28, 2048, 16, 8, 6144, 151936, head_dim=128, tied=True),  # Qwen
    "qwen3-4b": _dense(36, 2560, 32, 8, 9728, 151936, head_dim=128, tied=True),  # Qwen
    "qwen3-14b": _dense(40, 5120, 40, 8, 17408, 151936, head_dim=128),  # Qwen
    "qwen3-coder-480b-a35b": _mixture(_dense(62, 6144, 96, 8, 8192, 151936, head_dim=128), 160, 8, 2560),  # Qwen
    "gpt-oss-20b": _gpt_oss(24, 32),  # openai
    "gemma-3-4b": _gemma_3(34, 2560, 8, 10240, 256),  # google
    "gemma-3-12b": _gemma_3(48, 3840, 16, 15360, 256),  # google
    "gemma-3-27b": _gemma_3(62, 5376, 32, 21504, 128),  # google
    "qwen3-next-80b-a3b": _mixture(_dense(48, 2048, 16, 2, 5120, 151936, head_dim=256), 512, 10, 512)
    | {
        "shared_expert_intermediate_size": 512,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },  # Qwen
    "nemotron-h-8b": _dense(52, 4096, 32, 8, 21504, 131072, head_dim=128)
    | {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
    },  # nvidia
    "mistral-small-24b": _dense(40, 5120, 32, 8, 32768, 131072, head_dim=128),  # mistralai
    "mixtral-8x22b": _mixture(_dense(56, 6144, 48, 8, 16384, 32768), 8, 2, 16384),  # mistralai
}
