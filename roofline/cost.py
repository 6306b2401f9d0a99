"""FLOPs and bytes of one engine step, from the model's sizes and the requests in the batch.

The engine calls `StepCostModel.step` once per scheduler step, on its hot path, for each pool's arithmetic intensity,
MFU and MBU; `ridgeline.roofline.analysis` calls it with example batches. Both use the same formulas.

For a step with segments (c new tokens, p already computed), T = sum of c, on a model with L layers, q query heads
of dimension d (sources: PaLM appendix B for FLOPs, the vLLM and FlashAttention papers for KV traffic):

    GEMM FLOPs       2 * T * matrix weights a token passes through       [FLOP]
    LM head FLOPs    2 * hidden * vocab * sampled tokens                 [FLOP]
    attention FLOPs  4 * q * d * L * sum(c*p + c*(c+1)/2)                [FLOP]  causal: the masked half is not work
    weight bytes     each weight once a step; LM head only when sampling [byte]
    KV read          (p + c) * KV bytes per token, once per request      [byte]
    KV write         c * KV bytes per token                              [byte]
    state FLOPs      T * L_state * elements * 4 (Mamba 2) or 6 (delta)   [FLOP]  written, read, and read before
    state bytes      read (unless p is 0) and written once per request   [byte]

In a layer with a window of w tokens the i-th token reads min(i, w) keys, itself included (Mistral 7B paper, section 2).
So a request reads min(p, w - 1) + c of them. A token adds an outer product to a recurrent state and multiplies that by
a query (Mamba 2 paper, section 2); the delta rule also multiplies it by the key (Gated DeltaNet paper, section 3).
Decay and gates are not counted.

Mixture of experts: FLOPs count k experts a token; bytes count the distinct experts T tokens hit, E*(1-(1-k/E)^T).
MLA (DeepSeek-V2 paper, 2.1): prefill computes 2q(d_nope+d_rope+d_v) per query-key pair on up-projected keys; decode
works on the latent cache itself, 2q(2*rank+d_rope) per pair. Projecting a cached prefix again for a later chunk is
recomputation, not model work, and is not counted.

Not counted: activations (a fused kernel keeps them in cache), embedding rows, FLOPs of norms, sampling.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ridgeline.roofline.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step computes and moves, summed over all devices; `a + b` is two steps in sequence."""

    flops: float = 0.0
    weight_bytes: float = 0.0
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes of weights and KV that the step moves."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def arithmetic_intensity(self) -> float:
        """FLOP per byte; 0 for a step that moves nothing."""
        moved_bytes = self.bytes
        return self.flops / moved_bytes if moved_bytes else 0.0

    def __add__(self, other: "StepCost") -> "StepCost":
        return StepCost(
            self.flops + other.flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
        )


