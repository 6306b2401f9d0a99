"""Reads the sizes for cost arithmetic from a Hugging Face `config.json` mapping.

This is separate from `ModelShape` because model families spell the same quantity differently, which is knowledge about
files and not about arithmetic.

Known limits: a chunk (Llama 4) is counted as a window of its length, and every compressed entry of DeepSeek-V4 as read,
of which some layers choose a few; both make the figures an upper bound. Draft (MTP) layers, vision towers, projection
biases, query/key norms, and what compresses and chooses (2 % of DeepSeek-V4's active weights) are not counted. Of
recurrent layers Mamba 2 and gated delta nets are covered, without drafts' copies of a state; others are refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.roofline.errors import ModelConfigError

_UNGATED_MLP_MODEL_TYPES = frozenset(
    {"apertus", "arcee", "gpt_neox", "jais2", "nanochat", "nemotron", "nemotron_h", "persimmon", "phi", "starcoder2"}
)
_LAYER_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("full_attention", "attention", "*"), "attention"),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "window"),
    **dict.fromkeys(("linear_attention", "mamba", "M"), "state"),
    **dict.fromkeys(("mlp", "-"), "mlp"),
}
"""What is said of a layer in `layer_types` and `layers_block_type`, and in `hybrid_override_pattern` by one letter."""
_WINDOW_FAMILIES: Mapping[str, int] = {
    **dict.fromkeys(("mistral", "phi3", "starcoder2"), 0),
    **dict.fromkeys(("gemma2", "gpt_oss"), 2),
    **dict.fromkeys(("cohere2", "llama4_text"), 4),
    "gemma3_text": 6,
}
"""Families whose files leave `layer_types` out, and which of their layers read every token: the n-th, 0 for none. From
their classes in transformers; a window of another family counts as full attention, an upper bound."""
_MAMBA_2_HEADS_KEYS = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
_OTHER_LAYERS_KEYS = ("attn_type_list", "linear_attn_config", "lru_width", "mamba_d_state", "ssm_state_size")
"""Keys of models with recurrent layers. Those that also list their layers are judged by that list."""
_NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_OTHER_EXPERTS_KEYS = ("moe_num_experts",)
"""Keys of mixtures of experts whose other keys are not read here."""
_OTHER_MODEL_TYPES: Mapping[str, str] = {
    "hrm_text": "runs its layers several times for a token",
    "jetmoe": "has experts in its attention",
}
"""Families that no key tells from those that are covered."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of `config`: multimodal checkpoints nest it under `text_config`."""
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and "hidden_size" not in config:
        return nested
    return config


