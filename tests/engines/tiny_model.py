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