class StepCostModel:
    """One model's coefficients, so that the cost of a step is a short loop over the batch. Immutable once built.

    With `tensor_parallel_size` t the costs are still summed over the t ranks (divide by t, or compare with
    `Hardware.times(t)`). FLOPs and weights are split; KV heads are split too, until t exceeds their number and they are
    replicated. MLA's latent cache is replicated on every rank.

    `absorbed_max_new_tokens` is the longest segment an MLA kernel treats as decode: 1, or K+1 with K drafted tokens.
    """

    __slots__ = (
        "_absorbed_max_new_tokens",
        "_absorbed_pair_flops",
        "_all_experts_bytes",
        "_expert_miss_probability",
        "_kv_bytes_per_token",
        "_layer_weight_bytes",
        "_lm_head_bytes",
        "_lm_head_flops",
        "_pair_flops",
        "_state_bytes",
        "_token_flops",
        "_window_bytes_per_token",
        "_window_pair_flops",
        "_window_tokens",
        "shape",
    )

    def __init__(self, shape: ModelShape, *, tensor_parallel_size: int = 1, absorbed_max_new_tokens: int = 1) -> None:
        element_bytes = shape.weight_bytes_per_param
        routed_params = shape.num_moe_layers * shape.expert_params
        plain, absorbed = _flops_per_query_key_pair(shape)
        self.shape = shape
        state_flops = float(shape.num_state_layers * shape.state_elements * shape.state_flops_per_element)
        active_params = shape.always_active_matrix_params + routed_params * shape.experts_per_token
        self._token_flops = 2.0 * active_params + state_flops
        self._pair_flops = plain
        self._absorbed_pair_flops = absorbed
        self._absorbed_max_new_tokens = absorbed_max_new_tokens
        self._lm_head_flops = 2.0 * shape.lm_head_params
        self._lm_head_bytes = shape.lm_head_params * element_bytes
        self._layer_weight_bytes = (shape.always_active_matrix_params + shape.norm_params) * element_bytes
        self._all_experts_bytes = routed_params * shape.num_experts * element_bytes
        self._expert_miss_probability = 1.0 - shape.experts_per_token / shape.num_experts if shape.num_experts else 0.0
        replicas = _kv_replicas(shape, tensor_parallel_size)
        self._kv_bytes_per_token = shape.kv_bytes_per_token * replicas
        self._window_bytes_per_token = shape.window_bytes_per_token * replicas
        self._window_pair_flops = plain * shape.num_window_layers / max(1, shape.num_attention_layers)
        self._window_tokens = shape.window_tokens if shape.num_window_layers else sys.maxsize
        self._state_bytes = shape.state_bytes

    def step(self, segments: Iterable[tuple[int, int]], sampled_tokens: int) -> StepCost:
        """Return the cost of one step over `segments` of (new tokens, tokens already computed), one per request.

        `sampled_tokens` is the number of positions that go through the LM head. A step without new tokens costs
        nothing.
        """
        tokens = context_tokens = doubled_pairs = doubled_absorbed_pairs = 0
        doubled_unseen_pairs = unread_tokens = states_read = states_written = 0
        absorbed_max, window = self._absorbed_max_new_tokens, self._window_tokens
        for new, computed in segments:
            tokens += new
            context_tokens += computed + new
            states_written += 1
            states_read += computed > 0
            if computed + new > window:
                first, last = max(0, computed - window), computed + new - window
                doubled_unseen_pairs += last * (last + 1) - first * (first + 1)
                unread_tokens += max(0, computed - window + 1)
            if new <= absorbed_max and computed:
                doubled_absorbed_pairs += new * (2 * computed + new + 1)
            else:
                doubled_pairs += new * (2 * computed + new + 1)
        if not tokens:
            return StepCost()
        weight_bytes = self._layer_weight_bytes
        if self._all_experts_bytes:
            weight_bytes += self._all_experts_bytes * (1.0 - self._expert_miss_probability**tokens)
        if sampled_tokens:
            weight_bytes += self._lm_head_bytes
        return StepCost(
            self._token_flops * tokens
            + 0.5 * (self._pair_flops * doubled_pairs + self._absorbed_pair_flops * doubled_absorbed_pairs)
            - 0.5 * self._window_pair_flops * doubled_unseen_pairs
            + self._lm_head_flops * sampled_tokens,
            weight_bytes,
            self._kv_bytes_per_token * context_tokens
            - self._window_bytes_per_token * unread_tokens
            + self._state_bytes * states_read,
            self._kv_bytes_per_token * tokens + self._state_bytes * states_written,
        )

    def prefill(self, prompt_tokens: int, cached_tokens: int = 0) -> StepCost:
        """Return the cost of one prompt in one step, with `cached_tokens` in the KV cache, and of its first token."""
        return self.step([(prompt_tokens - cached_tokens, cached_tokens)], 1)

    def decode(self, batch: int, context_tokens: int, drafted_tokens: int = 0) -> StepCost:
        """Return the cost of one token for each of `batch` sequences of `context_tokens`, the new token included.

        With k `drafted_tokens` a sequence the step verifies them beside it: k + 1 query tokens read weights and KV once
        (Leviathan et al., 2023, section 3.4). Drafting itself is not counted.
        """
        tokens = 1 + drafted_tokens
        return self.step([(tokens, context_tokens - 1)] * batch, batch * tokens)


def _flops_per_query_key_pair(shape: ModelShape) -> tuple[float, float]:
    """Return FLOPs over all layers for one query and one key, on plain and on latent ("absorbed") keys."""
    per_head = 2.0 * shape.num_attention_layers * shape.num_q_heads * shape.kv_states_per_token
    if not shape.is_mla:
        return 2 * per_head * shape.head_dim, 2 * per_head * shape.head_dim
    plain = per_head * (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim)
    return plain, per_head * (2 * shape.kv_lora_rank + shape.qk_rope_head_dim)


def _kv_replicas(shape: ModelShape, tensor_parallel_size: int) -> float:
    """Return how many ranks hold the same KV element."""
    if shape.is_mla:
        return float(tensor_parallel_size)
    return max(1.0, tensor_parallel_size / shape.num_kv_heads)
