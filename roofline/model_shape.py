"""The sizes of one decoder-only transformer, and the byte and parameter counts derived from them.

The rest of this package takes a `ModelShape`; nothing else knows how a layer is built.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.roofline.errors import ModelConfigError, UnknownNameError
from ridgeline.roofline.hf_config import shape_fields
from ridgeline.roofline.known_models import KNOWN_MODELS
from ridgeline.roofline.quantisation import weight_bytes_per_param as weight_bytes_per_param_of

_CHECKPOINT_SUFFIXES = ("-hf", "-instruct", "-chat", "-base")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model. Counts are exact for Llama-like models; `hf_config` says what is left out.

    `num_experts` is 0 for a dense model; `kv_lora_rank` is 0 without multi-head latent attention (MLA).
    `num_dense_layers` and `num_shared_experts` matter only when `num_experts` is not 0. A layer may have attention, a
    recurrent state and an MLP, or only one of them.
    """

    name: str
    num_layers: int
    num_attention_layers: int
    num_mlp_layers: int
    hidden_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    weight_bytes_per_param: float = 2.0
    kv_bytes_per_element: float = 2.0
    mlp_matrices: int = 3
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    o_lora_rank: int = 0
    """Rank of each of `o_groups` groups of the output projection; above 0 (DeepSeek-V4) a key is also its value."""
    o_groups: int = 0
    gates_output: bool = False
    """Whether a gate as wide as the queries multiplies what attention makes (Qwen 3 Next)."""
    kv_states_per_token: float = 1.0
    """Entries that a token adds to a layer's cache, on average: below 1 where one stands for several tokens."""

    num_window_layers: int = 0
    """Those of the layers with attention whose tokens read the last `window_tokens` only, their own included."""
    window_tokens: int = 0
    num_state_layers: int = 0
    state_layer_params: int = 0
    """Matrix weights of one layer with a state: its projections in and out, and its convolution."""
    state_elements: int = 0
    """Of one layer's recurrent state."""
    conv_elements: int = 0
    """Of its convolution's last inputs, which are kept in the format of KV."""
    state_bytes_per_element: float = 0.0
    """0: the format of KV."""
    state_flops_per_element: int = 0
    """What one token computes for each element of the state."""

    def __post_init__(self) -> None:
        if not self.is_mla and self.num_q_heads % self.num_kv_heads:
            problem = f"is {self.num_kv_heads}, which does not divide {self.num_q_heads} query heads"
            raise ModelConfigError("num_key_value_heads", problem)
        if self.experts_per_token > self.num_experts:
            raise ModelConfigError("num_experts_per_tok", f"is larger than the number of experts, {self.num_experts}")

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        weight_bytes_per_param: float,
        kv_bytes_per_element: float,
        name: str,
    ) -> "ModelShape":
        """Build a shape from a Hugging Face config mapping. Raises ModelConfigError naming the key at fault."""
        return cls(
            name=name,
            weight_bytes_per_param=weight_bytes_per_param,
            kv_bytes_per_element=kv_bytes_per_element,
            **shape_fields(config),
        )

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention (MLA)."""
        return self.kv_lora_rank > 0

    @property
    def num_moe_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def kv_elements_per_token_layer(self) -> int:
        """KV elements of an entry in one layer: K and V of each head, K alone, or MLA's latent vector and rope."""
        if self.is_mla:
            return self.kv_lora_rank + self.qk_rope_head_dim
        if self.o_lora_rank:
            return self.num_kv_heads * self.head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one token over all layers: 2 * layers * kv_heads * head_dim * bytes (PagedAttention paper)."""
        return self.num_attention_layers * self._kv_bytes_per_token_layer

    @property
    def window_bytes_per_token(self) -> float:
        """Those of them in layers with a window."""
        return self.num_window_layers * self._kv_bytes_per_token_layer

    @property
    def state_bytes(self) -> float:
        """Bytes of one sequence's recurrent states, as many after one token as after a million."""
        recurrent = self.state_elements * (self.state_bytes_per_element or self.kv_bytes_per_element)
        return self.num_state_layers * (recurrent + self.conv_elements * self.kv_bytes_per_element)

    def kv_bytes(self, tokens: int) -> float:
        """Return the bytes that a sequence of so many tokens keeps: all tokens, those of windows, and states."""
        left = max(0, tokens - self.window_tokens)
        return self.kv_bytes_per_token * tokens - self.window_bytes_per_token * left + self.state_bytes

    @property
    def _kv_bytes_per_token_layer(self) -> float:
        return self.kv_elements_per_token_layer * self.kv_states_per_token * self.kv_bytes_per_element

    @property
    def attention_matrix_params(self) -> int:
        """Weights of one layer's attention projections that take part in matrix products."""
        hidden, heads = self.hidden_size, self.num_q_heads
        if self.gates_output:
            return hidden * self.head_dim * (3 * heads + 2 * self.num_kv_heads)
        if self.o_lora_rank:
            width = heads * self.head_dim
            query = (hidden + width) * self.q_lora_rank
            return query + hidden * self.head_dim + (width + self.o_groups * hidden) * self.o_lora_rank
        if not self.is_mla:
            return hidden * self.head_dim * (2 * heads + 2 * self.num_kv_heads)
        query_width = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        query = (hidden + query_width) * self.q_lora_rank if self.q_lora_rank else hidden * query_width
        down = hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + down + up + heads * self.v_head_dim * hidden

    @property
    def dense_mlp_params(self) -> int:
        """Weights of one layer's dense MLP."""
        return self.mlp_matrices * self.hidden_size * self.intermediate_size

    @property
    def expert_params(self) -> int:
        """Weights of one expert of one layer."""
        return self.mlp_matrices * self.hidden_size * self.moe_intermediate_size

    @property
    def always_active_matrix_params(self) -> int:
        """Matrix weights that every token passes through in all layers: no routed experts, LM head or norms."""
        per_moe_layer = self.num_shared_experts * self.expert_params + self.hidden_size * self.num_experts
        num_dense_mlps = self.num_mlp_layers - self.num_moe_layers
        return (
            self.num_attention_layers * self.attention_matrix_params
            + self.num_state_layers * self.state_layer_params
            + num_dense_mlps * self.dense_mlp_params
            + self.num_moe_layers * per_moe_layer
        )

    @property
    def norm_params(self) -> int:
        """Norm weights: two norms a layer, a final one, and MLA's two latent norms; read each step, no matrix FLOPs.

        A layer that is an MLP alone, or has none, has one norm.
        """
        latent = self.kv_lora_rank + self.q_lora_rank
        norms = self.num_layers * (2 if self.num_mlp_layers == self.num_layers else 1)
        return (norms + 1) * self.hidden_size + self.num_layers * latent

    @property
    def lm_head_params(self) -> int:
        """Weights of the LM head."""
        return self.vocab_size * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Weights of a separate input embedding; 0 if it is tied to the LM head."""
        return 0 if self.tied_embeddings else self.lm_head_params

    @property
    def num_params(self) -> int:
        """All parameters of the model."""
        return self._params_with_experts(self.num_experts)

    @property
    def num_active_params(self) -> int:
        """Parameters that one token uses: `experts_per_token` routed experts in each layer."""
        return self._params_with_experts(self.experts_per_token)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in memory."""
        return self.num_params * self.weight_bytes_per_param

    def _params_with_experts(self, experts_per_layer: int) -> int:
        routed = self.num_moe_layers * experts_per_layer * self.expert_params
        ends = self.lm_head_params + self.embedding_params
        return self.always_active_matrix_params + routed + self.norm_params + ends


