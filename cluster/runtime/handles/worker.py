"""A worker's actor: its place, its cores, and each new incarnation of its engine."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from ridgeline.cluster.config.models import PoolConfig, RidgelineConfig
from ridgeline.cluster.doctor.checks import resolve_dtype
from ridgeline.cluster.folders import log_name
from ridgeline.cluster.runtime.actors import ServiceActor, engine_environment
from ridgeline.cluster.runtime.environment import forwarded_variables
from ridgeline.cluster.runtime.handles.actor import ANSWER_WITHIN_S, LOOPBACK, ActorHandle, DeploymentFailed
from ridgeline.cluster.runtime.plan import CoreTable, PlacementError, Plan, PlannedWorker
from ridgeline.cluster.runtime.services import WorkerReady
from ridgeline.contracts.vocabulary import Pool

WORKER_SERVICE = "ridgeline.cluster.runtime.services:WorkerService"
STOP_WITHIN_S = 5.0


def worker_environment(settings: PoolConfig, config: RidgelineConfig) -> dict[str, str]:
    """Return the environment of the process of a worker of this pool."""
    on_cpu = settings.gpus_per_worker == 0
    return forwarded_variables() | engine_environment(
        settings.cores_per_worker,
        config.supervision.start_timeout_s,
        on_cpu=on_cpu,
        ranks=settings.ranks,
        mps_percent=settings.mps_active_thread_percent,
        compiles=not config.model.is_eager(on_cpu=on_cpu),
    )


def worker_actor(planned: PlannedWorker, config: RidgelineConfig) -> Any:
    """Create a worker's actor, which Ray places, and starts again on another node if need be."""
    settings = planned.settings
    return (
        ray.remote(ServiceActor)
        .options(
            num_cpus=settings.cores_per_worker,
            num_gpus=config.gpus_of(settings),
            resources=settings.resources,
            runtime_env={
                "env_vars": worker_environment(settings, config) | config.logging_of(planned.worker_id).variables()
            },
            max_concurrency=16,
            max_restarts=-1,
        )
        .remote(WORKER_SERVICE, f"ridgeline::worker {planned.worker_id}", log_name(config.name, planned.worker_id))
    )


class WorkerHandle(ActorHandle):
    """One worker; `start` makes a new incarnation of it."""

    def __init__(self, plan: Plan, planned: PlannedWorker, cores: CoreTable) -> None:
        super().__init__(planned.worker_id, worker_actor(planned, plan.config), plan.config)
        self.planned = planned
        self.retired = False
        """Whether it has ended for good: then nothing of it is left to be ended."""
        self._plan = plan
        self._cores = cores

    @property
    def pool(self) -> Pool:
        """The pool for which it is started."""
        return self.planned.pool

    @property
    def gpus(self) -> float:
        """The GPUs that it takes; half a one if it shares it."""
        return self._plan.config.gpus_of(self.planned.settings)

    def follow(self, plan: Plan) -> None:
        """Start by this plan instead, which was changed after the workers had been placed."""
        self._plan = plan

    def take_cores(self) -> tuple[int, ...]:
        """Take the cores the worker will run on; `find_place` must have been called. Raises PlacementError."""
        assert self._place is not None
        return self._cores.take(self.planned, self._place)

    async def load(self) -> WorkerReady:
        """Start a new incarnation of the engine in the existing process. Raises DeploymentFailed."""
        assert self._place is not None
        await self.begin()
        host = LOOPBACK if self._plan.config.ray.address is None else self._place.host
        config = self._plan.engine_config(self.planned, host)
        rack = self._place.labels.get(self._plan.config.ray.rack_label, "")
        config = replace(config, model_path=await self.model_path(self._plan), rack=rack)
        ready: WorkerReady = await self.call("start", config, self.take_cores(), not self._plan.config.ray.share_cores)
        self._children = ready.engine_processes
        self._files = ready.semaphores
        return ready

    async def start(self) -> str:
        """Start it beside workers that serve, and return its address.

        Raises NoPlace, PlacementError, DeploymentFailed.
        """
        place = await self.find_place()
        dtype = resolve_dtype(self._plan.config, place.cpu_flags)
        if dtype != self._plan.dtype:
            raise PlacementError(
                f"{self.planned.title} landed on {place.host}, where model.dtype auto means {dtype}; the others "
                f"compute {self._plan.dtype}: set model.dtype, or add a machine of the same kind"
            )
        return (await self.load()).address

    async def start_again(self) -> str:
        """After `end`: wait for the new process, load the engine there, return its address. Raises DeploymentFailed."""
        await self.find_place()
        try:
            return (await self.load()).address
        except PlacementError as error:
            raise DeploymentFailed(str(error)) from error

    async def close_peer_mappings(self) -> None:
        """Have its engine close the KV caches of others that are open there; it may be gone already."""
        with suppress(RayError):
            await self._actor.call.remote("close_peer_mappings")

    async def ending(self) -> str:
        """Say how its engine's process ended; empty if it cannot be asked any more."""
        try:
            return str(await self.call("ending", timeout_s=ANSWER_WITHIN_S))
        except DeploymentFailed:
            return ""

    async def retire(self) -> None:
        """End the worker for good, gently if possible, and free its cores."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_WITHIN_S):
                await self.stop()
        await self.kill()
        self._cores.give_back(self.name)
        self.retired = True
