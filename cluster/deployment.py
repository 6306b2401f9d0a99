"""Starts the workers and the router on Ray, watches them, and takes them down again.

Called by `ridgeline serve` and, once per mode, by `ridgeline compare`. Everything is tied to this process: when it
ends, however it ends, Ray ends its actors, and every engine process ends with its actor (`engine.parent_watch`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayError

from cluster.actors import RouterActor, WorkerActor, WorkerReady, engine_environment
from cluster.config import PoolName, RidgelineConfig
from cluster.plan import PlacementError, Plan, PlannedWorker, assign_cores
from router.fleet import KvPair
from router.settings import PoolHardware

PLACEMENT_TIMEOUT_S = 120.0
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 15.0

LOOPBACK = "127.0.0.1"

Say = Callable[[str], None]


class DeploymentFailed(RuntimeError):
    """Something that was running or starting is gone; the message says what."""


@dataclass(frozen=True)
class Row:
    """One line of the table of what runs where."""

    name: str
    pool: str
    node: str
    cores: str
    pid: int
    engine_pids: tuple[int, ...]
    address: str
    kv_blocks: int
    start_s: float


class Deployment:
    """Running actors; made by `deploy`."""

    def __init__(self, url: str, rows: list[Row], kv_pairs: list[KvPair], actors: dict[str, Any]) -> None:
        self.url = url
        self.rows = rows
        self.kv_pairs = kv_pairs
        self._actors = actors

    async def watch(self) -> None:
        """Return never; raise DeploymentFailed as soon as an actor or its engine is gone."""
        try:
            async with asyncio.TaskGroup() as group:
                for name, actor in self._actors.items():
                    group.create_task(_watch(name, actor))
        except* DeploymentFailed as failures:
            raise failures.exceptions[0] from None

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; how many did not end in time."""
        return int(await self._actors["router"].drain.remote(timeout_s))


