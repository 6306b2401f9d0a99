"""Valid values of the types with many fields, so that a test names only the fields it is about."""

from __future__ import annotations

from typing import Any

from contracts.handoff import KvLayout
from contracts.workers import WorkerDescription
from router.settings import RouterSettings


def kv_layout(**changes: Any) -> KvLayout:
    """Return the layout of a small model, with `changes`."""
    fields = {
        "model": "m",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size_tokens": 32,
        "num_layers": 2,
        "num_kv_heads": 2,
        "block_bytes": 1024,
        "layout": "LBHNC",
        "isa": "amx",
        "engine_version": "0",
        "tensor_parallel_size": 1,
    }
    return KvLayout(**(fields | changes))


def worker_description(**changes: Any) -> WorkerDescription:
    """Return a decode worker with 100 blocks of 32 tokens, with `changes`."""
    fields = {
        "worker_id": "decode-0",
        "incarnation": "i",
        "pool": "decode",
        "pid": 1,
        "host": "h",
        "layout": kv_layout(),
        "transfer_addresses": ["a"],
        "num_kv_blocks": 100,
        "block_size_tokens": 32,
        "max_model_len_tokens": 4096,
        "max_num_seqs": 256,
    }
    return WorkerDescription(**(fields | changes))


def router_settings(**changes: Any) -> RouterSettings:
    """Return the settings of a disaggregated router on a free loopback port, with `changes`."""
    fields = {
        "model_path": "m",
        "served_name": "m",
        "dtype": "bfloat16",
        "max_model_len_tokens": 4096,
        "host": "127.0.0.1",
        "port": 0,
        "mode": "disaggregated",
        "request_deadline_s": 30.0,
        "max_outstanding_requests": 10,
        "min_remote_prefill_tokens": 0,
        "overlap": True,
        "prefill_window_tokens": {"prefill": 1024, "decode": 1024, "colocated": 1024},
        "max_prompt_wait_s": 30.0,
        "recovery_timeout_s": 10.0,
        "ready_deadline_s": 5.0,
    }
    return RouterSettings(**(fields | changes))
