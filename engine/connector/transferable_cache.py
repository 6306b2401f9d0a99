"""What a KV cache must look like to be handed off, judged by vLLM's own description of it.

A hand-off is one list of blocks, in which every layer's part of a block belongs to the same tokens. So there may be
only one group of layers with one block table, and it must keep every token: full attention, or a latent cache (MLA).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    group_kernel_blocks,
)

from ridgeline.engine.connector.transferable_models import ONLY_COLOCATED, UnsupportedModel

EVERY_TOKEN: Final = (FullAttentionSpec, MLAAttentionSpec)
NEAREST_TOKENS: Final = (SlidingWindowSpec, ChunkedLocalAttentionSpec)


def require_servable(cache: KVCacheConfig, *, block_size: int, max_model_len: int, hands_over: bool) -> None:
    """Raise UnsupportedModel if this cache cannot be served; the message names the kind of layers that prevents it.

    `hands_over` says whether this engine's blocks go to another one; in mode colocated they do not.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) != 1:
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise UnsupportedModel(
            f"the KV cache of this model has {len(specs)} groups of layers ({kinds}), each with blocks of its own, and "
            "only models with one are supported"
        )
    [spec] = specs
    kind = type(spec)
    if kind not in (*EVERY_TOKEN, *NEAREST_TOKENS):
        raise UnsupportedModel(f"the KV cache of this model is of an unsupported kind ({kind.__name__})")
    if not hands_over:
        return
    if kind in NEAREST_TOKENS and not _covers(spec, max_model_len):
        raise UnsupportedModel(
            f"no layer of this model keeps the KV of every token ({kind.__name__}, {_reach_tokens(spec)} tokens), and "
            f"what is given back cannot be handed over{ONLY_COLOCATED}"
        )
    if spec.block_size != block_size:
        raise UnsupportedModel(
            f"the KV blocks of this model's layers have {spec.block_size} tokens, and the engine counts in blocks of "
            f"{block_size}"
        )


def _reach_tokens(spec: Any) -> int:
    return int(spec.sliding_window if isinstance(spec, SlidingWindowSpec) else spec.attention_chunk_size)


def _covers(spec: KVCacheSpec, max_model_len: int) -> bool:
    """Return whether the window is as long as any request, so that no block is ever given back."""
    return isinstance(spec, SlidingWindowSpec) and _reach_tokens(spec) >= max_model_len


def by_manager_block(caches: dict[str, torch.Tensor], num_blocks: int) -> dict[str, torch.Tensor]:
    """View the layers' caches with the scheduler's blocks as their first dimension.

    A backend may use smaller blocks than the scheduler counts in. vLLM then gives views whose first dimension is a
    multiple of `num_blocks`. Raises UnsupportedModel if layers differ in size or blocks do not divide evenly.
    """
    shapes = {tuple(cache.shape[1:]) for cache in caches.values()}
    if len(shapes) > 1:
        raise UnsupportedModel(f"the layers of this model have KV blocks of different shapes, {sorted(shapes)}")
    grouped = {}
    for name, cache in caches.items():
        if cache.shape[0] % num_blocks:
            raise UnsupportedModel(f"{name} has {cache.shape[0]} blocks, which is not a multiple of {num_blocks}")
        grouped[name] = group_kernel_blocks(cache, num_blocks)
    return grouped


def heads_are_runs(cache: torch.Tensor, spec: Any, layout: str) -> bool:
    """Return whether adjacent KV heads lie together in a block, so that ranks can divide it by slicing.

    They do not if tokens come before heads, if a block consists of smaller ones, or if all keys precede all values.
    """
    return (
        layout in ("LBHNC", "BLHNC")
        and cache.dim() == 4
        and getattr(spec, "num_head_slots", None) is None
        and not isinstance(spec, MLAAttentionSpec)
        and cache.shape[1] == spec.num_kv_heads
    )
