"""FLOPs, bytes and busy seconds of each engine step, derived from what the scheduler decided.

It runs in the engine process: `scheduler_side.py` calls `begin` when a step has been scheduled and `end` when its
outputs are there. FLOPs and bytes come from the formulas of `ridgeline.roofline.cost`; only time is measured. A drafted
token costs what another one does, so a step with k of them a sequence moves its weights and KV once for k + 1 tokens.

Where vLLM schedules a step before it reads the last one's outputs (on GPUs), a sequence that ends at a stop token is in
one step more. It is counted, because the engine computes it: tokens are those computed, one more than were sent.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from ridgeline.roofline.cost import StepCost, StepCostModel
from ridgeline.roofline.errors import ModelConfigError
from ridgeline.roofline.model_shape import ModelShape
from ridgeline.roofline.quantisation import weight_bytes_per_param

if TYPE_CHECKING:
    from vllm.config import VllmConfig

StepKind = Literal["prefill", "decode", "mixed"]
logger = logging.getLogger(__name__)


class StepAccountant:
    """Cumulative counters by kind of step.

    A request is in its decode phase when the tokens it computes follow its prompt, or when its prompt's KV was
    transferred. vLLM's own counters count the first step of a transferred request as prefill.
    """

    def __init__(self, model: StepCostModel | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a `model`, FLOPs and bytes are not counted."""
        self._model = model
        self._clock = clock
        self._prompt_tokens: dict[str, int] = {}
        self._in_flight: deque[tuple[float, StepKind, StepCost | None]] = deque()
        self._last_end_s = 0.0
        self.counters: dict[str, float] = {}

    def expect(self, request_id: str, num_prompt_tokens: int, num_external_tokens: int) -> None:
        """Register a request; `num_external_tokens` of its prompt are to be transferred, not computed.

        vLLM still computes the last token of a wholly transferred prompt, to sample from it; that step counts as
        decode.
        """
        self._prompt_tokens[request_id] = num_external_tokens - 1 if num_external_tokens else num_prompt_tokens

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._prompt_tokens.pop(request_id, None)

    def recompute(self, request_id: str, reason: str) -> None:
        """Count a failed transfer by reason; this engine computes the prompt instead."""
        self.count(f"recompute_total.{reason}")

    def begin(self, scheduled: Any) -> None:
        """Record that a step was scheduled; `scheduled` is vLLM's SchedulerOutput."""
        if scheduled.total_num_scheduled_tokens == 0:
            return
        tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        started = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
        cached = scheduled.scheduled_cached_reqs
        running = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        segments: list[tuple[int, int]] = []
        prefill_tokens = sampled = 0
        for request_id, computed in (*started, *running):
            new = tokens[request_id]
            prompt = self._prompt_tokens.get(request_id, 0)
            segments.append((new, computed))
            if computed < prompt:
                prefill_tokens += new
            if computed + new >= prompt:
                sampled += 1 + len(drafts.get(request_id, ()))
        total = scheduled.total_num_scheduled_tokens
        kind: StepKind = "decode" if prefill_tokens == 0 else "prefill" if prefill_tokens == total else "mixed"
        self._add("tokens_total.prefill", prefill_tokens)
        self._add("tokens_total.decode", total - prefill_tokens - sum(map(len, drafts.values())))
        cost = None if self._model is None else self._model.step(segments, sampled)
        self._in_flight.append((self._clock(), kind, cost))

    def verified(self, sequences: int, drafted: int, accepted: int) -> None:
        """Count the drafts of a step, in which so many sequences decoded; of their tokens only the accepted ones count.

        With a draft model FLOPs and bytes are those of the model itself.
        """
        self._add("tokens_total.decode", accepted)
        self._add("drafted_tokens_total", drafted)
        self._add("accepted_tokens_total", accepted)
        self._add("sequence_steps_total", sequences)

    def end(self) -> None:
        """Record that the oldest step in flight has its outputs. Overlapping steps do not count the same time twice."""
        if not self._in_flight:
            return
        began_s, kind, cost = self._in_flight.popleft()
        now_s = self._clock()
        self._add(f"busy_seconds_total.{kind}", now_s - max(began_s, self._last_end_s))
        self._last_end_s = now_s
        self._add(f"steps_total.{kind}", 1)
        if cost is None:
            return
        self._add(f"flops_total.{kind}", cost.flops)
        self._add(f"bytes_total.{kind}.weights", cost.weight_bytes)
        self._add(f"bytes_total.{kind}.kv_read", cost.kv_read_bytes)
        self._add(f"bytes_total.{kind}.kv_write", cost.kv_write_bytes)

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter of the scheduler side, such as `recompute_total.transfer_failed`."""
        self._add(name, amount)

    def _add(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + amount


def step_cost_model(vllm_config: VllmConfig, kv_cache_spec: Any) -> StepCostModel | None:
    """Build the cost model of a step; None, with a warning, for a model whose shape is not supported.

    It is the model's shape with the bytes that its weights and its KV really have. Neither is what the number format of
    the computation says: weights may be stored in FP8 or four bits and computed in bfloat16, and the cache has a format
    of its own. `kv_cache_spec` is vLLM's description of a layer that keeps every token, if there is one.
    """
    try:
        shape = _model_shape(vllm_config, kv_cache_spec)
    except (ModelConfigError, TypeError, ValueError, AttributeError) as error:
        logger.warning("steps are counted without FLOPs and bytes, which are not known for this model: %s", error)
        return None
    return StepCostModel(
        shape,
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        absorbed_max_new_tokens=1 + vllm_config.num_speculative_tokens,
    )


def _model_shape(vllm_config: VllmConfig, kv_cache_spec: Any) -> ModelShape:
    model = vllm_config.model_config
    return ModelShape.from_hf_config(
        model.hf_text_config.to_dict(),
        weight_bytes_per_param=stored_weight_bytes(model),
        kv_bytes_per_element=kv_element_bytes(kv_cache_spec),
        name=str(model.model),
    )


def stored_weight_bytes(model: Any) -> float:
    """Return the bytes of a stored weight of vLLM's ModelConfig.

    From the checkpoint's scheme, else from the one in which weights are quantised while they load (`quantization` of
    engine_args), else from the number format. Raises ModelConfigError for a scheme whose bytes are not known.
    """
    whole = model.hf_config.to_dict()
    scheme = whole.get("quantization_config") or model.hf_text_config.to_dict().get("quantization_config")
    if scheme:
        return weight_bytes_per_param({"quantization_config": scheme})
    if model.quantization:
        return weight_bytes_per_param({"quantization_config": {"quant_method": model.quantization}})
    return float(torch.empty(0, dtype=model.dtype).element_size())


def kv_element_bytes(kv_cache_spec: Any) -> float:
    """Return the bytes of one key or value in the cache, the scales of its format included.

    Padding is not: kernels do not read it.
    """
    spec = kv_cache_spec
    elements = spec.block_size * spec.num_kv_heads * (spec.head_size + spec.head_size_v)
    return float(spec.unpadded_page_size_bytes / elements)