def load_model_shape(
    path_or_name: str | Path,
    *,
    weight_bytes_per_param: float | None = None,
    kv_bytes_per_element: float = 2.0,
) -> ModelShape:
    """Load a shape from a directory with a `config.json`, or from the built-in table by name.

    Names ignore case, one organisation prefix and suffixes such as `-Instruct`. Without `weight_bytes_per_param`, a
    directory's own dtype and quantisation decide, and a built-in model counts as 16-bit. Raises ModelConfigError or
    UnknownNameError.
    """
    directory = Path(path_or_name)
    if directory.is_dir():
        name, config = directory.resolve().name, _read_config(directory)
    else:
        name = _table_name(str(path_or_name))
        config = KNOWN_MODELS[name]
    if weight_bytes_per_param is None:
        weight_bytes_per_param = weight_bytes_per_param_of(config)
    return ModelShape.from_hf_config(
        config, weight_bytes_per_param=weight_bytes_per_param, kv_bytes_per_element=kv_bytes_per_element, name=name
    )


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(str(path), f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelConfigError(str(path), "is not a JSON object")
    return config


def _table_name(name: str) -> str:
    organisation, _, last = name.lower().rpartition("/")
    for suffix in _CHECKPOINT_SUFFIXES * 2:
        last = last.removesuffix(suffix)
    if last not in KNOWN_MODELS or "/" in organisation or name.startswith(("/", ".")):
        raise UnknownNameError("model (and no such directory)", name, KNOWN_MODELS)
    return last
