"""Which models' KV can be handed off, judged by the model's configuration before an engine loads.

Checked before the start for a model on disk, and for any other once its configuration is there. As the last line of
defence, `ridgeline.engine.connector.transferable_cache` judges the cache itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ATTENTION: Final = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention"})
LOCAL_ATTENTION: Final = frozenset({"sliding_attention", "chunked_attention"})
"""Layers that see only the nearest tokens. Beside layers that see all tokens, vLLM keeps every token for these too."""
RECURRENT_KEYS: Final = (
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "mamba_expand",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_key_heads",
    "conv_L_cache",
)
"""Keys in the configurations of models with recurrent layers, and of no others."""
MIXES_WINDOWS: Final = ("layer_types", "sliding_window_pattern", "max_window_layers", "_sliding_window_pattern")
MIXED_TYPES: Final = frozenset({"gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss"})
"""Models with alternating kinds of layers; their older configuration files do not say so."""
ONLY_COLOCATED: Final = ": serve it with mode colocated, where nothing is handed over"


class UnsupportedModel(ValueError):
    """This model cannot be served as configured; the message names the property and the fix."""


def why_unsupported(config: Mapping[str, Any], *, max_model_len: int, hands_over: bool) -> str | None:
    """Return which property prevents this model from being served, and the fix; None if none is known.

    `config` is the content of `config.json`, or vLLM's version of it. Without hand-offs (mode colocated) more models
    work.
    """
    text = {**config, **(config.get("text_config") or {})}
    kinds = set(text.get("layer_types") or ())
    if config.get("is_encoder_decoder"):
        return "it has an encoder, whose output the decoder reads, and which is not in the KV blocks"
    other = _why_other_cache(text, kinds)
    if other is not None:
        return other
    strange = sorted(kinds - ATTENTION)
    if strange or (not kinds and any(text.get(key) for key in RECURRENT_KEYS)):
        named = ", ".join(strange) or next(key for key in RECURRENT_KEYS if text.get(key))
        return f"some of its layers keep a recurrent state instead of each token's keys and values ({named})"
    return _why_only_windows(text, kinds, max_model_len) if hands_over else None


def _why_other_cache(text: Mapping[str, Any], kinds: set[str]) -> str | None:
    """Return the reason if layers keep KV in other shapes than one block of a token's heads in each."""
    if text.get("compress_ratios") or text.get("compress_rates"):
        return "its layers keep one entry for several tokens, and not all for as many, in groups of blocks of their own"
    if text.get("index_topk"):
        return (
            f"its sparse attention (index_topk {text['index_topk']}) keeps an index beside the KV, in blocks of "
            "another size"
        )
    sizes = _head_sizes(text, kinds)
    if len(sizes) > 1:
        named = " and ".join(map(str, sorted(sizes)))
        return f"its layers have heads of different sizes ({named}), and so blocks of different sizes"
    return None


def _head_sizes(text: Mapping[str, Any], kinds: set[str]) -> set[int]:
    """Return the sizes of KV heads where layers differ in them (Gemma 4), else at most one."""
    own = {layer.get("head_dim") for layer in (text.get("per_layer_config") or {}).values()}
    if len(kinds) > 1:
        own.add(text.get("global_head_dim"))
    return {size for size in (*own, text.get("head_dim")) if size}


def _why_only_windows(text: Mapping[str, Any], kinds: set[str], max_model_len: int) -> str | None:
    """Return the reason if every layer is local: blocks are then given back during a request and cannot be read."""
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    if not window or text.get("use_sliding_window") is False or window >= max_model_len:
        return None
    mixed = any(text.get(key) for key in MIXES_WINDOWS) or text.get("model_type") in MIXED_TYPES
    if not (kinds <= LOCAL_ATTENTION if kinds else not mixed):
        return None
    return (
        f"every layer has a sliding window of {window} tokens, and a prompt's blocks outside it are given back before "
        f"they could be handed over; set model.max_model_len to at most {window}, or{ONLY_COLOCATED[1:]}"
    )
