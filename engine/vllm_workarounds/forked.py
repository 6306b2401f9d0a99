"""Engine processes are forked from the process that asks for them, which has imported all they need.

vLLM starts them afresh on CPUs, whatever is configured, so that each imports torch and vLLM again: 11 s of CPU time.
Called in a process that has no thread that computes and has made no gRPC connection yet, and not for an engine of
several ranks: OpenMP binds those to cores when it is loaded, and they would inherit the ends of each other's queues.
"""

from __future__ import annotations

import os

CPU_ENGINE_MODULES = (
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
"""What an engine on CPUs imports when it starts, beside what `ridgeline.engine.vllm_engine` does."""


def fork_engines() -> None:
    """Have the next engine of this process forked; call it when vLLM has made its configuration."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
