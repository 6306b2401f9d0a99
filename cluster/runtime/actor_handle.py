"""One Ray actor by name, whichever process fills it: Ray starts the process again when it ends.

Used by `cluster.runtime.deployment` for the first start and by `cluster.runtime.supervisor` for the later ones.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config.models import RidgelineConfig
from cluster.model_store import DEFAULT_MODEL_NAME
from cluster.runtime.actors import NodePlace, ServiceActor, engine_environment
from cluster.runtime.environment import forwarded_variables
from cluster.runtime.plan import CoreTable, PlacementError, Plan, PlannedWorker
from cluster.runtime.processes import ProcessId, end_processes
from cluster.runtime.service_process.calls import ServiceError, ServiceGone
from cluster.runtime.services import NotServing, WorkerReady
from contracts.errors import WorkerLost
from contracts.rpc.address import http_url, ip_address
from contracts.vocabulary import Health, Pool
from router.settings import PoolHardware

LOOPBACK = "127.0.0.1"
"""The address everything listens on when Ray was started here, for this machine alone."""
WORKER_SERVICE = "cluster.runtime.services:WorkerService"
ROUTER_SERVICE = "cluster.runtime.services:RouterService"
ANSWER_WITHIN_S = 20.0
REMOTE_END_WITHIN_S = 30.0
RETRY_S = 0.2
STOP_WITHIN_S = 5.0


class DeploymentFailed(RuntimeError):
    """Something that was running or starting is gone; the message names it."""


class NoPlace(DeploymentFailed):
    """Ray has no node for the actor now."""


class NotReached(DeploymentFailed):
    """The router could not connect to a worker in time."""


class ActorGone(DeploymentFailed):
    """The actor's process ended during the call, or is a new one that does not serve yet."""


_KINDS: dict[type[BaseException], type[DeploymentFailed]] = {
    NotServing: ActorGone,
    ServiceGone: ActorGone,
    WorkerLost: NotReached,
}
"""What each exception of an actor becomes on this side."""


