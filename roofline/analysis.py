"""What the roofline says about serving: lower bounds on time, batch sizes, and the rows of `ridgeline roofline`.

Each function is one formula with its source. It takes plain numbers unless it needs a model's shape, so that a reader
can check it by hand. Times are lower bounds and rates upper bounds: no kernel reaches either peak.
`ridgeline.roofline.render` prints the rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ridgeline.contracts.workers import StepModel
from ridgeline.roofline.cost import StepCost, StepCostModel
from ridgeline.roofline.hardware import Hardware
from ridgeline.roofline.model_shape import ModelShape

Bound = Literal["compute", "memory"]

PREFILL_TOKENS = (128, 512, 2048, 8192, 32768)
DECODE_BATCHES = (1, 8, 32, 128, 512)
DECODE_CONTEXT_TOKENS = 2048
ALL_REDUCE_S = 1e-5
"""Of a message of few bytes between the devices of one host: what NCCL takes over NVLink."""
LARGEST_STEP = 1 << 15
LARGEST_BATCH = 256
"""Sequences of a decode step up to which a data sheet's steps are right, as many as an engine on a device has."""
"""Tokens; a larger one costs as much a token."""


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


def tokens_per_step(acceptance: float, drafted_tokens: int) -> float:
    """Return the tokens that a sequence gets of a step that verifies k drafted ones: (1 - a^(k+1)) / (1 - a).

    Each is accepted with probability a if all before it were (Leviathan et al., 2023, equation 1); the model adds one.
    """
    return sum(acceptance**accepted for accepted in range(drafted_tokens + 1))


def sequences_that_fit(free_bytes: float, kv_bytes_per_sequence: float) -> int:
    """Return how many whole sequences fit by their KV; paging wastes at most one block each (PagedAttention paper)."""
    return int(free_bytes // kv_bytes_per_sequence)


def datasheet_steps(shape: ModelShape, hardware: Hardware, devices: int, link_bytes_per_s: float) -> StepModel:
    """Return the least that steps of a worker take, by the data sheet: no engine's step is as short.

    A line cannot be the larger of two, so a correction for each size of a step makes it that. Tensor parallelism over
    several `devices` adds two all-reduces a layer (Megatron-LM paper, section 3), as a ring over their links.
    """
    together, cost = hardware.times(devices), StepCostModel(shape, tensor_parallel_size=devices)
    reduces = 2 * shape.num_layers * (devices > 1)
    reduce_s = reduces * ALL_REDUCE_S
    token_link_s = reduces * shape.hidden_size * 2.0 * 2 * (devices - 1) / devices / link_bytes_per_s
    unread, alone = cost.step([(1, 0)], 0), cost.decode(1, 1)
    base_s = alone.bytes / together.peak_bytes_per_s + reduce_s
    token_s = unread.flops / together.peak_flops + token_link_s
    context_bytes = cost.decode(1, DECODE_CONTEXT_TOKENS).bytes - alone.bytes
    prompt_flops = cost.prefill(DECODE_CONTEXT_TOKENS).flops - alone.flops - (DECODE_CONTEXT_TOKENS - 1) * unread.flops

    def floor_s(tokens: int) -> float:
        return step_floor_s(cost.step([(1, 0)] * tokens, 1), together) + reduce_s + token_link_s * tokens

    # A correction is of the context's reads too, so batches of sequences have none.
    sizes = range(1 + LARGEST_BATCH.bit_length(), LARGEST_STEP.bit_length())
    middles = [3 * 2**bits // 4 for bits in sizes]  # of the sizes that a correction is for
    corrections = [floor_s(tokens) / (base_s + token_s * tokens) for tokens in middles]
    return StepModel(
        base_s=base_s,
        per_prefill_token_s=token_s,
        per_sequence_s=(floor_s(LARGEST_BATCH) - base_s) / LARGEST_BATCH,
        per_context_token_s=context_bytes / (DECODE_CONTEXT_TOKENS - 1) / together.peak_bytes_per_s,
        per_attended_token_s=prompt_flops / (DECODE_CONTEXT_TOKENS**2 / 2) / together.peak_flops,
        corrections=(1.0,) * sizes.start + tuple(corrections),
    )


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
    drafted_tokens: int = 0,
    acceptance: float = 1.0,
) -> list[RooflineRow]:
    """Compute best-case rows: `floor_ms` is the least time of a step, `tokens_per_s` the highest rate.

    Decode steps verify `drafted_tokens` of each sequence, a part of which is accepted (`tokens_per_step`).
    """
    model = StepCostModel(shape, absorbed_max_new_tokens=1 + drafted_tokens)
    rows = [
        _row(shape, hardware, "prefill", 1, length, length, model.prefill(length), length) for length in prefill_tokens
    ]
    made = tokens_per_step(acceptance, drafted_tokens)
    for batch in decode_batches:
        cost, new_tokens = model.decode(batch, decode_context_tokens, drafted_tokens), batch * (1 + drafted_tokens)
        rows.append(_row(shape, hardware, "decode", batch, new_tokens, decode_context_tokens, cost, batch * made))
    return rows


def _row(
    shape: ModelShape,
    hardware: Hardware,
    phase: Literal["prefill", "decode"],
    batch: int,
    new_tokens: int,
    context_tokens: int,
    cost: StepCost,
    made_tokens: float,
) -> RooflineRow:
    floor_s = step_floor_s(cost, hardware)
    memory_bytes = shape.weight_bytes + batch * shape.kv_bytes(context_tokens)
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
        tokens_per_s=made_tokens / floor_s,
        memory_bytes=memory_bytes,
        fits=None if hardware.memory_bytes is None else memory_bytes <= hardware.memory_bytes,
    )
