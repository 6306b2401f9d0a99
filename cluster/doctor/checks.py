"""Says whether this machine can run this configuration, and if not, in one sentence what to change.

Why: an engine that dies half a minute into its start with a stack trace does not tell anybody what was wrong. They run
before anything starts, and on each node of a joined cluster before an engine loads there.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from ridgeline.cluster.config.models import OBJECT_STORE_BYTES, PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.facts import HostFacts, read_cpu_flags, read_host_facts
from ridgeline.cluster.doctor.gpus import gpu_count, gpu_devices, gpu_software, sections_of
from ridgeline.cluster.doctor.model_support import adapters, model_conflicts
from ridgeline.cluster.doctor.software import (
    CheckResult,
    gib,
    home,
    judged,
    model,
    open_files,
    packages,
    port,
    security,
    temporary_folder,
    torch_companions,
    transport_package,
)
from ridgeline.cluster.errors import ServingError
from ridgeline.contracts.section import GIB, MIB
from ridgeline.contracts.vocabulary import Pool
from ridgeline.engine.connector.transferable_models import keeps_every_token

__all__ = [
    "CheckResult",
    "checks",
    "failures",
    "node_checks",
    "refuse_unfit_machine",
    "report",
    "resolve_dtype",
    "unfit_for",
]

ENGINE_OVERHEAD_BYTES = int(1.2 * GIB)  # code, tokenizer and activations of one rank, about
GPU_RANK_HOST_BYTES = 4 * GIB
"""Host memory of a process that uses a GPU: CUDA's context, compiled kernels, page-locked buffers; not measured yet."""
RAY_AND_ROUTER_BYTES = int(1.5 * GIB)
SHARED_MEMORY_MARGIN_BYTES = 64 * MIB
CPU_CORE_FLOPS = 50e9
"""Roughly what vLLM gets out of one core in a long step; measured: 70e9 with AVX2 in float32."""
RANK_QUEUE_BYTES = 256 * MIB  # vLLM wants this much free for each queue between ranks, and uses little of it

_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")
_NATIVE_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def checks(config: RidgelineConfig, facts: HostFacts | None = None) -> list[CheckResult]:
    """Run every check that applies; what an existing Ray cluster places elsewhere is not judged by this machine."""
    host = facts or read_host_facts(config)
    pools = config.active_pools()
    found = [result for check in (*_SOFTWARE, home, port, security) for result in check(config, host)]
    if config.ray.address is None:
        found += temporary_folder(config, host)
        found += [result for check in (*_SIZES, _shared_memory, gpu_count) for result in check(config, host, pools)]
    return found + list(_limits(config, host))


def refuse_unfit_machine(config: RidgelineConfig) -> None:
    """Raise ServingError before anything starts. A joined cluster's machines are checked by Ray's placement instead."""
    if config.ray.address is None and (sentences := failures(checks(config))):
        raise ServingError(*sentences)


def node_checks(
    config: RidgelineConfig, workers: Mapping[Pool, int], facts: HostFacts | None = None
) -> list[CheckResult]:
    """Run the checks of a node of a joined cluster on which Ray has placed so many workers of each pool.

    GPUs are not counted: Ray has, and shows each worker its own alone. What Ray itself needs, it has already.
    """
    host = facts or read_host_facts(config)
    engines_here = config.model_copy(update={"ray": config.ray.model_copy(update={"address": None})})
    pools = {name: config.all_pools()[name].model_copy(update={"workers": number}) for name, number in workers.items()}
    found = [result for check in _SOFTWARE for result in check(engines_here, host)]
    return found + [result for check in _SIZES for result in check(config, host, pools)]