@asynccontextmanager
async def ray_runtime(config: RidgelineConfig) -> AsyncIterator[None]:
    """Ray itself: started here for this process, or joined at ray.address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "ridgeline"}
    try:
        if config.ray.address is None:
            cores = max(
                len(os.sched_getaffinity(0)), sum(p.workers * p.cores_per_worker for p in config.all_pools().values())
            )
            resource_tables = [config.router.resources, *(pool.resources for pool in config.all_pools().values())]
            resources = {name: 1000.0 for table in resource_tables for name in table}
            _keep_ray_on_loopback()
            ray.init(
                num_cpus=cores,
                _node_ip_address=LOOPBACK,
                resources=resources,
                object_store_memory=config.ray.object_store_bytes,
                include_dashboard=False,
                # Ray runs workers at niceness 15, where any other process on the machine delays a token or a KV frame.
                _system_config={"worker_niceness": 0},
                **common,
            )
        else:
            ray.init(address=config.ray.address, **common)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = config.ray.address or "on this machine"
        raise DeploymentFailed(f"Ray did not start or answer ({where}): {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _keep_ray_on_loopback() -> None:
    """Before Ray is started here: have it listen on loopback only.

    Whoever reaches Ray's ports can run code, and Ray opens them on all interfaces unless its address is loopback, which
    it replaces by an outward one. It does not where it may not form a cluster; its switch for that is read at import.
    """
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


@asynccontextmanager
async def deploy(plan: Plan, say: Say) -> AsyncIterator[Deployment]:
    """Place and start everything; on exit stop it, engines first. Raises PlacementError or DeploymentFailed."""
    actors: dict[str, Any] = {}
    try:
        for worker in plan.workers:
            actors[worker.worker_id] = _worker_actor(worker)
        actors["router"] = (
            ray.remote(RouterActor)
            .options(
                num_cpus=0,
                resources=dict(plan.config.router.resources),
                runtime_env={"env_vars": engine_environment(1, on_cpu=not plan.config.uses_gpus())},
            )
            .remote()
        )
        yield await _start(plan, actors, say)
    finally:
        await _stop(actors)


def _worker_actor(worker: PlannedWorker) -> Any:
    settings = worker.settings
    env = engine_environment(settings.cores_per_worker, on_cpu=settings.gpus_per_worker == 0, ranks=settings.ranks)
    return (
        ray.remote(WorkerActor)
        .options(
            num_cpus=settings.cores_per_worker,
            num_gpus=settings.gpus_per_worker,
            resources=settings.resources,
            runtime_env={"env_vars": env},
            max_concurrency=16,
        )
        .remote()
    )


async def _start(plan: Plan, actors: dict[str, Any], say: Say) -> Deployment:
    say(f"placing {len(plan.workers)} workers and the router on Ray")
    places = await _placed(plan, actors)
    local_only = plan.config.ray.address is None
    cores = assign_cores(plan.workers, places)
    hardware = await _hardware(plan, actors, say)
    router = asyncio.ensure_future(_call(actors, "router", "prepare", plan.router_settings()))
    starts = [
        _timed_start(plan, actors, worker, LOOPBACK if local_only else place.host, worker_cores, say)
        for worker, place, worker_cores in zip(plan.workers, places, cores, strict=True)
    ]
    started = await _all_or_fail([*starts, router])
    ready: list[tuple[WorkerReady, float]] = started[:-1]
    say("connecting the router to the workers")
    url = await _call(actors, "router", "serve", [worker.address for worker, _ in ready], hardware)
    rows = [
        Row(
            name=planned.worker_id,
            pool=planned.pool,
            node=place.host,
            cores=",".join(map(str, worker.cores)) or f"{planned.settings.gpus_per_worker} GPU",
            pid=worker.pid,
            engine_pids=worker.engine_pids,
            address=worker.address,
            kv_blocks=worker.num_kv_blocks,
            start_s=start_s,
        )
        for planned, place, (worker, start_s) in zip(plan.workers, places, ready, strict=True)
    ]
    return Deployment(url, rows, await _call(actors, "router", "kv_pairs"), actors)


async def _placed(plan: Plan, actors: dict[str, Any]) -> list[Any]:
    try:
        async with asyncio.timeout(PLACEMENT_TIMEOUT_S):
            return list(await asyncio.gather(*(actors[worker.worker_id].place.remote() for worker in plan.workers)))
    except TimeoutError as error:
        wanted = ", ".join(
            f"{w.worker_id}: {w.settings.cores_per_worker} CPU, {w.settings.gpus_per_worker} GPU, "
            f"{w.settings.resources or 'no custom resources'}"
            for w in plan.workers
        )
        raise PlacementError(
            f"Ray found no place for all workers within {PLACEMENT_TIMEOUT_S:.0f} s. Wanted: {wanted}. The cluster has "
            f"{ray.cluster_resources()}: add nodes or lower pools.*"
        ) from error
    except RayError as error:
        raise DeploymentFailed(f"a worker process ended while starting: {error}") from error


async def _hardware(plan: Plan, actors: dict[str, Any], say: Say) -> dict[PoolName, PoolHardware]:
    """Peaks of one worker of each pool, measured one after the other and before any engine makes the node busy."""
    say("reading or measuring peak FLOP/s and memory bandwidth")
    first = {worker.pool: worker for worker in reversed(plan.workers)}
    return {
        pool: await _call(
            actors,
            worker.worker_id,
            "hardware",
            plan.dtype,
            worker.settings.cores_per_worker,
            worker.settings.gpus_per_worker,
        )
        for pool, worker in first.items()
    }


async def _timed_start(
    plan: Plan, actors: dict[str, Any], worker: PlannedWorker, host: str, cores: tuple[int, ...], say: Say
) -> tuple[WorkerReady, float]:
    began_s = time.monotonic()
    say(f"{worker.worker_id}: loading the engine" + (f" on core {','.join(map(str, cores))}" if cores else ""))
    ready = await _call(actors, worker.worker_id, "start", plan.engine_config(worker, host), cores)
    took_s = time.monotonic() - began_s
    say(f"{worker.worker_id}: ready after {took_s:.0f} s")
    return ready, took_s


async def _call(actors: dict[str, Any], name: str, method: str, *args: Any) -> Any:
    """Call an actor; what went wrong there becomes one sentence here."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            return await getattr(actors[name], method).remote(*args)
    except TimeoutError as error:
        raise DeploymentFailed(f"{name} did not finish {method} within {START_TIMEOUT_S:.0f} s") from error
    except RayActorError as error:
        raise DeploymentFailed(f"{name} ended while it ran {method}: {error}") from error
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        raise DeploymentFailed(f"{name} could not {method}: {type(cause).__name__}: {cause}") from error


async def _all_or_fail(awaitables: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _watch(name: str, actor: Any) -> None:
    try:
        await actor.wait_failed.remote()
    except RayError as error:
        raise DeploymentFailed(f"{name} is gone: {str(error).splitlines()[0]}") from error
    raise DeploymentFailed(f"the engine process of {name} is gone")


async def _stop(actors: dict[str, Any]) -> None:
    """Stop gracefully, then end what is left. Engines watch their actors, so a kill leaves nothing behind."""
    names = ["router", *(name for name in actors if name != "router")]
    stopping = [actors[name].stop.remote() for name in names if name in actors]
    if stopping:
        await asyncio.wait(
            [asyncio.ensure_future(_quietly(reference)) for reference in stopping], timeout=STOP_TIMEOUT_S
        )
    for actor in actors.values():
        ray.kill(actor)


async def _quietly(reference: Any) -> None:
    try:
        await reference
    except RayError:
        return  # it is gone already, which is what we wanted
