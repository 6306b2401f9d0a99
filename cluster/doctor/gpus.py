"""The checks of `cluster.doctor.checks` that concern GPUs: enough of them, a driver for our CUDA, memory, a compiler.

Why apart: nothing here applies to engines on CPUs. What is missing on a GPU host shows half a minute into an engine's
start, on another node's log, as "Engine core initialization failed"; here it is one sentence. On a joined cluster the
first worker of each node checks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from ridgeline.cluster.config.models import GPU_SHARERS, PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.facts import HostFacts
from ridgeline.cluster.doctor.software import CheckResult, gib, judged
from ridgeline.cluster.node_gpus import Gpu, UnknownHardware, peaks_of
from ridgeline.contracts.vocabulary import Pool

LEAST_DRIVER: Final = 580
"""The driver that CUDA 13 needs, with which the pinned vLLM and torch are built; older ones need NVIDIA's cuda-compat
libraries (data-centre GPUs only)."""
LEAST_CAPABILITY: Final = (7, 5)
"""CUDA 13 has no code for older GPUs (Volta and before)."""
BFLOAT16_CAPABILITY: Final = (8, 0)
DEFAULT_UTILIZATION: Final = 0.92
"""The part of a GPU's memory that vLLM takes unless `gpu_memory_utilization` is set."""

Pools = Mapping[Pool, PoolConfig]


