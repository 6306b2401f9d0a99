"""The configuration of one engine, built from the deployment's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine.speculation import speculates
from ridgeline.kv_transfer.options import TransferOptions


@dataclass(frozen=True)
class EngineConfig:
    """One engine of one worker; units are in the names."""

    worker_id: str
    incarnation: str
    pool: Pool
    """The pool for which it is started; the router may give it another one later."""
    hands_over: bool
    """Whether its KV blocks may go to another engine; in a deployment that stays in mode colocated they do not."""
    model_path: str
    dtype: str
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes_per_rank: int | None
    """Bytes per rank, like vLLM's own setting; None: what is left on the GPU."""
    tensor_parallel_size: int
    enforce_eager: bool
    transfer: TransferOptions
    """Its KV source listens on the host named there, and so does the worker's data plane, with the same TLS files."""
    on_cpu: bool
    stall_timeout_s: float
    """An engine with work and without a finished step for this long counts as stalled."""
    drain_timeout_s: float
    """Running tasks may take this much longer after SIGTERM."""
    passed: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's own arguments, as configured: see `ridgeline.engine.passed_args`."""
    step_target_s: float = 0.0
    """How long a step may take while sequences decode, until a role says otherwise; 0: no target."""
    rack: str = ""
    """The rack of its node, by the node's label in Ray; empty if it has none."""
    device: str = ""
    """The cores or GPUs of its node that compute its steps; empty if not known."""

    @property
    def repeats_tokens(self) -> bool:
        """Whether the engine can be made to repeat tokens that a client already has.

        On GPUs vLLM may use its second model runner, whose processors have another interface that has not run here yet.
        """
        return self.on_cpu and not speculates(self.passed)
