"""The cost model of this engine's steps: the model's shape with the bytes that its weights and its KV really have.

Neither is what the number format of the computation says: weights may be stored in FP8 or four bits and computed in
bfloat16, and the cache has a format of its own.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ridgeline.roofline.cost import StepCostModel
from ridgeline.roofline.errors import ModelConfigError
from ridgeline.roofline.model_shape import ModelShape
from ridgeline.roofline.quantisation import weight_bytes_per_param

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def step_cost_model(vllm_config: VllmConfig, kv_cache_spec: Any) -> StepCostModel | None:
    """Build the cost model of a step; None, with a warning, for a model whose shape is not supported.

    `kv_cache_spec` is vLLM's description of a layer that keeps every token, if there is one.
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