def unfit_for(config: RidgelineConfig, together: Mapping[Pool, int], others: Sequence[Pool]) -> list[str]:
    """Return why this machine of a joined cluster cannot run so many workers of each pool together.

    And why none of the `others`, which Ray may place here as well; in a process of its own.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # by which Ray hides all GPUs from a task that takes none
    asked = [each for each in (together, *({pool: 1} for pool in others)) if each]
    return [*dict.fromkeys(fix for workers in asked for fix in failures(node_checks(config, workers)))]


def failures(results: Sequence[CheckResult]) -> list[str]:
    """Return the sentences to show before refusing to start; empty when everything needed is there."""
    return [result.fix for result in results if not result.ok]


def report(results: Sequence[CheckResult]) -> Table:
    """Build the table that `ridgeline doctor` prints."""
    table = Table("", "check", "finding", box=None, padding=(0, 1), show_header=False)
    for result in results:
        style = ("yellow" if result.fix else "green") if result.ok else "red"
        mark = ("!" if result.fix else "✓") if result.ok else "✗"
        finding = Text(result.detail)
        if result.fix:
            finding.append(f"\n{result.fix}", style=style)
        table.add_row(Text(mark, style=style), result.name, finding)
    return table


def resolve_dtype(config: RidgelineConfig, cpu_flags: frozenset[str] | None = None) -> str:
    """Choose the number format that `auto` stands for on a machine with these flags, by default this one.

    On GPUs it stays `auto`: vLLM takes the checkpoint's format, or float16 on a GPU without bfloat16.

    CPUs without bfloat16 instructions emulate it: measured with an AVX2 machine, one core prefills SmolLM2-135M at 40
    tokens/s in bfloat16 and at 255 in float32.
    """
    if config.model.dtype != "auto":
        return config.model.dtype
    if config.uses_gpus():
        return "auto"
    flags = read_cpu_flags() if cpu_flags is None else cpu_flags
    return "bfloat16" if flags & _NATIVE_BFLOAT16_FLAGS else "float32"


Pools = Mapping[Pool, PoolConfig]
"""The pools with workers on a machine; `workers` of each is their number there."""


def _cpu(config: RidgelineConfig, host: HostFacts, _pools: Pools) -> Iterator[CheckResult]:
    """Check the instructions of CPUs that run engines: those that vLLM needs, and those for the number format."""
    if config.uses_gpus():
        return
    best = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in host.cpu_flags), None)
    best = "NEON" if host.machine in _ARM else best if host.machine in _X86 else None
    fix = "vLLM for CPU needs AVX2 or AVX-512 (x86) or an arm64 CPU: use another machine or virtual machine type."
    yield judged("cpu", best is not None, f"{host.machine}, {best or 'without AVX2 and AVX-512'}", fix)
    native, chosen = bool(host.cpu_flags & _NATIVE_BFLOAT16_FLAGS), resolve_dtype(config, host.cpu_flags)
    why = "native bfloat16" if native else "no bfloat16 instructions here (AVX512-BF16 or AMX)"
    slow = "This CPU emulates bfloat16, about 6 times slower than float32: set model.dtype to auto or float32."
    yield CheckResult("dtype", True, f"{chosen}; {why}", slow if chosen == "bfloat16" and not native else "")


def _cores(config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    if config.ray.share_cores:
        needed = max(pool.cores_per_worker for pool in pools.values())
    else:
        needed = sum(pool.workers * pool.cores_per_worker for pool in pools.values())
    where = sections_of(config, pools)
    fix = (
        f"{needed} cores are needed and {host.cores} usable: lower workers or cores_per_worker in {where}, or raise "
        "the container's CPU limit."
    )
    yield judged("cores", needed <= host.cores, f"{needed} needed, {host.cores} usable", fix)


def _memory(config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    engines = sum(pool.workers * _engine_bytes(config, host, pool) for pool in pools.values())
    beside = RAY_AND_ROUTER_BYTES + OBJECT_STORE_BYTES if config.ray.address is None else 0
    needed = engines + beside
    unknown = "" if host.model.parameters or config.uses_gpus() else " without the weights, whose size is not known yet"
    detail = f"{gib(needed)} needed{unknown}, {gib(host.memory_available_bytes)} available"
    fix = f"{detail}: lower kv_cache_memory_bytes or workers in {sections_of(config, pools)}, or free memory."
    yield judged("memory", needed <= host.memory_available_bytes, detail, fix)


def _engine_bytes(config: RidgelineConfig, host: HostFacts, pool: PoolConfig) -> int:
    if pool.gpus_per_worker:  # weights and KV cache are in GPU memory
        return ENGINE_OVERHEAD_BYTES + pool.ranks * GPU_RANK_HOST_BYTES
    weights_bytes = (host.model.parameters or 0) * _value_bytes(config, host)
    return (
        weights_bytes + (pool.kv_cache_memory_bytes or 0) + pool.ranks * ENGINE_OVERHEAD_BYTES
    )  # each rank is a process


def _shared_memory(_config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    split = any(pool.ranks > 1 for pool in pools.values())
    needed_bytes = OBJECT_STORE_BYTES + SHARED_MEMORY_MARGIN_BYTES + (RANK_QUEUE_BYTES if split else 0)
    needed_mib = needed_bytes // MIB
    free_mib = host.shared_memory_free_bytes // MIB
    who = "Ray and the engines' ranks need" if split else "Ray needs"
    fix = (
        f"/dev/shm has {free_mib} MiB free and {who} {needed_mib}: start the container with --shm-size=1g, or run "
        "`mount -o remount,size=1g /dev/shm`."
    )
    yield judged("/dev/shm", needed_mib <= free_mib, f"{needed_mib} MiB needed, {free_mib} free", fix)


def _steps(config: RidgelineConfig, host: HostFacts, pools: Pools) -> Iterator[CheckResult]:
    """Check, on CPU, where a step takes seconds, that a full step is shorter than the timeouts that wait for it."""
    if not host.model.parameters or config.uses_gpus():
        return
    limits = [("supervision.stall_timeout_s", config.supervision.stall_timeout_s)]
    if config.mode == "disaggregated":  # engines hear of hand-offs, and begin to renew leases, between two steps
        limits.append(("transfer.lease_s", config.transfer.lease_s))
    for name, pool in pools.items():
        flops = 2.0 * host.model.parameters * pool.max_num_batched_tokens
        step_s = flops / (CPU_CORE_FLOPS * pool.cores_per_worker)
        short = [(setting, value) for setting, value in limits if value < step_s]
        detail = f"about {step_s:.1f} s for {pool.max_num_batched_tokens} tokens"
        fix = " ".join(
            f"One step of {name} takes {detail} here, too long for {setting} ({value:g}): set that to at least "
            f"{math.ceil(2 * step_s)}, or lower {config.section_of(name)}.max_num_batched_tokens."
            for setting, value in short
        )
        yield CheckResult(f"step, {name}", not short, detail, fix)


def _address(config: RidgelineConfig, host: HostFacts, _pools: Pools) -> Iterator[CheckResult]:
    if config.transfer.host is not None:
        yield CheckResult("transfer.host", not host.address_problem, config.transfer.host, host.address_problem)


_SOFTWARE = (packages, torch_companions, transport_package, model, adapters, open_files)

_SIZES = (_address, _cpu, _cores, _memory, _steps, gpu_software, gpu_devices)


def _limits(config: RidgelineConfig, host: HostFacts) -> Iterator[CheckResult]:
    """Check for what the model's own shape makes impossible."""
    longest, positions = config.model.max_model_len, host.model.max_positions
    if positions and longest > positions:
        fix = f"The model knows {positions} positions: set model.max_model_len to at most {positions}."
        yield CheckResult("context length", False, f"{longest} asked, {positions} possible", fix)
    for sentence in model_conflicts(config, host.model):
        yield CheckResult("model's shape", False, "cannot be served as configured", sentence)
    if host.model.kv_values_per_token and keeps_every_token(host.model.config):
        token_bytes = host.model.kv_values_per_token * _value_bytes(config, host)
        for name, pool in config.active_pools().items():
            if pool.kv_cache_memory_bytes is not None:
                yield _kv_cache_fits(config, name, pool.kv_cache_memory_bytes, token_bytes)


def _kv_cache_fits(config: RidgelineConfig, name: Pool, cache_bytes: int, token_bytes: int) -> CheckResult:
    """Check that one request of full length fits; otherwise the engine refuses to start."""
    block = config.model.block_size
    fits = cache_bytes // (token_bytes * block) * block
    needed_mib = -(-(config.model.max_model_len + block) * token_bytes // MIB)
    longest = config.model.max_model_len
    fix = (
        f"{config.section_of(name)}.kv_cache_memory_bytes holds {fits} tokens, and one request may have {longest}: "
        f"raise it to at least {needed_mib} MiB, or lower model.max_model_len."
    )
    ok = fits >= longest + block  # one block is the engine's own
    return judged(f"kv cache, {name}", ok, f"{fits} tokens in {cache_bytes // MIB} MiB", fix)


def _value_bytes(config: RidgelineConfig, host: HostFacts) -> int:
    return 4 if resolve_dtype(config, host.cpu_flags) == "float32" else 2