class ActorHandle:
    """What workers and the router have in common: one actor by name."""

    def __init__(self, name: str, actor: Any, config: RidgelineConfig) -> None:
        self.name = name
        self._placement_timeout_s = config.ray.patience_s
        self._start_timeout_s = config.supervision.start_timeout_s
        self._actor = actor
        self._place: NodePlace | None = None
        self._service: ProcessId | None = None
        """The process that runs the actor's service, and must not outlive it."""
        self._children: tuple[ProcessId, ...] = ()
        """Processes below the service's."""
        self._files: tuple[str, ...] = ()
        """Files of their semaphores, to be removed with them."""

    async def find_place(self) -> NodePlace:
        """Wait until Ray has placed the actor in a process not seen before, and return where.

        Raises NoPlace after `ray.placement_timeout_s`, and DeploymentFailed if there will be none.
        """
        try:
            async with asyncio.timeout(self._placement_timeout_s):
                self._place = await self._other_place(self._place)
        except TimeoutError as error:
            limit = f"{self._placement_timeout_s:.0f} s (ray.placement_timeout_s)"
            raise NoPlace(f"Ray found no place for {self.name} within {limit}") from error
        except RayError as error:
            raise DeploymentFailed(f"Ray could not start {self.name}: {str(error).splitlines()[0]}") from error
        return self._place

    async def _other_place(self, former: NodePlace | None) -> NodePlace:
        while True:
            with suppress(ActorUnavailableError):
                place: NodePlace = await self._actor.place.remote()
                if former is None or (place.node_id, place.pid) != (former.node_id, former.pid):
                    return place
            await asyncio.sleep(RETRY_S)

    async def begin(self) -> None:
        """Have the actor start the process of its service. Raises DeploymentFailed or ActorGone."""
        self._service = await self._ask("begin")

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call the actor's service; an error there becomes one sentence here. Raises DeploymentFailed or ActorGone.

        Without a `timeout_s` of its own it may take as long as a start.
        """
        return await self._ask("call", method, *args, timeout_s=timeout_s)

    async def model_path(self, plan: Plan) -> str:
        """Return what to load as the model on the actor's node. Raises DeploymentFailed."""
        if plan.config.ray.address is None:
            return str(plan.model_path)
        default = plan.config.model.path == DEFAULT_MODEL_NAME
        wanted = plan.model_path.absolute() if plan.model_path.is_dir() else plan.model_path
        return str(await self.call("prepare_model", DEFAULT_MODEL_NAME if default else str(wanted)))

    async def call_apart(self, method: str, *args: Any) -> Any:
        """The same in a process of its own, which then ends."""
        return await self._ask("call_apart", method, *args)

    async def _ask(self, what: str, *args: Any, timeout_s: float | None = None) -> Any:
        method = args[0] if args else what
        limit_s = self._start_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(self._actor, what).remote(*args)
        except TimeoutError as error:
            setting = " (supervision.start_timeout_s)" if timeout_s is None else ""
            raise DeploymentFailed(f"{self.name} did not finish {method} within {limit_s:.0f} s{setting}") from error
        except RayActorError as error:
            first_line = str(error).splitlines()[0]
            raise ActorGone(f"{self.name} ended while it ran {method}: {first_line}") from error
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            message = str(cause) if isinstance(cause, ServiceError) else f"{type(cause).__name__}: {cause}"
            raise _KINDS.get(type(cause), DeploymentFailed)(f"{self.name} could not {method}: {message}") from error

    async def failure(self, known: Health | None = None) -> Health:
        """Ask whether the actor's process must be replaced, and why. While that is `known`, the answer takes `HOLD_S`.

        While Ray starts another process in place of a dead one, calls fail; the new process then reports it.
        """
        give_up_s = time.monotonic() + ANSWER_WITHIN_S
        while True:
            try:
                async with asyncio.timeout(give_up_s - time.monotonic()):
                    health: Health = await self._actor.failure.remote(known)
                    return health
            except TimeoutError:
                return "unreachable"
            except ActorUnavailableError:
                await asyncio.sleep(RETRY_S)
            except RayError:
                return "actor_died"

    async def end(self) -> None:
        """SIGKILL what is left of the actor's process and those below it, and wait until they are gone."""
        place = self._place
        if place is None:
            return
        processes = [*self._children, *([self._service] if self._service else []), place.process]
        if place.node_id == ray.get_runtime_context().get_node_id():
            await asyncio.to_thread(end_processes, processes, self._files)
            return
        there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        try:
            async with asyncio.timeout(REMOTE_END_WITHIN_S):
                end_there = ray.remote(end_processes).options(num_cpus=0, scheduling_strategy=there)
                await end_there.remote(processes, self._files)
        except (RayError, TimeoutError):
            # The node is gone, or as good as: Ray then starts the actor on another one.
            ray.kill(self._actor, no_restart=False)

    async def stop(self) -> None:
        """Ask the actor to stop; it may be gone already."""
        with suppress(RayError):
            await self._actor.call.remote("stop")

    async def kill(self) -> None:
        """End the actor now, and have Ray start no other."""
        try:
            ray.kill(self._actor, no_restart=True)
        finally:
            await self.end()


def worker_actor(planned: PlannedWorker, config: RidgelineConfig) -> Any:
    """Create a worker's actor, which Ray places, and starts again on another node if need be."""
    settings = planned.settings
    env = forwarded_variables() | engine_environment(
        settings.cores_per_worker,
        config.supervision.start_timeout_s,
        on_cpu=settings.gpus_per_worker == 0,
        ranks=settings.ranks,
    )
    return (
        ray.remote(ServiceActor)
        .options(
            num_cpus=settings.cores_per_worker,
            num_gpus=settings.gpus_per_worker,
            resources=settings.resources,
            runtime_env={"env_vars": env},
            max_concurrency=16,
            max_restarts=-1,
        )
        .remote(WORKER_SERVICE, f"ridgeline::worker {planned.worker_id}")
    )


