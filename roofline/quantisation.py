"""The bytes of a stored weight, read from a model config.

Weight bytes are the numerator of every decode floor, so a wrong guess would make every result wrong. An unknown scheme
is therefore an error rather than a default.
"""

from collections.abc import Mapping
from typing import Any

from ridgeline.roofline.errors import ModelConfigError
from ridgeline.roofline.hf_config import text_config

_DTYPE_BYTES: Mapping[str, float] = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}
_METHOD_BYTES: Mapping[str, float] = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
_NVFP4_BYTES = 0.5 + 1 / 16
"""4 bits, and a scale of 8 bits for 16 weights."""
_SCALE_BYTES = 2.0
"""Of a group of integers; one of 4-bit floats (NVFP4, MXFP4) has 8 bits."""


def dtype_bytes(dtype: str) -> float:
    """Return the bytes per element of a torch dtype name, with or without `torch.`. Raises ModelConfigError."""
    name = dtype.removeprefix("torch.")
    if name not in _DTYPE_BYTES:
        raise ModelConfigError("torch_dtype", f"is {dtype!r}; valid: {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]


def weight_bytes_per_param(config: Mapping[str, Any]) -> float:
    """Return the bytes per stored weight, group scales included; 2 if the config names neither dtype nor scheme.

    Embeddings and the LM head are usually not quantised. That is ignored here, which understates a quantised model by
    a few per cent. Raises ModelConfigError for an unknown scheme.
    """
    scheme = config.get("quantization_config") or text_config(config).get("quantization_config")
    if isinstance(scheme, Mapping) and scheme:
        return _quantised_bytes(scheme)
    language = text_config(config)
    dtype = language.get("dtype") or language.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return dtype_bytes(str(dtype)) if dtype else 2.0


def multiplies_in_fp8(config: Mapping[str, Any], asked: object = None) -> bool:
    """Return whether matrices are multiplied in FP8, where the hardware can: its FP8 peak is then the one to compare.

    `asked` is the scheme in which weights are quantised while they are loaded, if that is configured. Schemes that
    keep activations in 16 bits (AWQ, GPTQ, MXFP4) compute in those.
    """
    scheme = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    method = str(asked or scheme.get("quant_method", ""))
    if method in {"fp8", "fbgemm_fp8", "ptpc_fp8"}:
        return True
    if method.startswith("modelopt"):
        return "FP8" in _modelopt_algorithm(scheme)
    groups = scheme.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, Mapping):
        return False
    activations = [group.get("input_activations") or {} for group in groups.values() if isinstance(group, Mapping)]
    return any(one.get("num_bits") == 8 and one.get("type") == "float" for one in activations)


def _quantised_bytes(scheme: Mapping[str, Any]) -> float:
    method = str(scheme.get("quant_method", ""))
    if method in _METHOD_BYTES:
        return _METHOD_BYTES[method]
    if method.startswith("modelopt"):
        return _modelopt_bytes(method, _modelopt_algorithm(scheme))
    if method in {"gptq", "awq"}:
        return _grouped_bytes(scheme.get("bits"), scheme.get("group_size"))
    if method == "compressed-tensors":
        weights = _compressed_tensors_weights(scheme)
        scale_bytes = 1.0 if (weights.get("type"), weights.get("num_bits")) == ("float", 4) else _SCALE_BYTES
        return _grouped_bytes(weights.get("num_bits"), weights.get("group_size"), scale_bytes)
    if method == "bitsandbytes":
        return 0.5 if scheme.get("load_in_4bit") else 1.0
    raise ModelConfigError("quantization_config", f"has quant_method {method!r}, whose bytes per weight are not known")


def _modelopt_algorithm(scheme: Mapping[str, Any]) -> str:
    """Return NVIDIA's name of the algorithm; older files have it in a section of its own."""
    return str(scheme.get("quant_algo", scheme.get("quantization", {}))).upper()


def _modelopt_bytes(method: str, algorithm: str) -> float:
    if "NVFP4" in algorithm or method == "modelopt_fp4":
        return _NVFP4_BYTES
    if "FP8" in algorithm or algorithm == "{}":
        return 1.0
    raise ModelConfigError("quantization_config.quant_algo", f"is {algorithm!r}, whose bytes per weight are not known")


def _compressed_tensors_weights(scheme: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = scheme.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping):
                return weights
    raise ModelConfigError("quantization_config.config_groups", "names no weights")


def _grouped_bytes(bits: object, group_size: object, scale_bytes: float = _SCALE_BYTES) -> float:
    """Return `bits`/8 plus a scale per group; scales per channel or tensor are too few to count."""
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ModelConfigError("quantization_config.bits", f"must be 1 to 16, not {bits!r}")
    scales = scale_bytes / group_size if isinstance(group_size, int) and group_size > 0 else 0.0
    return bits / 8 + scales
