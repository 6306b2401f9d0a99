"""What the roofline says about serving: lower bounds on time, batch sizes, and the rows of `ridgeline roofline`.

Each function is one formula with its source. It takes plain numbers unless it needs a model's shape, so that a reader
can check it by hand. Times are lower bounds and rates upper bounds: no kernel reaches either peak.
`ridgeline.roofline.render` prints the rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ridgeline.roofline.cost import StepCost, StepCostModel
from ridgeline.roofline.hardware import Hardware
from ridgeline.roofline.model_shape import ModelShape

Bound = Literal["compute", "memory"]

PREFILL_TOKENS = (128, 512, 2048, 8192, 32768)
DECODE_BATCHES = (1, 8, 32, 128, 512)
DECODE_CONTEXT_TOKENS = 2048


def bound(arithmetic_intensity: float, hardware: Hardware) -> Bound:
    """Return the limit that applies: compute above the ridge point, memory below it (Williams et al., 2009)."""
    return "compute" if arithmetic_intensity >= hardware.ridge else "memory"


def step_floor_s(cost: StepCost, hardware: Hardware) -> float:
    """Return max(FLOPs / peak FLOP/s, bytes / peak byte/s), which assumes perfect overlap (Williams et al., 2009)."""
    return max(cost.flops / hardware.peak_flops, cost.bytes / hardware.peak_bytes_per_s)


def decode_floor_s(active_params: float, bytes_per_param: float, hardware: Hardware) -> float:
    """Return the least time per token at batch 1, weights only: b * P_active / bandwidth (Pope et al., 2022)."""
    return active_params * bytes_per_param / hardware.peak_bytes_per_s


def ridge_batch(hardware: Hardware, bytes_per_param: float) -> float:
    """Return the batch B at which weights-only decode becomes compute-bound: 2PB / (P*b) = ridge, so B = ridge*b/2."""
    return hardware.ridge * bytes_per_param / 2.0


def sequences_that_fit(free_bytes: float, tokens_per_sequence: int, kv_bytes_per_token: float) -> int:
    """Return how many whole sequences fit by their KV; paging wastes at most one block each (PagedAttention paper)."""
    return int(free_bytes // (tokens_per_sequence * kv_bytes_per_token))


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """One step: `batch` sequences of `context_tokens`; `new_tokens` is what the step computes for all of them."""

    phase: Literal["prefill", "decode"]
    batch: int
    new_tokens: int
    context_tokens: int
    flops: float
    bytes: float
    arithmetic_intensity: float
    bound: Bound
    floor_ms: float
    tokens_per_s: float
    memory_bytes: float
    fits: bool | None
    """Whether weights and KV fit the device's memory; None if its size is unknown."""


def roofline_table(
    shape: ModelShape,
    hardware: Hardware,
    *,
    prefill_tokens: Iterable[int] = PREFILL_TOKENS,
    decode_batches: Iterable[int] = DECODE_BATCHES,
    decode_context_tokens: int = DECODE_CONTEXT_TOKENS,
) -> list[RooflineRow]:
    """Compute best-case rows: `floor_ms` is the least time of a step, `tokens_per_s` the highest rate."""
    model = StepCostModel(shape)
    steps: list[tuple[Literal["prefill", "decode"], int, int, int, StepCost]] = [
        ("prefill", 1, length, length, model.prefill(length)) for length in prefill_tokens
    ]
    steps += [
        ("decode", batch, batch, decode_context_tokens, model.decode(batch, decode_context_tokens))
        for batch in decode_batches
    ]
    return [_row(shape, hardware, *step) for step in steps]


def _row(
    shape: ModelShape,
    hardware: Hardware,
    phase: Literal["prefill", "decode"],
    batch: int,
    new_tokens: int,
    context_tokens: int,
    cost: StepCost,
) -> RooflineRow:
    floor_s = step_floor_s(cost, hardware)
    memory_bytes = shape.weight_bytes + batch * context_tokens * shape.kv_bytes_per_token
    return RooflineRow(
        phase=phase,
        batch=batch,
        new_tokens=new_tokens,
        context_tokens=context_tokens,
        flops=cost.flops,
        bytes=cost.bytes,
        arithmetic_intensity=cost.arithmetic_intensity,
        bound=bound(cost.arithmetic_intensity, hardware),
        floor_ms=floor_s * 1e3,
        tokens_per_s=new_tokens / floor_s,
        memory_bytes=memory_bytes,
        fits=None if hardware.memory_bytes is None else memory_bytes <= hardware.memory_bytes,
    )