class WorkerHandle(ActorHandle):
    """One worker; `start` makes a new incarnation of it."""

    def __init__(self, plan: Plan, planned: PlannedWorker, cores: CoreTable) -> None:
        super().__init__(planned.worker_id, worker_actor(planned, plan.config), plan.config)
        self.planned = planned
        self._plan = plan
        self._cores = cores

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
        config = replace(config, model_path=await self.model_path(self._plan))
        ready: WorkerReady = await self.call("start", config, self.take_cores(), self._plan.host_settings())
        self._children = ready.engine_processes
        self._files = ready.semaphores
        return ready

    async def start_again(self) -> str:
        """After `end`: wait for the new process, load the engine there, return its address. Raises DeploymentFailed."""
        await self.find_place()
        try:
            return (await self.load()).address
        except PlacementError as error:
            raise DeploymentFailed(str(error)) from error

    async def retire(self) -> None:
        """End the worker for good, gently if possible, and free its cores."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_WITHIN_S):
                await self.stop()
        await self.kill()
        self._cores.give_back(self.name)


def _router_environment(config: RidgelineConfig) -> dict[str, str]:
    ours = engine_environment(1, config.supervision.start_timeout_s, on_cpu=not config.uses_gpus())
    return forwarded_variables() | ours


def _beside_this_process(config: RidgelineConfig) -> dict[str, Any]:
    """Have the router run on the node of `serve`, if nothing says where: elsewhere nobody would look for its port."""
    if config.ray.address is None or config.router.resources:
        return {}
    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}


def reachable(url: str, node_host: str) -> str:
    """Return a URL that a client can use: a server that listens on all addresses is reached at its node's."""
    parts = urlsplit(url)
    address = ip_address(parts.hostname or "")
    return http_url(node_host, parts.port or 80) if address is not None and address.is_unspecified else url


class RouterHandle(ActorHandle):
    """The router's actor; once it has picked a port it keeps it."""

    def __init__(self, plan: Plan) -> None:
        actor = (
            ray.remote(ServiceActor)
            .options(
                num_cpus=0,
                resources=dict(plan.config.router.resources),
                runtime_env={"env_vars": _router_environment(plan.config)},
                max_restarts=-1,
                **_beside_this_process(plan.config),
            )
            .remote(ROUTER_SERVICE, "ridgeline::router")
        )
        super().__init__("router", actor, plan.config)
        self._plan = plan
        self._settings = plan.router_settings()
        self._hardware: dict[Pool, PoolHardware] = {}

    def follow(self, plan: Plan) -> None:
        """Start by this plan instead, which was changed after the workers had been placed."""
        self._plan, self._settings = plan, plan.router_settings()

    async def prepare(self) -> None:
        """Have it import what is slow to import, while the engines load. Raises DeploymentFailed."""
        await self.find_place()
        await self.begin()
        self._settings = replace(self._settings, model_path=await self.model_path(self._plan))
        await self.call("prepare", self._settings)

    async def serve(self, addresses: list[str], hardware: dict[Pool, PoolHardware]) -> str:
        """Have it connect to the workers and open the port; returns the URL. Raises DeploymentFailed."""
        self._hardware = hardware
        url = str(await self.call("serve", addresses, hardware))
        self._settings = replace(self._settings, port=urlsplit(url).port or self._settings.port)
        return reachable(url, LOOPBACK if self._place is None else self._place.host)

    async def start_again(self, addresses: list[str]) -> None:
        """After `end`: wait for the new process and serve there as before. Raises DeploymentFailed."""
        await self.prepare()
        await self.serve(addresses, self._hardware)

    async def replace_worker(self, address: str, reason: Health) -> None:
        """Have it take in a worker's new incarnation. Raises ActorGone, or DeploymentFailed if the router cannot."""
        await self.call("replace_worker", address, reason)

    async def unreached(self, for_s: float) -> list[str]:
        """Ask which workers it has not reached for too long; returns addresses.

        Raises ActorGone or DeploymentFailed.
        """
        return list(await self.call("unreached", for_s, timeout_s=ANSWER_WITHIN_S))

    async def remove_worker(self, worker_id: str) -> None:
        """Have it forget a worker that has left. Raises ActorGone or DeploymentFailed."""
        await self.call("remove_worker", worker_id)
