"""The files of small LoRA adapters, as PEFT writes them; their weights are only a header."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ridgeline.engine.adapter_files import CONFIG, WEIGHTS

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
