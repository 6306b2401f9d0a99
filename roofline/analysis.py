"""What the roofline says about serving: lower bounds on time, batch sizes, transfer, pool balance, efficiency.

Each function is one formula with its source. It takes plain numbers unless it needs a model's shape, so that a reader
can check it by hand. Times are lower bounds and rates upper bounds: no kernel reaches either peak.
"""

from dataclasses import dataclass
from typing import Literal

from roofline.cost import StepCost, StepCostModel
from roofline.hardware import Hardware
from roofline.model_shape import ModelShape

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


def prefill_tokens_per_s(shape: ModelShape, hardware: Hardware, prompt_tokens: int, mfu: float) -> float:
    """Return prompt tokens per second at a given MFU (PaLM, appendix B): mfu * peak * tokens / FLOPs of the prompt."""
    return mfu * hardware.peak_flops * prompt_tokens / StepCostModel(shape).prefill(prompt_tokens).flops


def kv_link_bytes_per_s(kv_bytes_per_token: float, prefill_tokens_per_s: float) -> float:
    """Return the link speed at which KV leaves as fast as prefill makes it, so that transfer is hidden (Splitwise)."""
    return kv_bytes_per_token * prefill_tokens_per_s


@dataclass(frozen=True, slots=True)
class PoolBalance:
    """Device-seconds that one average request needs in each pool."""

    prefill_s: float
    decode_s: float

    @property
    def prefill_per_decode(self) -> float:
        """Prefill devices for each decode device, if both pools are to be equally busy."""
        return self.prefill_s / self.decode_s

    @property
    def prefill_share(self) -> float:
        """Fraction of all devices that belong in the prefill pool, from 0 to 1."""
        return self.prefill_s / (self.prefill_s + self.decode_s)


def pool_balance(
    prefill_flops: float,
    prefill_mfu: float,
    prefill_hardware: Hardware,
    output_tokens: float,
    decode_step_s: float,
    decode_batch: float,
) -> PoolBalance:
    """Return first-order device-seconds: prompt FLOPs / (MFU * peak), and output tokens * step time / batch.

    Source: the replica-count argument of the DistServe paper. It assumes saturated pools; real optima have fewer
    prefill workers, because decode runs below its largest batch to keep TPOT. `prefill_flops` excludes cached tokens.
    """
    return PoolBalance(
        prefill_s=prefill_flops / (prefill_mfu * prefill_hardware.peak_flops),
        decode_s=output_tokens * decode_step_s / decode_batch,
    )


def mfu(flops: float, seconds: float, hardware: Hardware) -> float:
    """Return model FLOPs utilisation, FLOPs / (peak * time) (PaLM, appendix B); `seconds` may be busy or wall time."""
    return flops / (hardware.peak_flops * seconds)


def mbu(moved_bytes: float, seconds: float, hardware: Hardware) -> float:
    """Return memory bandwidth utilisation, weight and KV bytes / (peak bandwidth * time) (Databricks, 2023)."""
    return moved_bytes / (hardware.peak_bytes_per_s * seconds)


def sequences_that_fit(free_bytes: float, tokens_per_sequence: int, kv_bytes_per_token: float) -> int:
    """Return how many whole sequences fit by their KV; paging wastes at most one block each (PagedAttention paper)."""
    return int(free_bytes // (tokens_per_sequence * kv_bytes_per_token))
