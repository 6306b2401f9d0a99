"""Keeps a LoRA adapter to the rows of its own sequences, on CPUs.

vLLM marks rows without an adapter with the index -1, and its functions for CPUs take that as the last of the engine's
adapters. For the logits of a prompt it takes the adapters of the sampled rows, of which each sequence has one.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.layers import LogitsProcessorWithLoRA
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


def give_prompts_their_adapters(runner: Any) -> None:
    """Have a prompt's log-probabilities computed with its own adapter; `runner` is vLLM's GPUModelRunner.

    On a CPU they end the engine otherwise, if another sequence is in the same step.
    """
    heads = [module for module in runner.model.modules() if isinstance(module, LogitsProcessorWithLoRA)]
    if not heads or not isinstance(punica := heads[0].punica_wrapper, punica_cpu.PunicaWrapperCPU):
        return
    compute, tell = runner.model.compute_logits, runner._get_prompt_logprobs_dict

    def tell_with_own_adapters(states: Any, *args: Any) -> Any:
        length, sampled = punica.indices_len[1], punica._sampler_indices.clone()

        def compute_with_own_adapters(rows: Any) -> Any:
            first = (rows.data_ptr() - states.data_ptr()) // states[0].nbytes  # vLLM passes a part of the step's rows
            punica.indices_len[1] = len(rows)
            punica._sampler_indices[: len(rows)] = punica.token_lora_indices[first : first + len(rows)]
            return compute(rows)

        runner.model.compute_logits = compute_with_own_adapters
        try:
            return tell(states, *args)
        finally:
            runner.model.compute_logits = compute
            punica.indices_len[1] = length
            punica._sampler_indices.copy_(sampled)

    runner._get_prompt_logprobs_dict = tell_with_own_adapters


def _with_empty_rows(expand: Any) -> Any:
    def expand_with_empty_rows(inputs: Any, weights: Any, output: Any, indices: Any, *args: Any, **kwargs: Any) -> None:
        expand(inputs.masked_fill((indices < 0).unsqueeze(-1), 0.0), weights, output, indices, *args, **kwargs)

    return expand_with_empty_rows
