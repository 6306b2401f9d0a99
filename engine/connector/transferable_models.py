"""Which models can be served, judged by the model's configuration before an engine loads.

Checked before the start for a model on disk, and for any other once its configuration is there. As the last line of
defence, `ridgeline.engine.connector.groups` judges the cache itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

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
MAMBA_2_KEYS: Final = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
ATTENTION: Final = frozenset({"full_attention", "attention", "sliding_attention", "chunked_attention"})


class UnsupportedModel(ValueError):
    """This model cannot be served as configured; the message names the property and the fix."""


def why_unsupported(
    config: Mapping[str, Any], *, on_cpu: bool, prefix_caching: bool, speculates: bool = False
) -> str | None:
    """Return which property prevents this model from being served, and the fix; None if none is known.

    `config` is the content of `config.json`, or vLLM's version of it. `speculates`: whether engines that exchange KV
    draft tokens.
    """
    text = _text(config)
    if config.get("is_encoder_decoder"):
        return "it has an encoder, whose output the decoder reads, and which is not in the KV blocks"
    if text.get("compress_ratios") or text.get("compress_rates"):
        return "its layers keep one entry for several tokens, and not all for as many, in groups of blocks of their own"
    if text.get("index_topk"):
        return (
            f"its sparse attention (index_topk {text['index_topk']}) keeps an index beside the KV, in blocks of "
            "another size"
        )
    sizes = {layer.get("head_dim") for layer in (text.get("per_layer_config") or {}).values()}
    if any(sizes) and keeps_every_token(config):
        named = " and ".join(str(size) for size in sorted(filter(None, {*sizes, text.get("head_dim")})))
        return f"its layers have heads of different sizes ({named}), and so blocks of different sizes"
    if speculates and keeps_states(config):
        return (
            "its layers keep recurrent states, of which vLLM has a copy for each drafted token, while a transfer "
            "brings one: leave out speculative_config, or serve it in mode colocated"
        )
    return _why_not_on_cpu(text, prefix_caching=prefix_caching) if on_cpu and keeps_states(config) else None


def _why_not_on_cpu(text: Mapping[str, Any], *, prefix_caching: bool) -> str | None:
    if text.get("mamba_dt_rank") or text.get("model_type") in ("mamba", "falcon_mamba"):
        return "vLLM's build for CPUs has no kernel for its Mamba layers: serve it on GPUs"
    if text.get("conv_L_cache"):
        # LFM 2, float32, one sequence at a time: 12 of 20 answers of plain vLLM are others in steps of 40 than of 1024.
        return (
            "vLLM's build for CPUs computes its short convolutions wrongly if a prompt takes several steps: serve it "
            "on GPUs"
        )
    if prefix_caching and any(text.get(key) for key in MAMBA_2_KEYS):
        return (
            "vLLM's prefix caching fails with its Mamba 2 layers on CPUs: set engine_args.enable_prefix_caching to "
            "false, or serve it on GPUs"
        )
    return None


def keeps_states(config: Mapping[str, Any]) -> bool:
    """Return whether some layers keep a recurrent state instead of each token's keys and values."""
    text = _text(config)
    kinds = set(text.get("layer_types") or ())
    return not kinds <= ATTENTION if kinds else any(text.get(key) for key in RECURRENT_KEYS)


def keeps_every_token(config: Mapping[str, Any]) -> bool:
    """Return whether all layers keep every token: what a token takes in the cache is then the same at any length."""
    text = _text(config)
    window = text.get("use_sliding_window") is not False and text.get("sliding_window")
    return not (window or text.get("attention_chunk_size") or keeps_states(config))


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}
