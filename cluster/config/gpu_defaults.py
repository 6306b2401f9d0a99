"""Defaults that differ where a pool has GPUs, for settings that nobody has set.

Why: the other defaults are those of a CPU core, which a step of 512 tokens keeps busy for two seconds. A GPU's ridge is
at hundreds of tokens of a step (H100: 295 in bfloat16), its memory is for KV, and its engine compiles at start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

GPU_ORIGIN: Final = "default on GPUs"

POOLS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Prompts fill steps by themselves: more sequences than a step has room for would only hold KV.
    "prefill": {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": None},
    # What is recomputed here stalls the others for one chunk; more sequences share each read of the weights.
    "decode": {"max_num_seqs": 512, "max_num_batched_tokens": 2048, "kv_cache_memory_bytes": None},
    # As vLLM's own server on a GPU of 70 GiB or more, with as many sequences as half of the decode pool's.
    "colocated": {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": None},
}
"""Each pool's settings where its `gpus_per_worker` is above 0."""
SHARED: Final[Mapping[str, Any]] = {
    # A download of hundreds of gigabytes, torch.compile and the capture of graphs are part of a start.
    "supervision.start_timeout_s": 3600.0,
    # A kernel that is compiled or tuned at its first use takes tens of seconds in the middle of serving.
    "supervision.stall_timeout_s": 180.0,
}
"""Settings of the deployment where any pool has GPUs."""
_whole_number: Final = TypeAdapter(int)


def gpu_defaults(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (setting, default) for these values of a whole configuration; none of it has been checked yet."""
    with_gpus = [name for name in POOLS if _has_gpus(values["pools"][name].get("gpus_per_worker"))]
    for name in with_gpus:
        for setting, default in POOLS[name].items():
            yield f"pools.{name}.{setting}", default
    if with_gpus or _has_gpus(_adaptive(values).get("gpus_per_worker")):
        yield from SHARED.items()


def fill_adaptive(values: Mapping[str, Any]) -> None:
    """Give `pools.adaptive`, which is one setting, what it leaves out where it has GPUs."""
    if _has_gpus((adaptive := _adaptive(values)).get("gpus_per_worker")):
        adaptive.setdefault("kv_cache_memory_bytes", None)


def _adaptive(values: Mapping[str, Any]) -> dict[str, Any]:
    adaptive = values["pools"]["adaptive"]
    return adaptive if isinstance(adaptive, dict) else {}


def _has_gpus(number: object) -> bool:
    try:
        return _whole_number.validate_python(number) > 0  # as the setting is read: 1.0 and "1" are 1
    except ValidationError:
        return False
