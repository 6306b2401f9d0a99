"""What the roofline says about serving: lower bounds on time, batch sizes, transfer, pool balance, efficiency.

Each function is one formula with its source. It takes plain numbers unless it needs a model's shape, so that a reader
can check it by hand. Used by `roofline.table` and `roofline.render`. Times are lower bounds and rates upper bounds: no
kernel reaches either peak.
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


def decode_tokens_per_s(batch: int, params: float, bytes_per_param: float, hardware: Hardware) -> float:
    """Return B / max(weight bytes / bandwidth, B * 2P / peak): weights are read once per batch, KV is left out.

    The rate rises with B up to the ridge batch and stays flat beyond. Use `StepCostModel.decode` to include KV.
    """
    read_s = params * bytes_per_param / hardware.peak_bytes_per_s
    compute_s = batch * 2.0 * params / hardware.peak_flops
    return batch / max(read_s, compute_s)


def ridge_batch(hardware: Hardware, bytes_per_param: float) -> float:
    """Return the batch B at which weights-only decode becomes compute-bound: 2PB / (P*b) = ridge, so B = ridge*b/2."""
    return hardware.ridge * bytes_per_param / 2.0


def prefill_floor_s(shape: ModelShape, hardware: Hardware, prompt_tokens: int, cached_tokens: int = 0) -> float:
    """Return the least time from prompt to first token, in one step, with `cached_tokens` already in the KV cache."""
    return step_floor_s(StepCostModel(shape).prefill(prompt_tokens, cached_tokens), hardware)


def prefill_tokens_per_s(shape: ModelShape, hardware: Hardware, prompt_tokens: int, mfu: float) -> float:
    """Return prompt tokens per second at a given MFU (PaLM, appendix B): mfu * peak * tokens / FLOPs of the prompt."""
    return mfu * hardware.peak_flops * prompt_tokens / StepCostModel(shape).prefill(prompt_tokens).flops


def kv_link_bytes_per_s(kv_bytes_per_token: float, prefill_tokens_per_s: float) -> float:
    """Return the link speed at which KV leaves as fast as prefill makes it, so that transfer is hidden (Splitwise)."""
    return kv_bytes_per_token * prefill_tokens_per_s


def exposed_transfer_s(kv_bytes: float, num_layers: int, link_bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the transfer time that layer-by-layer sending cannot hide: the last layer, plus latency (Splitwise)."""
    return kv_bytes / num_layers / link_bytes_per_s + latency_s


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


def speculative_tokens_per_pass(acceptance_rate: float, drafted_tokens: int) -> float:
    """Return the expected tokens per target pass, (1 - a^(K+1)) / (1 - a) (Leviathan et al., 2023, eq. 1).

    It equals sum_{k<K} (k+1) a^k (1-a) + (K+1) a^K; if that sum ran to K it would count a full acceptance twice.
    """
    if acceptance_rate == 1.0:
        return drafted_tokens + 1.0
    return float((1.0 - acceptance_rate ** (drafted_tokens + 1)) / (1.0 - acceptance_rate))


def speculative_speedup(acceptance_rate: float, drafted_tokens: int, draft_cost: float) -> float:
    """Return tokens per pass over its cost; `draft_cost` is all drafting for one pass, in units of target passes."""
    return speculative_tokens_per_pass(acceptance_rate, drafted_tokens) / (1.0 + draft_cost)


def mfu(flops: float, seconds: float, hardware: Hardware) -> float:
    """Return model FLOPs utilisation, FLOPs / (peak * time) (PaLM, appendix B); `seconds` may be busy or wall time."""
    return flops / (hardware.peak_flops * seconds)


def mbu(moved_bytes: float, seconds: float, hardware: Hardware) -> float:
    """Return memory bandwidth utilisation, weight and KV bytes / (peak bandwidth * time) (Databricks, 2023)."""
    return moved_bytes / (hardware.peak_bytes_per_s * seconds)


def sequences_that_fit(free_bytes: float, tokens_per_sequence: int, kv_bytes_per_token: float) -> int:
    """Return how many whole sequences fit by their KV; paging wastes at most one block each (PagedAttention paper)."""
    return int(free_bytes // (tokens_per_sequence * kv_bytes_per_token))


def kv_share_of_bytes(cost: StepCost) -> float:
    """Return the fraction of a step's traffic that is KV, which batching does not amortise."""
    return (cost.kv_read_bytes + cost.kv_write_bytes) / cost.bytes


def shared_prefix_saved_tokens(requests: int, prefix_tokens: int) -> int:
    """Return the prompt tokens saved when `requests` share a prefix: it is computed and stored for the first only."""
    return max(0, requests - 1) * prefix_tokens
