"""What the roofline says about serving: lower bounds on time, and batch sizes.

Each function is one formula with its source. It takes plain numbers unless it needs a model's shape, so that a reader
can check it by hand. Times are lower bounds and rates upper bounds: no kernel reaches either peak.
"""

from typing import Literal

from ridgeline.roofline.cost import StepCost
from ridgeline.roofline.hardware import Hardware

Bound = Literal["compute", "memory"]


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
