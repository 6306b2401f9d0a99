"""What one engine needs to know. Built by `cluster.runtime.plan` from the one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from contracts.rpc.tls import TlsFiles
from contracts.vocabulary import Pool
from kv_transfer.names import TransportName, WireDtype


@dataclass(frozen=True)
class HostSettings:
    """How long a worker is patient, in seconds."""

    stall_timeout_s: float = 60.0
    """With work and without a step for this long, its engine counts as stalled."""
    drain_timeout_s: float = 30.0
    """How long running tasks may still take after SIGTERM."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine of one worker; sizes in the units their names carry."""

    worker_id: str
    incarnation: str
    pool: Pool
    model_path: str
    dtype: str
    max_model_len_tokens: int
    block_size_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes_per_rank: int | None
    """vLLM's own setting is per rank too; None: what is left on the GPU."""
    tensor_parallel_size: int
    enforce_eager: bool
    host: str
    """The interface on which the worker's data plane and its KV source listen."""
    lease_s: float
    fetch_deadline_s: float
    faults: str | None
    """For tests: a plan for `kv_transfer.testing.faults`."""
    transport: TransportName
    """What this engine's fetches use; `auto` picks for each source."""
    on_cpu: bool
    wire_dtype: WireDtype = "none"
    """How this engine asks for blocks that travel over a network; `shm` copies them as they are."""
    passed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of vLLM's own, as configured: see `engine.passed_args`."""
    tls: TlsFiles | None = None
    """Between this worker and router and other workers; None: plain text."""
