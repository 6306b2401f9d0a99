"""Which models' KV can be handed over, judged by the model's own configuration before an engine loads.

Called by `cluster.doctor.model_support` for a model on disk, and by `engine.vllm_engine` for any model, once its
configuration is there. `engine.connector.transferable_cache` judges the cache itself, as the last line of defence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ATTENTION: Final = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention"})
LOCAL_ATTENTION: Final = frozenset({"sliding_attention", "chunked_attention"})
"""Layers that see only the nearest tokens. Beside others that see all of them vLLM keeps every token for these too."""
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
"""Found in the configurations of models with recurrent layers, and in no others."""
MIXES_WINDOWS: Final = ("layer_types", "sliding_window_pattern", "max_window_layers", "_sliding_window_pattern")
MIXED_TYPES: Final = frozenset({"gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss"})
"""Models whose layers alternate; older files of theirs do not say so."""
ONLY_COLOCATED: Final = ": serve it with mode colocated, where nothing is handed over"


class UnsupportedModel(ValueError):
    """This model cannot be served as configured; the message names the property and the fix."""


def model_obstacle(config: Mapping[str, Any], *, max_model_len_tokens: int, hands_over: bool) -> str | None:
    """Which property keeps this model from being served, and what helps; None if nothing is known to.

    `config` is the contents of `config.json`, or vLLM's idea of it. Without a hand-over (mode colocated) more is right.
    """
    text = {**config, **(config.get("text_config") or {})}
    kinds = set(text.get("layer_types") or ())
    if config.get("is_encoder_decoder"):
        return "it has an encoder and a decoder, and what the decoder reads of the encoder is not in the KV blocks"
    strange = sorted(kinds - ATTENTION)
    if strange or (not kinds and any(text.get(key) for key in RECURRENT_KEYS)):
        named = ", ".join(strange) or next(key for key in RECURRENT_KEYS if text.get(key))
        return f"some of its layers keep a recurrent state instead of each token's keys and values ({named})"
    if text.get("index_topk"):
        return (
            f"its sparse attention (index_topk {text['index_topk']}) keeps an index beside the KV, in blocks of "
            "another size"
        )
    return _window_obstacle(text, kinds, max_model_len_tokens) if hands_over else None


def _window_obstacle(text: Mapping[str, Any], kinds: set[str], max_model_len_tokens: int) -> str | None:
    """Where every layer is local, blocks are given back in the middle of a request, and nothing can read them then."""
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    if not window or text.get("use_sliding_window") is False or window >= max_model_len_tokens:
        return None
    mixed = any(text.get(key) for key in MIXES_WINDOWS) or text.get("model_type") in MIXED_TYPES
    if not (kinds <= LOCAL_ATTENTION if kinds else not mixed):
        return None
    return (
        f"every layer has a sliding window of {window} tokens, and a prompt's blocks outside it are given back before "
        f"they could be handed over; set model.max_model_len_tokens to at most {window}, or{ONLY_COLOCATED[1:]}"
    )
