"""Keeps a LoRA adapter from sequences that have none, on CPUs.

vLLM marks their rows with the index -1, and its functions for CPUs take that as the last of the engine's adapters.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

EXPANDING = ("bgmv_expand", "bgmv_expand_slice")
"""The last step of every layer's adapter: what it adds for a row of zeros is zero."""


def keep_adapters_apart() -> None:
    """Replace vLLM's functions in this process, which may have been done already."""
    for name in EXPANDING:
        theirs = getattr(lora_ops, name)
        if theirs.__module__ == lora_ops.__name__:
            ours = _with_empty_rows(theirs)
            setattr(lora_ops, name, ours)  # for those of whole prompts, which call it
            setattr(punica_cpu, name, ours)


def _with_empty_rows(expand: Any) -> Any:
    def expand_with_empty_rows(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
        expand(inputs.masked_fill((indices < 0).unsqueeze(-1), 0.0), weights, output, indices, *args, **kwargs)

    return expand_with_empty_rows
