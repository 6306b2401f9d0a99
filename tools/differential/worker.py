"""Changes plain vLLM, in its engine's process, so that it survives the comparison on a CPU.

A seed with a prompt of several steps ends a CPU engine of vLLM 0.32, and so do log-probabilities of a prompt beside
LoRA. Requests that run together spoil each other's log-probabilities. `engine/vllm_workarounds` says why. Plain vLLM
gets the same three workarounds and nothing else of ours. vLLM imports this module before it makes its model runner.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from ridgeline.engine.vllm_workarounds.model_runner import keep_rows_apart, put_generators_back
from ridgeline.engine.vllm_workarounds.rows_without_adapter import give_prompts_their_adapters


class PlainWorkerExtension:
    """Adds nothing to vLLM's worker; naming it (`worker_extension_cls`) makes vLLM import this module."""


def _mend(runner_class: type[Any]) -> None:
    """Give every runner of this class the workarounds, from the time its model is loaded."""
    load_model = runner_class.load_model

    def load_model_and_mend(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        put_generators_back(self)
        keep_rows_apart(self)
        if self.lora_config is not None:
            give_prompts_their_adapters(self)

    runner_class.load_model = load_model_and_mend


_mend(CPUModelRunner)