def gpu_count(config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    """Check that there are as many GPUs as the pools take; on a joined cluster Ray counts."""
    needed = math.ceil(sum(pool.workers * config.gpus_of(pool) for pool in pools.values()))
    if not needed:
        return
    ok = needed <= host.gpus
    sections = sections_of(config, pools)
    fix = f"{needed} GPUs are needed and {host.gpus} visible: lower workers or gpus_per_worker in {sections}"
    if not host.gpus:
        fix += ", or run on a machine with GPUs and NVIDIA's driver (nvidia-smi lists them)"
        if config.transfer.transport == "cuda-ipc":
            fix += ". On CPUs, which gpus_per_worker 0 means, transfer.transport has to be shm instead of cuda-ipc"
    yield CheckResult("gpus", ok, f"{needed} needed, {host.gpus} visible", halved(config) if ok else f"{fix}.")


def sections_of(config: RidgelineConfig, pools: Pools) -> str:
    """Say where the numbers of workers of these pools are written."""
    return " or ".join(dict.fromkeys(section for name in pools for section in config.sections_of(name)))


def halved(config: RidgelineConfig) -> str:
    """Return a warning of whole replicas that share a GPU; empty without any.

    On one H100 an 8B took 8.5 ms a token with one replica, and 18.4 with two (docs/results/h100-2026-11-26.json).
    """
    if not config.ray.share_gpus or config.mode != "colocated" or config.pools.colocated.workers < GPU_SHARERS:
        return ""
    return (
        "Whole replicas that share a GPU (ray.share_gpus) halve each other's speed: leave "
        "ray.share_gpus out and set pools.colocated.workers to the number of GPUs, or choose another mode."
    )


def gpu_software(config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    """Check what an engine on a GPU needs of the node beside the GPU: its driver, and what Triton compiles with."""
    if not _on_gpus(pools):
        return
    yield _driver(host)
    missing = [
        name for name, there in (("a C compiler", host.c_compiler), ("Python.h", host.python_header)) if not there
    ]
    fix = (
        f"Triton compiles small C modules when an engine starts, and {' and '.join(missing)} cannot be found: install "
        "gcc and Python's headers (`apt-get install build-essential python3-dev`)."
    )
    found = f"{' and '.join(missing)} missing" if missing else "a C compiler and Python.h"
    yield judged("compiler", not missing, found, fix)
    if config.uses_mps():
        problem = host.mps_problem
        fix = (
            f"Engines with mps_active_thread_percent need NVIDIA's MPS, and {problem}: run "
            "`nvidia-cuda-mps-control -d` as the user of `ridgeline serve`, or leave the setting out."
        )
        yield judged("mps", not problem, problem or "daemon answers", fix)


def gpu_devices(config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    """Check each kind of GPU here: number formats, free memory, and whether its peaks are known."""
    if not _on_gpus(pools) or not host.gpu_devices:
        return
    yield _capability(config, min(host.gpu_devices, key=lambda gpu: gpu.compute_capability))
    for name, pool in pools.items():
        yield from _memory(config, host, name, pool)
    try:
        peaks = peaks_of(host.gpu_devices, "bfloat16")
    except UnknownHardware as error:
        names = ", ".join(sorted({gpu.name for gpu in host.gpu_devices}))
        yield CheckResult("peaks", True, f"unknown for {names}", f"Metrics will have no peaks: {error}.")
    else:
        yield CheckResult("peaks", True, f"{peaks.name}: {peaks.source}")


def _on_gpus(pools: Pools) -> bool:
    return any(pool.gpus_per_worker and pool.workers for pool in pools.values())


def _driver(host: HostFacts) -> CheckResult:
    if not host.gpu_devices:
        fix = (
            f"GPUs cannot be used, since {host.gpu_problem or 'none is visible'}: install NVIDIA's driver "
            f"{LEAST_DRIVER} or newer (in a container, start it with GPUs: `docker run --gpus all`)."
        )
        return CheckResult("gpu driver", False, "no answer", fix)
    version = host.gpu_devices[0].driver
    text = ".".join(map(str, version))
    fix = (
        f"The driver is {text}, and this build of vLLM is for CUDA 13, which needs {LEAST_DRIVER} or newer: update "
        "the driver, or install the package cuda-compat-13-0 and put its folder on LD_LIBRARY_PATH."
    )
    return judged("gpu driver", not version or version[0] >= LEAST_DRIVER or host.cuda_compat, text, fix)


def _capability(config: RidgelineConfig, gpu: Gpu) -> CheckResult:
    capability = ".".join(map(str, gpu.compute_capability))
    detail = f"{gpu.name}, compute capability {capability}"
    fix = ""
    if gpu.compute_capability == (0, 0):
        detail = f"{gpu.name}, whose compute capability the driver does not tell"
    elif gpu.compute_capability < LEAST_CAPABILITY:
        fix = (
            f"{gpu.name} has compute capability {capability}, and CUDA 13 has code for "
            f"{'.'.join(map(str, LEAST_CAPABILITY))} and newer: use another GPU."
        )
    elif config.model.dtype == "bfloat16" and gpu.compute_capability < BFLOAT16_CAPABILITY:
        fix = f"{gpu.name} (compute capability {capability}) has no bfloat16: set model.dtype to float16 or auto."
    return CheckResult("gpu", not fix, detail, fix)


def _memory(config: RidgelineConfig, host: HostFacts, name: Pool, pool: PoolConfig) -> Iterator[CheckResult]:
    """Check one pool against the GPU that has least; 0 bytes means that the driver does not tell."""
    known = [gpu for gpu in host.gpu_devices if gpu.memory_bytes and not gpu.partitioned]
    if not pool.gpus_per_worker or not known:
        return
    gpu = min(known, key=lambda one: one.free_bytes)
    part = float(config.args_of(name).get("gpu_memory_utilization", DEFAULT_UTILIZATION))
    engines = GPU_SHARERS if config.ray.share_gpus else 1
    needed = engines * part * gpu.memory_bytes
    fix, detail = "", f"{gib(gpu.free_bytes)} free of {gib(gpu.memory_bytes)}, {gib(needed)} wanted"
    # The size of the files with weights, which quantised ones keep in memory; 0 if it is not known.
    weights = (host.model.parameters or 0) * (4 if config.model.dtype == "float32" else 2) / pool.ranks
    cache = (pool.kv_cache_memory_bytes or 0) / pool.ranks
    if gpu.free_bytes < needed:
        fix = (
            f"GPU {gpu.index} has {gib(gpu.free_bytes)} free, and {'an engine' if engines == 1 else 'two engines'} of "
            f"{name} {'wants' if engines == 1 else 'want'} {gib(needed)} "
            f"({part:g} of its memory): end what uses it (nvidia-smi lists it), or lower "
            f"{config.section_of(name)}.engine_args.gpu_memory_utilization."
        )
    elif weights + cache > gpu.memory_bytes:
        what = f"weights of {gib(weights)}" + (f" and a KV cache of {gib(cache)}" if cache else "")
        fix = (
            f"A GPU of {name} would hold {what}, and has {gib(gpu.memory_bytes)}: raise "
            f"{config.section_of(name)}.gpus_per_worker (one rank on each), lower kv_cache_memory_bytes, or serve a "
            "smaller model."
        )
    yield CheckResult(f"gpu memory, {name}", not fix, detail, fix)
