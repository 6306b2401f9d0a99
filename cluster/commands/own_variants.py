"""The modes of an own deployment that `ridgeline compare` compares: checked, started, switched or restarted."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from rich.console import Console

from ridgeline.cluster.commands.serve import ready_state_of, say_with_time, started, state_of
from ridgeline.cluster.commands.setup import versions
from ridgeline.cluster.config.api_keys import first_admin_key
from ridgeline.cluster.config.autoscale import AutoscaleConfig
from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig
from ridgeline.cluster.deployments.names import DeploymentFolder
from ridgeline.cluster.doctor.checks import refuse_unfit_machine, resolve_dtype
from ridgeline.cluster.runtime.ray_start import ray_runtime
from ridgeline.contracts.section import MIB
from ridgeline.contracts.vocabulary import Mode
from ridgeline.loadtest.plan import COLOCATED, DISAGGREGATED, ComparePlan
from ridgeline.loadtest.run.calibration import Workers
from ridgeline.loadtest.run.server_facts import UNKNOWN, ServerFacts
from ridgeline.loadtest.variants import Deployments, Devices, SwitchedVariant, Variant


@asynccontextmanager
async def own_variants(
    config: RidgelineConfig, modes: tuple[Mode, ...], console: Console
) -> AsyncIterator[tuple[str, tuple[Variant, ...]]]:
    """Start a deployment, and yield its URL with a variant for each mode; stop it at the end."""
    for mode in modes:
        refuse_unfit_machine(config.model_copy(update={"mode": mode}))
    async with ray_runtime(config) as ray_messages:
        console.print(f"what Ray itself says goes to {ray_messages}", style="dim", highlight=False, markup=False)
        async with Deployments(partial(_serving, config, console)) as deployments:
            yield await _variants(deployments, config, modes, console)


def planned_variants(config: RidgelineConfig, modes: tuple[Mode, ...]) -> tuple[Variant, ...]:
    """Return what is known of the modes before anything has started."""
    return tuple(
        SwitchedVariant("", mode, {}, devices=devices_of(config, mode), facts=facts_of(config, mode)) for mode in modes
    )


@asynccontextmanager
async def _serving(config: RidgelineConfig, console: Console, mode: Mode) -> AsyncIterator[str]:
    """Run the deployment in this mode, and yield its URL."""
    name = f"compare-{os.getpid()}-{secrets.token_hex(2)}"  # on a joined cluster there may be others
    config = config.model_copy(update={"mode": mode, "name": name, "autoscale": AutoscaleConfig()})
    place = DeploymentFolder(name)
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, place.folder, ignore_errors=True)  # nobody will ask for this name again
        held = stack.enter_context(place.held(**state_of(config)))
        deployment = await stack.enter_async_context(started(config, console, place))
        held.tell(**ready_state_of(deployment))
        watching = asyncio.create_task(
            deployment.watch(partial(say_with_time, console), lambda away: held.tell(away=dict(away)))
        )
        try:
            yield deployment.url
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            if not watching.cancelled():
                watching.result()  # raises why the deployment ended, of which requests only saw the effects


async def _variants(
    deployments: Deployments, config: RidgelineConfig, modes: tuple[Mode, ...], console: Console
) -> tuple[str, tuple[Variant, ...]]:
    """Start variant a, and switch the modes of its deployment if it can serve all; else each variant needs starts."""
    restarted = tuple(deployments.variant(mode, devices_of(config, mode), facts_of(config, mode)) for mode in modes)
    url, keys_file = await deployments.start(restarted[0]), config.security.admin_keys_file
    if len(modes) == 1:
        return url, restarted
    headers = {"authorization": f"Bearer {first_admin_key(keys_file)}"} if keys_file else {}
    switched = tuple(
        SwitchedVariant(url, mode, headers, devices=devices_of(config, mode), facts=facts_of(config, mode))
        for mode in modes
    )
    for variant in switched:
        if (why_not := await variant.obstacle()) is not None:
            told = f"variants need a start each, {variant.mode} cannot be switched to: {why_not}"
            console.print(told, highlight=False, markup=False)
            return url, restarted
    return url, switched


def facts_of(config: RidgelineConfig, mode: Mode) -> ServerFacts:
    """Return the settings that all engines of a mode have, as far as the configuration says them.

    Places and token budgets are not among them: each pool has its own, since prefill and decode need others.
    """
    pools = config.model_copy(update={"mode": mode}).active_pools().values()
    model = config.model
    on_cpu = not any(pool.gpus_per_worker for pool in pools)

    def same(values: Iterable[object]) -> str:
        found = {str(value) for value in values}
        return found.pop() if len(found) == 1 else UNKNOWN

    return ServerFacts(
        server="Ridgeline",
        engine=f"vLLM {versions()['vllm']}",
        dtype=UNKNOWN if (dtype := resolve_dtype(config)) == "auto" or config.ray.address is not None else dtype,
        block_size=str(model.block_size),
        graphs="off" if model.is_eager(on_cpu=on_cpu) else UNKNOWN,
        tensor_parallel_size=same(pool.ranks for pool in pools),
    )


def split_workers(config: RidgelineConfig, modes: tuple[Mode, ...]) -> Workers | None:
    """Return the workers of the two pools in units of a colocated replica, if `compare` measures first on one."""
    if modes[:2] != (COLOCATED, DISAGGREGATED):
        return None
    pools = config.pools

    def hardware(pool: PoolConfig) -> float:
        return pool.gpus_per_worker or pool.cores_per_worker

    replica = hardware(pools.colocated)
    return Workers(
        prefill=pools.prefill.workers * hardware(pools.prefill) / replica,
        decode=pools.decode.workers * hardware(pools.decode) / replica,
    )


def devices_of(config: RidgelineConfig, mode: Mode) -> Devices:
    """Return the GPUs that the pools of a mode have, or the cores if they have none."""
    pools = config.model_copy(update={"mode": mode}).active_pools().values()
    on_gpus = any(pool.gpus_per_worker for pool in pools)

    def of_worker(pool: PoolConfig) -> int:
        return pool.gpus_per_worker if on_gpus else pool.cores_per_worker

    count = sum(pool.workers * of_worker(pool) for pool in pools)
    by_pool = {str(name): of_worker(pool) for name, pool in config.all_pools().items()}
    return Devices("GPU" if on_gpus else "core", count, by_pool)


def refusals(config: RidgelineConfig, plan: ComparePlan) -> Iterator[str]:
    """Yield why this comparison would fail or say nothing, a sentence with its fix each."""
    served = config.model.served_names
    if plan.served_model_name not in (None, *served):
        yield (
            f"--served-model-name {plan.served_model_name}: this configuration serves {', '.join(served)}: leave it "
            "out, or set model.served_model_name"
        )
    if config.ray.share_cores:
        yield (
            "ray.share_cores lets engines take turns on the same cores, so no timing would hold: set it to false and "
            "give the pools no more cores than there are"
        )
    if config.ray.share_gpus:
        yield (
            "ray.share_gpus lets two engines take turns on one GPU, so no timing would hold: leave it out, with a GPU "
            "for each worker"
        )
    if config.transfer.faults:
        yield (
            f"transfer.faults ({config.transfer.faults}) makes fetches fail on purpose, which only the disaggregated "
            "mode pays for: leave it out"
        )
    if len(set(plan.modes)) > 1 and (unequal := equal_hardware(config)) is not None:
        yield unequal


def equal_hardware(config: RidgelineConfig) -> str | None:
    """Return a sentence when the two modes would not have the same cores, GPUs and bytes of KV cache, else None."""
    pools = config.pools
    split = (pools.prefill, pools.decode)
    for unit in ("cores", "gpus"):
        per_worker = f"{unit}_per_worker"
        disaggregated = sum(pool.workers * getattr(pool, per_worker) for pool in split)
        colocated = pools.colocated.workers * getattr(pools.colocated, per_worker)
        if disaggregated != colocated:
            return (
                f"the two modes must run on equal hardware: prefill and decode have {disaggregated} {unit}, colocated "
                f"has {colocated}: change pools.colocated.workers or {per_worker}"
            )
    cached = (pools.colocated, *split)
    sized = [pool for pool in cached if pool.kv_cache_memory_bytes is not None]
    if sized and len(sized) < len(cached):  # a cache that takes what the weights leave free has no number yet
        return (
            "the two modes must have equal KV caches: kv_cache_memory_bytes is set for some pools and null, which "
            "takes all that is free, for others: set it for pools.prefill, pools.decode and pools.colocated, or for "
            "none of them"
        )
    whole, *parts = (pool.workers * (pool.kv_cache_memory_bytes or 0) for pool in cached)
    if sum(parts) != whole:
        return (
            f"the two modes must have equal KV caches: prefill and decode have {sum(parts) / MIB:,.0f} MiB "
            f"together, colocated has {whole / MIB:,.0f} MiB: change kv_cache_memory_bytes of a pool"
        )
    return None