def shape_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelShape` but element sizes and name. Raises ModelConfigError naming the key at fault."""
    config = text_config(config)
    _refuse_other_structures(config)
    num_layers = len(config.get("layers_block_type") or ()) or _required(config, "num_hidden_layers")
    hidden_size = _required(config, "hidden_size")
    layers = _layer_fields(config, num_layers, hidden_size)
    has_experts = layers["num_mlp_layers"] == num_layers  # layers that are an MLP alone are dense ones, or refused
    num_q_heads = _required(config, "num_attention_heads")
    mla = _mla_fields(config)
    if config.get("compress_ratios"):  # its queries are of low rank as MLA's are, and its keys are not
        mla["q_lora_rank"] = _required(config, "q_lora_rank")
    mla_head_dim = mla.get("qk_nope_head_dim", 0) + mla.get("qk_rope_head_dim", 0)
    return {
        "num_layers": num_layers,
        **layers,
        "hidden_size": hidden_size,
        "num_q_heads": num_q_heads,
        "num_kv_heads": _optional(config, "num_key_value_heads") or num_q_heads,
        "head_dim": mla_head_dim or _optional(config, "head_dim") or hidden_size // num_q_heads,
        "intermediate_size": _optional(config, "intermediate_size_mlp", "shared_intermediate_size")
        or _required(config, "intermediate_size"),
        "vocab_size": _required(config, "vocab_size"),
        # Transformers 4 leaves this key out of the file exactly when it has the base class's default, True.
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        "mlp_matrices": 2 if config.get("model_type") in _UNGATED_MLP_MODEL_TYPES else 3,
        **(_moe_fields(config, num_layers) if has_experts else {}),
        **mla,
        "o_lora_rank": _optional(config, "o_lora_rank"),
        "o_groups": _optional(config, "o_groups"),
        "kv_states_per_token": _states_per_token(config, num_layers),
    }


def _states_per_token(config: Mapping[str, Any], num_layers: int) -> float:
    """Return how many entries of the cache a token adds, averaged over the layers: below 1 where they are compressed.

    A ratio of 0 is a window alone, whose few entries do not grow with the context.
    """
    ratios = config.get("compress_ratios")
    if not ratios:
        return 1.0
    if len(ratios) < num_layers:
        raise ModelConfigError("compress_ratios", f"has {len(ratios)} entries for {num_layers} layers")
    return float(sum(1 / ratio for ratio in ratios[:num_layers] if ratio) / num_layers)


def _moe_fields(config: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    if config.get("is_moe") is False:  # Doge names its experts in dense models too
        return {}
    for key in (*_OTHER_EXPERTS_KEYS, "is_moe"):
        if config.get(key):
            raise ModelConfigError(key, "is of a mixture of experts that this arithmetic does not cover")
    num_experts = _optional(config, *_NUM_EXPERTS_KEYS)
    if num_experts <= 1:
        return {}
    expert_width = _required(config, "moe_intermediate_size", "intermediate_size")
    shared_width = _optional(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    return {
        "num_experts": num_experts,
        "experts_per_token": _required(config, "num_experts_per_tok", "experts_per_token"),
        "moe_intermediate_size": expert_width,
        "num_shared_experts": _num_shared_experts(config) or shared_width // expert_width,
        "num_dense_layers": _num_dense_layers(config, num_layers),
    }


def _num_shared_experts(config: Mapping[str, Any]) -> int:
    """Return the experts that every token passes through; Llama 4 has one and does not say so."""
    return 1 if config.get("model_type") == "llama4_text" else _optional(config, "n_shared_experts")


def _num_dense_layers(config: Mapping[str, Any], num_layers: int) -> int:
    """Return how many layers of a mixture of experts keep a dense MLP (DeepSeek's first ones, Qwen's listed ones)."""
    num_leading = _optional(config, "first_k_dense_replace")
    sparse_step = _optional(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    listed = frozenset(config.get("mlp_only_layers") or ())
    return sum(
        1 for layer in range(num_layers) if layer < num_leading or layer in listed or (layer + 1) % sparse_step != 0
    )


def _mla_fields(config: Mapping[str, Any]) -> dict[str, int]:
    kv_lora_rank = _optional(config, "kv_lora_rank")
    if not kv_lora_rank:
        return {}
    heads = {name: _required(config, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    return {"kv_lora_rank": kv_lora_rank, "q_lora_rank": _optional(config, "q_lora_rank"), **heads}


def _layer_fields(config: Mapping[str, Any], num_layers: int, hidden_size: int) -> dict[str, Any]:
    """Return how many layers have attention, a window, a state, an MLP, and what a window and a state are."""
    kinds = _layer_kinds(config, num_layers)
    windows, states = kinds["window"], kinds["state"]
    return {
        "num_attention_layers": kinds["attention"] + windows,
        "num_mlp_layers": kinds["mlp"] or num_layers,
        "num_window_layers": windows,
        "window_tokens": _window_tokens(config) if windows else 0,
        "num_state_layers": states,
        **(_state_fields(config, hidden_size) if states else {}),
    }


def _layer_kinds(config: Mapping[str, Any], num_layers: int) -> Counter[str]:
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if listed := config.get(key):
            return _listed_kinds(config, key, listed, num_layers)
    model_type = str(config.get("model_type"))
    if model_type == "falcon_h1":  # each layer has both, side by side
        return Counter(attention=num_layers, state=num_layers)
    for key in _OTHER_LAYERS_KEYS:
        if config.get(key):
            raise ModelConfigError(key, "is of recurrent layers, which this arithmetic does not cover")
    if model_type not in _WINDOW_FAMILIES or not _window_tokens(config):
        return Counter(attention=num_layers)
    every = config.get("sliding_window_pattern") or _WINDOW_FAMILIES[model_type]
    full = num_layers // every if every else 0
    return Counter(attention=full, window=num_layers - full)


def _listed_kinds(config: Mapping[str, Any], key: str, listed: Sequence[str], num_layers: int) -> Counter[str]:
    covered = any(config.get(one) for one in ("linear_num_key_heads", *_MAMBA_2_HEADS_KEYS))
    known = {one for one, kind in _LAYER_KINDS.items() if covered or kind != "state"}
    if foreign := sorted(set(listed) - known):
        raise ModelConfigError(key, f"has layers this arithmetic does not cover: {', '.join(foreign)}")
    if len(listed) < num_layers:
        raise ModelConfigError(key, f"has {len(listed)} entries for {num_layers} layers")
    return Counter(_LAYER_KINDS[one] for one in listed[:num_layers])


def _window_tokens(config: Mapping[str, Any]) -> int:
    return _optional(config, "sliding_window", "attention_chunk_size")


def _state_fields(config: Mapping[str, Any], hidden_size: int) -> dict[str, Any]:
    """Return the matrices and the state of one layer, as vLLM's `MambaStateShapeCalculator` shapes it.

    Gated delta nets project a token to queries, keys, values, a gate and two numbers a head; Mamba 2 to values, a gate,
    what writes and what reads for each group, and one number a head.
    """
    if config.get("linear_num_key_heads"):
        heads = _required(config, "linear_num_value_heads")
        key_width = _required(config, "linear_num_key_heads") * _required(config, "linear_key_head_dim")
        inner = heads * _required(config, "linear_value_head_dim")
        elements = inner * _required(config, "linear_key_head_dim")
        convolved, projected, flops = 2 * key_width + inner, 2 * key_width + 2 * inner + 2 * heads, 6
    else:
        heads = _required(config, *_MAMBA_2_HEADS_KEYS)
        inner = heads * _required(config, "mamba_d_head", "mamba_head_dim")
        width = _required(config, "mamba_d_state", "ssm_state_size")
        convolved = inner + 2 * _required(config, "mamba_n_groups", "n_groups") * width
        elements, projected, flops = inner * width, convolved + inner + heads, 4
    kernel = _required(config, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel")
    told = config.get("mamba_ssm_cache_dtype") or config.get("mamba_ssm_dtype")
    wide = told == "float32" or (told is None and config.get("model_type") == "nemotron_h")  # vLLM's default of it
    return {
        "state_layer_params": hidden_size * (projected + inner) + convolved * kernel,
        "state_elements": elements,
        "conv_elements": convolved * (kernel - 1),
        "state_bytes_per_element": 4.0 if wide else 0.0,
        "state_flops_per_element": flops,
        "gates_output": bool(config.get("attn_output_gate", "linear_num_key_heads" in config)),
    }


def _refuse_other_structures(config: Mapping[str, Any]) -> None:
    model_type = str(config.get("model_type"))
    if model_type in _OTHER_MODEL_TYPES:
        problem = f"is {model_type}, which {_OTHER_MODEL_TYPES[model_type]}: this arithmetic does not cover that"
        raise ModelConfigError("model_type", problem)
    if config.get("hidden_size_per_layer_input"):
        raise ModelConfigError(
            "hidden_size_per_layer_input", "is of embeddings for each layer, which this arithmetic does not cover"
        )


def _required(config: Mapping[str, Any], *spellings: str) -> int:
    value = _optional(config, *spellings)
    if not value:
        raise ModelConfigError(" or ".join(spellings), "is missing")
    return value


def _optional(config: Mapping[str, Any], *spellings: str) -> int:
    """Return the first key present, or 0; configs write an absent quantity as null, 0 or no key."""
    for key in spellings:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or value < 0:
            raise ModelConfigError(key, f"must be a whole number that is not negative, not {value!r}")
        return value
    return 0
