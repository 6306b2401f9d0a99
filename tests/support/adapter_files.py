"""The files of small LoRA adapters, as PEFT writes them: whole ones, and some whose weights are only a header."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

from ridgeline.engine.adapter_files import CONFIG, WEIGHTS

RANK, ALPHA = 8, 16
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")
Q, OUT = "base_model.model.model.layers.{}.self_attn.q_proj", "base_model.model.model.layers.{}.self_attn.o_proj"


def write_adapter(
    folder: Path, shapes: dict[str, list[int]] | None = None, *, weights: bytes = b"", **config: Any
) -> Path:
    """Write an adapter of rank 8 for two layers of width 64; more tensors have `shapes`, and all have `weights`."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {f"{Q.format(0)}.lora_A.weight": [8, 64], f"{OUT.format(1)}.lora_B.weight": [64, 8], **(shapes or {})}
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in shapes.items()}).encode()
    (folder / WEIGHTS[0]).write_bytes(struct.pack("<Q", len(header)) + header + weights)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 8, "base_model_name_or_path": "m", **config}))
    return folder


def make_adapter(folder: Path, model: Any, seed: int) -> Any:
    """Write an adapter of this model of transformers, and return the model with the adapter's weights added."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors, merged = {}, copy.deepcopy(model)
    for name, module in merged.named_modules():
        if name.endswith(MODULES):
            a, b = torch.randn(RANK, module.in_features) * 0.05, torch.randn(module.out_features, RANK) * 0.05
            module.weight.data += ALPHA / RANK * b @ a
            tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / WEIGHTS[0])
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES, "bias": "none"}
    (folder / CONFIG).write_text(json.dumps(config))
    return merged.eval()
