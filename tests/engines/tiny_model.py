"""A small random model whose heads can be split: the default model has three KV heads, which no two ranks can share.

Its weights are large enough that attention decides which token comes next; with the usual small ones every answer would
follow from the last token alone, and a test of the KV cache would show nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.model_store import prepare_model

NUM_LAYERS = 4
NUM_ATTENTION_HEADS = 8
NUM_KV_HEADS = 4
HEAD_DIM = 64
SEED = 11


def make_tiny_model(directory: Path, tokenizer: Any, dtype: str, max_positions: int) -> Path:
    """Write configuration, weights and tokenizer; the same bytes every time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=NUM_ATTENTION_HEADS * HEAD_DIM,
        intermediate_size=1024,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_ATTENTION_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_positions,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        dtype=dtype,
    )
    torch.manual_seed(SEED)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_tiny_model_like(config: RidgelineConfig, directory: Path, max_positions: int) -> Path:
    """The same with the tokenizer of a configured model, in its number format."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare_model(config.model.path))
    return make_tiny_model(directory, tokenizer, resolve_dtype(config), max_positions)


WINDOW_TOKENS = 128
FAMILIES = ("gemma3", "gpt_oss", "mistral", "qwen3_next", "deepseek_mla")
"""Layers that a Llama does not have; each is made small by `make_family`."""


def make_family(name: str, directory: Path, vocabulary_tokens: int = 512, max_positions: int = 2048) -> Path:
    """A random float32 model of one of `FAMILIES`, or a Llama, without a tokenizer; the same bytes every time."""
    import torch
    import transformers

    common: dict[str, Any] = {
        "vocab_size": vocabulary_tokens,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if name == "gemma3":
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        own = {"num_hidden_layers": 6, "layer_types": kinds, "sliding_window": WINDOW_TOKENS}
        config = transformers.Gemma3TextConfig(**common, **own, query_pre_attn_scalar=32)
    elif name == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * 2
        own = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": WINDOW_TOKENS}
        config = transformers.GptOssConfig(**common, **own, num_local_experts=4, num_experts_per_tok=2)
    elif name == "qwen3_next":
        states = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 128}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        own = {"num_hidden_layers": 4, "layer_types": kinds, "shared_expert_intermediate_size": 64}
        shape = {**common, "head_dim": 256, "linear_value_head_dim": 128}
        config = transformers.Qwen3NextConfig(**shape, **states, **experts, **own)
    elif name == "llama":
        config = transformers.LlamaConfig(**common, num_hidden_layers=2)
    elif name == "mistral":
        config = transformers.MistralConfig(**common, num_hidden_layers=3, sliding_window=WINDOW_TOKENS)
    else:
        heads = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        layers = {"num_hidden_layers": 2, "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
        groups = {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "num_key_value_heads": 4, "head_dim": 64}
        config = transformers.DeepseekV3Config(**{**common, **groups}, **heads, **layers)
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if "o_proj" in parameter_name:
            parameter.data *= 5
    model.save_pretrained(directory)
    return directory
