"""What two engines must agree on before they can exchange KV blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub import try_to_load_from_cache
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, group_kernel_blocks

from ridgeline.contracts.handoff import KvLayout
from ridgeline.engine.connector.groups import CacheGroups

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NOT_OF_THE_MODEL: Final = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Entries of a model's configuration that say where and by what it was read; its files may lie elsewhere on each node.
"""
WEIGHT_FILES: Final = (".safetensors", ".bin", ".pt", ".gguf")
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 4096


def kv_layout(
    vllm_config: VllmConfig, groups: CacheGroups, kv_caches: dict[str, Any], rows: dict[str, torch.Tensor]
) -> KvLayout:
    """Describe what two engines must agree on before they can exchange blocks, which are `rows` of bytes."""
    from vllm.version import __version__ as vllm_version

    row = next(iter(rows.values()))
    attention = [
        group_kernel_blocks(cache, row.shape[0]) for cache in kv_caches.values() if isinstance(cache, torch.Tensor)
    ]
    first = attention[0] if attention else row  # recurrent layers have lists of states
    model, cache = vllm_config.model_config, vllm_config.cache_config
    layout = cache.get_resolved_kv_cache_layout().name
    shape = {name: value for name, value in model.hf_config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    config_digest = hashlib.sha256(json.dumps(shape, sort_keys=True, default=str).encode()).hexdigest()
    return KvLayout(
        model=f"{model.hf_config.model_type}-{config_digest[:12]}",
        weights=weights_digest(model.model, model.revision) + _draft_digest(vllm_config.speculative_config),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_dtype=kv_format(first.dtype, cache.cache_dtype),
        block_size=groups.all[0].layers.block_size,
        num_layers=len(rows),
        num_kv_heads=model.get_total_num_kv_heads(),
        block_bytes=row.shape[1],
        layout=layout if first.dim() in (2, 4) else f"{layout} in {first.shape[1]} parts",
        isa=_packed_for(vllm_config, first),
        engine_version=str(vllm_version),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        groups=groups.layers,
        heads_are_runs=all(heads_are_runs(group.spec, attention, layout) for group in groups.all),
    )


def _draft_digest(speculation: Any) -> str:
    """Return the digest of the layers that draft, whose KV lies beside the model's; empty without any."""
    if speculation is None or not speculation.uses_draft_kv_cache():
        return ""
    draft = speculation.draft_model_config
    return f" {weights_digest(draft.model, draft.revision)}"


def heads_are_runs(spec: Any, caches: Sequence[torch.Tensor], layout: str) -> bool:
    """Return whether adjacent KV heads lie together in all blocks, so that ranks can divide them by slicing.

    They do not if tokens come before heads, if a block consists of smaller ones or of a state, or if all keys precede
    all values.
    """
    return (
        layout in ("LBHNC", "BLHNC")
        and isinstance(spec, AttentionSpec)
        and not isinstance(spec, MLAAttentionSpec)
        and getattr(spec, "num_head_slots", None) is None
        and spec.page_size_bytes == spec.unpadded_page_size_bytes
        and all(cache.dim() == 4 and cache.shape[1] == spec.num_kv_heads for cache in caches)
    )


def kv_format(stored: torch.dtype, cache_dtype: str) -> str:
    """Return the number format of keys and values; if torch has no type for it, the name of the setting."""
    name = str(stored).removeprefix("torch.")
    return name if stored.is_floating_point or cache_dtype == "auto" else f"{cache_dtype} in {name}"


def _packed_for(vllm_config: VllmConfig, layer: torch.Tensor) -> str:
    """Return what defines the order of bytes in a block: a CPU's instruction set or a GPU's attention kernels.

    GPUs of different architectures can exchange blocks if both run the same backend.
    """
    if layer.device.type != "cpu":
        backends = {backend.get_name() for backend in get_current_attn_backends(vllm_config)}
        return "+".join([layer.device.type, *sorted(backends)])
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    head_dim = vllm_config.model_config.get_head_size()
    return str(_get_attn_isa(layer.dtype, vllm_config.cache_config.block_size, head_dim, None))


def weights_digest(path_or_name: str, revision: str | None = None) -> str:
    """Return a short name for the weights of a model that is on disk; empty if there are none.

    It covers the name and the size of each file with weights, and `SAMPLES` pieces of it: enough to tell any two
    revisions of a model apart, without reading all of them. A name of the hub is looked up in the hub's cache.
    """
    folder = Path(path_or_name)
    if not folder.is_dir():
        cached = try_to_load_from_cache(path_or_name, "config.json", revision=revision)
        if not isinstance(cached, str):
            return ""
        folder = Path(cached).parent
    files = sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_FILES)
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        _add_file(digest, file)
    return digest.hexdigest()[:16]


def _add_file(digest: hashlib._Hash, file: Path) -> None:
    size_bytes = file.stat().st_size
    digest.update(f"{file.name} {size_bytes} ".encode())
    with file.open("rb") as opened:
        for sample in range(SAMPLES):
            opened.seek(sample * max(0, size_bytes - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
