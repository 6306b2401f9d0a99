"""Transformer layers on the measured roofline: how far real products and attention are from `roofline.cost`'s floor.

The layer is a Llama-3.1-8B's, written with torch's own operations: what a good engine at least reaches. Norms and
rotations are left out, as `roofline.cost` leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from roofline.analysis import bound, step_floor_s
from roofline.cost import StepCost, StepCostModel
from roofline.hardware import Hardware
from roofline.model_shape import ModelShape, load_model_shape
from tools.gpu.machine import Machine
from tools.gpu.result import Row

SECTION = "layers against the measured roofline"
LAYERS = 4
"""Enough for the weights to be read from memory: 1.7 GB."""


def check(machine: Machine, measured: Hardware) -> Iterator[Row]:
    """Measure steps of the shapes of prefill and of decode."""
    shape = replace(load_model_shape("llama-3.1-8b"), num_layers=machine.size(LAYERS, 1))
    if machine.dry:
        small = {"hidden_size": 64, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 128}
        shape = replace(shape, **small)  # type: ignore[arg-type]
    model, layers = StepCostModel(shape), _Layers(machine, shape)
    for tokens in (512, 2048, 8192) if not machine.dry else (32,):
        yield _row(
            machine, f"prefill of {tokens} tokens", layers.prefill(tokens), model.step([(tokens, 0)], 0), measured
        )
    context = machine.size(2048, 32)
    kv_bytes = context * shape.kv_elements_per_token_layer * 2
    for batch in (1, 32, 256) if not machine.dry else (2,):
        if (
            not machine.dry and 5 * batch * kv_bytes > machine.memory_bytes / 2
        ):  # torch may copy keys for each query head
            continue
        cost = model.step([(1, context - 1)] * batch, 0)
        yield _row(machine, f"decode of {batch} sequences of {context}", layers.decode(batch, context), cost, measured)


def _row(machine: Machine, what: str, work: Callable[[], object], cost: StepCost, measured: Hardware) -> Row:
    taken_s, floor_s = machine.seconds(work, 10), step_floor_s(cost, measured)
    limit = bound(cost.arithmetic_intensity, measured)
    note = f"{taken_s / floor_s:.2f} times the floor of {floor_s * 1e3:.3g} ms, bound by {limit}"
    return Row(SECTION, what, taken_s * 1e3, "ms", note)


class _Layers:
    """Some layers' weights, in bfloat16."""

    def __init__(self, machine: Machine, shape: ModelShape) -> None:
        self._device = machine.device
        self._shape = shape
        q_width = shape.num_q_heads * shape.head_dim
        kv_width = 2 * shape.num_kv_heads * shape.head_dim
        hidden, mlp = shape.hidden_size, shape.intermediate_size
        self._weights = [
            [self._noise(hidden, q_width + kv_width), self._noise(q_width, hidden), self._noise(hidden, 2 * mlp),
             self._noise(mlp, hidden)]
            for _ in range(shape.num_layers)
        ]  # fmt: skip

    def prefill(self, tokens: int) -> Callable[[], object]:
        """Return a step that computes one prompt."""
        hidden = self._noise(tokens, self._shape.hidden_size)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.squeeze(0).transpose(0, 1)

        return lambda: self._step(hidden, attend)

    def decode(self, batch: int, context: int) -> Callable[[], object]:
        """Return a step that computes a token of each sequence; all layers read one cache, larger than any L2."""
        hidden = self._noise(batch, self._shape.hidden_size)
        keys, values = (self._noise(batch, self._shape.num_kv_heads, context, self._shape.head_dim) for _ in range(2))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=True).squeeze(2)

        return lambda: self._step(hidden, attend)

    def _step(self, hidden: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        shape = self._shape
        for qkv, out, up, down in self._weights:
            heads = (hidden @ qkv).view(len(hidden), -1, shape.head_dim)
            q, k, v = heads.split([shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
            hidden = hidden + attend(q, k, v).reshape(len(hidden), -1) @ out
            gate, wide = (hidden @ up).chunk(2, dim=-1)
            hidden = hidden + (silu(gate) * wide) @ down
        return hidden

    def _noise(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, device=self._device).mul_(0.02).to(torch.bfloat16)
