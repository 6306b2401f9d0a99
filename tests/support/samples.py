"""Valid values of the types with many fields, so that a test names only the fields it is about."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from ridgeline.contracts.handoff import KvHandoff, KvLayout, new_handoff_id
from ridgeline.contracts.tasks import LegTiming
from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import WorkerDescription
from ridgeline.engine.config import EngineConfig
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.router.settings import RouterConfig, RouterSettings, ServerConfig, SloConfig


def kv_layout(**changes: Any) -> KvLayout:
    """Return the layout of a small model, with `changes`."""
    fields = {
        "model": "m",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size": 32,
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
        "prefix_block_tokens": 32,
        "max_model_len": 4096,
        "max_num_seqs": 256,
    }
    return WorkerDescription(**(fields | changes))


def router_settings(settings: RouterSettings | None = None, **changes: Any) -> RouterSettings:
    """Return `settings`, or those of a disaggregated router on a free loopback port, with `changes`.

    A change is a field of the settings themselves, or of their section `router`, `server` or `router.slo`.
    """
    settings = settings or RouterSettings(
        router=RouterConfig(
            request_timeout_s=30.0,
            max_concurrent_requests=10,
            recovery_timeout_s=10.0,
            ready_deadline_s=5.0,
            max_client_share=1.0,
            rebalance="none",
        ),
        server=ServerConfig(port=0),
        model_path="m",
        served_names=("m",),
        dtype="bfloat16",
        max_model_len=4096,
        mode="disaggregated",
        overlap=True,
        reuse_decode_kv=True,
        prefill_window_tokens=dict.fromkeys(get_args(Pool), 1024),
        stall_timeout_s=60.0,
    )
    own, router, server, slo = (
        {name: changes.pop(name) for name in names if name in changes}
        for names in (
            {field.name for field in dataclasses.fields(RouterSettings)},
            *({*section.model_fields} for section in (RouterConfig, ServerConfig, SloConfig)),
        )
    )
    assert not changes, f"no such settings: {', '.join(changes)}"
    if slo:
        router["slo"] = settings.router.slo.model_copy(update=slo)
    sections = {
        "router": settings.router.model_copy(update=router),
        "server": settings.server.model_copy(update=server),
    }
    return dataclasses.replace(settings, **(sections | own))


LAYOUT = kv_layout(model="fake")
TIMING = LegTiming(queue_s=0.25, first_token_s=0.5, compute_s=0.5)


def engine_config(pool: Pool = "decode", worker_id: str | None = None) -> EngineConfig:
    return EngineConfig(
        worker_id=worker_id or f"{pool}-0",
        incarnation="i1",
        pool=pool,
        hands_over=True,
        model_path="none",
        dtype="bfloat16",
        max_model_len=4096,
        block_size=LAYOUT.block_size,
        max_num_seqs=256,
        max_num_batched_tokens=512,
        kv_cache_bytes_per_rank=None,
        tensor_parallel_size=1,
        enforce_eager=True,
        transfer=TransferOptions("127.0.0.1"),
        on_cpu=True,
        stall_timeout_s=60.0,
        drain_timeout_s=30.0,
    )


def make_handoff(handoff_id: str = "h1", num_tokens: int = 70) -> KvHandoff:
    return handoff_at("127.0.0.1:7001", -(-num_tokens // LAYOUT.block_size), handoff_id, num_tokens)


def handoff_at(
    address: str, num_blocks: int, handoff_id: str = "", num_tokens: int | None = None, lease_s: float = 30.0
) -> KvHandoff:
    """Blocks of four tokens, unless their number is given, at one source; with an id of its own if none is given."""
    return KvHandoff(
        handoff_id=handoff_id or new_handoff_id(),
        addresses=(address,),
        num_blocks=num_blocks,
        num_tokens=4 * num_blocks if num_tokens is None else num_tokens,
        compatibility_hash=LAYOUT.compatibility_hash(),
        lease_s=lease_s,
        num_bytes=num_blocks * 2048,
    )


def next_token(context: list[int]) -> int:
    """Return the next token as a function of the whole context, so that a lost token changes all that follow."""
    return (sum(context) * 31 + len(context) * 7) % 1000
