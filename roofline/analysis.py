"""What the roofline says about serving: floors, batches, transfer, pool balance, efficiency.

Each function is one formula with its source, and takes plain numbers unless a shape is the point, so that a reader can
check it by hand. Called by `roofline.table` and `roofline.render`. All are lower bounds on time or upper bounds on
rate: no kernel reaches either peak.
"""

from dataclasses import dataclass
from typing import Literal

from roofline.cost import StepCost, StepCostModel
from roofline.hardware import Hardware
from roofline.model_shape import ModelShape

Bound = Literal["compute", "memory"]


def bound(arithmetic_intensity: float, hardware: Hardware) -> Bound:
    """Which limit binds: compute above the ridge point, memory below it (Williams et al., 2009)."""
    return "compute" if arithmetic_intensity >= hardware.ridge else "memory"


def step_floor_s(cost: StepCost, hardware: Hardware) -> float:
    """max(FLOPs / peak FLOP/s, bytes / peak byte/s): compute and traffic overlap perfectly (Williams et al., 2009)."""
    return max(cost.flops / hardware.peak_flops, cost.bytes / hardware.peak_bytes_per_s)


def decode_floor_s(active_params: float, bytes_per_param: float, hardware: Hardware) -> float:
    """Least time per token at batch 1, weights only: bytes_per_param * P_active / bandwidth (Pope et al., 2022)."""
    return active_params * bytes_per_param / hardware.peak_bytes_per_s


def decode_tokens_per_s(batch: int, params: float, bytes_per_param: float, hardware: Hardware) -> float:
    """B / max(weight bytes / bandwidth, B * 2P / peak): weights are read once for the batch; KV is left out.

    Rises with B to the ridge batch and is flat from there. Use `StepCostModel.decode` to include KV.
    """
    read_s = params * bytes_per_param / hardware.peak_bytes_per_s
    compute_s = batch * 2.0 * params / hardware.peak_flops
    return batch / max(read_s, compute_s)


def ridge_batch(hardware: Hardware, bytes_per_param: float) -> float:
    """Batch at which weights-only decode turns compute-bound: 2PB FLOPs over P*b bytes = ridge, so B = ridge*b/2."""
    return hardware.ridge * bytes_per_param / 2.0


def prefill_floor_s(shape: ModelShape, hardware: Hardware, prompt_tokens: int, cached_tokens: int = 0) -> float:
    """Least time from prompt to first token, in one step, with `cached_tokens` of it already in the KV cache."""
    return step_floor_s(StepCostModel(shape).prefill(prompt_tokens, cached_tokens), hardware)


def prefill_tokens_per_s(shape: ModelShape, hardware: Hardware, prompt_tokens: int, mfu: float) -> float:
    """Prompt tokens per second at a given MFU (PaLM, appendix B): mfu * peak * tokens / FLOPs of the prompt."""
    return mfu * hardware.peak_flops * prompt_tokens / StepCostModel(shape).prefill(prompt_tokens).flops


def kv_link_bytes_per_s(kv_bytes_per_token: float, prefill_tokens_per_s: float) -> float:
    """Link speed at which KV leaves as fast as prefill makes it, so that the hand-off hides (Splitwise paper)."""
    return kv_bytes_per_token * prefill_tokens_per_s


def exposed_transfer_s(kv_bytes: float, num_layers: int, link_bytes_per_s: float, latency_s: float = 0.0) -> float:
    """What cannot hide when KV leaves layer by layer: the last layer's share, plus latency (Splitwise paper)."""
    return kv_bytes / num_layers / link_bytes_per_s + latency_s


@dataclass(frozen=True, slots=True)
class PoolBalance:
    """Device-seconds one average request needs from each pool."""

    prefill_s: float
    decode_s: float

    @property
    def prefill_per_decode(self) -> float:
        """Prefill devices per decode device at which both pools are equally busy."""
        return self.prefill_s / self.decode_s

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / (self.prefill_s + self.decode_s)


def pool_balance(
    prefill_flops: float,
    prefill_mfu: float,
    prefill_hardware: Hardware,
    output_tokens: float,
    decode_step_s: float,
    decode_batch: float,
) -> PoolBalance:
    """First-order P:D: uncached prompt FLOPs / (MFU * peak) against output tokens * step time / batch.

    Source: the replica-count argument of the DistServe paper. Saturated pools; real optima hold fewer prefill workers,
    because decode is run below its largest batch to keep TPOT.
    """
    return PoolBalance(
        prefill_s=prefill_flops / (prefill_mfu * prefill_hardware.peak_flops),
        decode_s=output_tokens * decode_step_s / decode_batch,
    )


def speculative_tokens_per_pass(acceptance_rate: float, drafted_tokens: int) -> float:
    """Expected tokens per target pass, (1 - a^(K+1)) / (1 - a) (Leviathan et al., 2023, eq. 1).

    The same as sum_{k<K} (k+1) a^k (1-a) + (K+1) a^K; letting that sum run to K counts a full acceptance twice.
    """
    if acceptance_rate == 1.0:
        return drafted_tokens + 1.0
    return float((1.0 - acceptance_rate ** (drafted_tokens + 1)) / (1.0 - acceptance_rate))


def speculative_speedup(acceptance_rate: float, drafted_tokens: int, draft_cost: float) -> float:
    """Tokens per pass over the cost of a pass; `draft_cost` is ALL drafting per pass, in target passes."""
    return speculative_tokens_per_pass(acceptance_rate, drafted_tokens) / (1.0 + draft_cost)


def mfu(flops: float, seconds: float, hardware: Hardware) -> float:
    """Model FLOPs utilisation (PaLM, appendix B): FLOPs / (peak * time). Say whether time is busy or wall time."""
    return flops / (hardware.peak_flops * seconds)


def mbu(moved_bytes: float, seconds: float, hardware: Hardware) -> float:
    """Memory bandwidth utilisation (Databricks, 2023): weight and KV bytes / (peak bandwidth * time)."""
    return moved_bytes / (hardware.peak_bytes_per_s * seconds)


def sequences_that_fit(free_bytes: float, tokens_per_sequence: int, kv_bytes_per_token: float) -> int:
    """Whole sequences whose KV fits; paging makes this reachable to within one block each (PagedAttention paper)."""
    return int(free_bytes // (tokens_per_sequence * kv_bytes_per_token))


def kv_share_of_bytes(cost: StepCost) -> float:
    """Fraction of a step's traffic that is KV: the part batching does not amortise."""
    return (cost.kv_read_bytes + cost.kv_write_bytes) / cost.bytes


def shared_prefix_saved_tokens(requests: int, prefix_tokens: int) -> int:
    """Prompt tokens neither computed nor stored again when `requests` share one prefix: all but the first's."""
    return max(0, requests - 1) * prefix_tokens
