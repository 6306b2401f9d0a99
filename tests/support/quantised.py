"""Quantises a tiny model by rounding to nearest, in the format of AWQ: 4 bits, whose groups share a scale."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

GROUP_WEIGHTS = 32
ZERO = 8
"""What stands for 0."""
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight weights each four bits of a word are, the lowest first."""
METHOD = {"quant_method": "awq", "bits": 4, "group_size": GROUP_WEIGHTS, "zero_point": True, "version": "gemm"}


def quantise(directory: Path) -> None:
    """Replace the weights of all projections, and name the method in `config.json`."""
    from safetensors.torch import load_file, save_file

    [file] = directory.glob("*.safetensors")
    tensors = {}
    for name, tensor in load_file(file).items():
        layer = name.removesuffix(".weight")
        parts = _parts(tensor) if layer.endswith("_proj") else {"weight": tensor}
        tensors |= {f"{layer}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": METHOD}))


def _parts(weight: Any) -> dict[str, Any]:
    """Return what stands for a weight of [outputs, inputs]."""
    import torch

    groups = weight.unflatten(1, (-1, GROUP_WEIGHTS))
    scale = groups.abs().amax(2, keepdim=True) / (ZERO - 1)
    values = ((groups / scale).round() + ZERO).flatten(1).to(torch.int32)
    scale = scale.squeeze(2).T
    zeros = torch.full_like(scale, ZERO, dtype=torch.int32)
    return {"qweight": _packed(values.T), "qzeros": _packed(zeros), "scales": scale}


def _packed(values: Any) -> Any:
    """Return each eight values of a row as one word."""
    eights = values.unflatten(1, (-1, 8))
    return reduce(lambda left, right: left | right, (eights[..., one] << 4 * at for at, one in enumerate(ORDER)))
