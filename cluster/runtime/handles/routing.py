"""The actors that are connected to every worker: the routers, and the dispatcher if there are several of them."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.runtime.actors import ServiceActor, engine_environment
from ridgeline.cluster.runtime.environment import forwarded_variables
from ridgeline.cluster.runtime.handles.actor import ANSWER_WITHIN_S, LOOPBACK, ActorHandle, DeploymentFailed
from ridgeline.cluster.runtime.plan import Plan
from ridgeline.contracts.rpc.address import http_url, ip_address
from ridgeline.contracts.vocabulary import Pool, RestartReason
from ridgeline.router.front.operations import Asked, Progress
from ridgeline.router.observe.fleet_use import FleetUse, Members
from ridgeline.router.observe.metrics import LimitedLatency, Within
from ridgeline.router.settings import PoolHardware, RouterStart, SharedWith

ROUTER_SERVICE = "ridgeline.cluster.runtime.services:RouterService"
DISPATCHER_SERVICE = "ridgeline.cluster.runtime.services:DispatcherService"


class NameTaken(DeploymentFailed):
    """Another deployment of this Ray cluster has this name."""


def _routing_environment(config: RidgelineConfig) -> dict[str, str]:
    ours = engine_environment(1, config.supervision.start_timeout_s, on_cpu=not config.uses_gpus())
    return forwarded_variables() | ours


def _beside_this_process(config: RidgelineConfig, resources: dict[str, float]) -> dict[str, Any]:
    """Have it run on the node of `serve`, if no resources say where: elsewhere nobody would look for its port."""
    if config.ray.address is None or resources:
        return {}
    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}


def _routing_actor(plan: Plan, service: str, name: str, resources: dict[str, float]) -> Any:
    """Create the actor, whose name in Ray begins with the deployment's. Raises NameTaken."""
    options = ray.remote(ServiceActor).options(
        name=f"{plan.config.name}/{name}",
        num_cpus=0,
        resources=resources,
        runtime_env={"env_vars": _routing_environment(plan.config)},
        max_restarts=-1,
        **_beside_this_process(plan.config, resources),
    )
    try:
        return options.remote(service, f"ridgeline::{name}")
    except ValueError as error:
        if "already taken" not in str(error):
            raise
        raise NameTaken(
            f"a deployment named {plan.config.name!r} runs on this Ray cluster already: end it with `ridgeline stop "
            f"--name {plan.config.name}` on the machine of its `serve`, or give this one another --name"
        ) from error


def reachable(url: str, node_host: str) -> str:
    """Return a URL that a client can use: a server that listens on all addresses is reached at its node's."""
    parts = urlsplit(url)
    address = ip_address(parts.hostname or "")
    return http_url(node_host, parts.port or 80) if address is not None and address.is_unspecified else url


class RoutingHandle(ActorHandle):
    """What routers and the dispatcher have in common: both are told of every worker."""

    kind: Literal["router", "dispatcher"]

    def __init__(self, name: str, actor: Any, plan: Plan) -> None:
        super().__init__(name, actor, plan.config)
        self._plan = plan
        self._settings = plan.router_settings()
        self._starts = 0
        self.deployment = secrets.token_hex(4)
        """See `RouterStart`."""

    def follow(self, plan: Plan) -> None:
        """Start by this plan instead, which was changed after the workers had been placed."""
        self._plan, self._settings = plan, plan.router_settings()

    async def prepare(self) -> None:
        """Have it import what is slow to import, while the engines load; it has a place. Raises DeploymentFailed."""
        await self.begin()
        self._starts += 1
        start = RouterStart(self.name, self._starts, self.deployment)
        self._settings = replace(self._settings, model_path=await self.model_path(self._plan), start=start)
        await self.call("prepare", self._settings)

    async def replace_worker(self, address: str, reason: RestartReason | None) -> None:
        """Have it take in a worker's new incarnation, or one that it has not reached before.

        Raises ActorGone, or DeploymentFailed if it cannot.
        """
        await self.call("replace_worker", address, reason)

    async def unreached(self, for_s: float) -> list[str]:
        """Ask which workers it has not reached for too long; returns addresses.

        Raises ActorGone or DeploymentFailed.
        """
        return list(await self.call("unreached", for_s, timeout_s=ANSWER_WITHIN_S))

    async def note_away(self, away: Mapping[str, str]) -> None:
        """Tell which workers are lost again and again, and how they are tried again. Raises DeploymentFailed."""
        await self.call("note_away", dict(away), timeout_s=ANSWER_WITHIN_S)

    async def remove_worker(self, worker_id: str) -> None:
        """Have it forget a worker that has left. Raises ActorGone or DeploymentFailed."""
        await self.call("remove_worker", worker_id)

    async def members(self, started_for: dict[str, Pool]) -> Members:
        """Return all workers with their present pools, those of `started_for` included.

        Raises ActorGone or DeploymentFailed.
        """
        members: Members = await self.call("members", started_for, timeout_s=ANSWER_WITHIN_S)
        return members

    async def use(self) -> FleetUse:
        """Return how much of the workers is in use. Raises ActorGone or DeploymentFailed."""
        use: FleetUse = await self.call("use", timeout_s=ANSWER_WITHIN_S)
        return use

    async def drain_worker(self, worker_id: str, timeout_s: float, incarnation: str) -> None:
        """Have a worker leave, whichever it is or only this incarnation: running tasks get `timeout_s`.

        Raises NotReached, ActorGone or DeploymentFailed.
        """
        await self.call("drain_worker", worker_id, timeout_s, incarnation, timeout_s=ANSWER_WITHIN_S)


class DispatcherHandle(RoutingHandle):
    """The dispatcher's actor."""

    kind = "dispatcher"

    def __init__(self, plan: Plan) -> None:
        super().__init__("dispatcher", _routing_actor(plan, DISPATCHER_SERVICE, "dispatcher", {}), plan)
        self.address = ""
        """host:port, once it serves."""
        self.routers: list[RouterHandle] = []
        """Those that must be told when another one has been started."""

    async def serve(self, addresses: list[str], *, some: bool = False) -> None:
        """Have it connect to the workers, or to `some`, and listen for routers. Raises DeploymentFailed."""
        host = LOOPBACK if self._plan.config.ray.address is None or self._place is None else self._place.host
        host = self._plan.config.transfer.host or host
        self.address = str(await self.call("serve", addresses, host, some))

    async def start_again(self, addresses: list[str]) -> None:
        """After `end`: wait for the new process, serve there, and tell the routers where. Raises DeploymentFailed."""
        await self.find_place()
        await self.prepare()
        await self.serve(addresses, some=True)
        for router in self.routers:
            with suppress(DeploymentFailed):  # one that is started again asks where the dispatcher is
                await router.call("follow_dispatcher", self.address, timeout_s=ANSWER_WITHIN_S)


class RouterHandle(RoutingHandle):
    """A router's actor; once it has picked a port it keeps it."""

    kind = "router"

    def __init__(self, plan: Plan, number: int = 0, dispatcher: DispatcherHandle | None = None) -> None:
        """`number`: which of several; these have a dispatcher."""
        name = "router" if dispatcher is None else f"router-{number}"
        super().__init__(name, _routing_actor(plan, ROUTER_SERVICE, name, dict(plan.config.router.resources)), plan)
        self._dispatcher = dispatcher
        if dispatcher is not None:
            self.deployment = dispatcher.deployment
        self._hardware: dict[Pool, PoolHardware] = {}
        self._joins_port = False

    @property
    def port(self) -> int:
        """The port on which it serves."""
        return self._settings.server.port

    def join(self, port: int) -> None:
        """Serve on the port that another router of the deployment has."""
        server = self._settings.server.model_copy(update={"port": port})
        self._settings = replace(self._settings, server=server)
        self._joins_port = True

    async def serve(self, addresses: list[str], hardware: dict[Pool, PoolHardware], *, some: bool = False) -> str:
        """Have it connect to the workers, or to `some`, and open the port; returns the URL. Raises DeploymentFailed."""
        self._hardware = hardware
        shared = None
        if self._dispatcher is not None:
            shared = SharedWith(self._dispatcher.address, self.port, joins_port=self._joins_port)
        url = str(await self.call("serve", addresses, hardware, shared, some))
        self.join(urlsplit(url).port or self.port)
        return reachable(url, LOOPBACK if self._place is None else self._place.host)

    async def start_again(self, addresses: list[str]) -> None:
        """After `end`: wait for the new process and serve there as before. Raises DeploymentFailed."""
        await self.find_place()
        await self.prepare()
        await self.serve(addresses, self._hardware, some=True)

    async def take_operation(self, within_s: float, cancelling: str) -> Asked:
        """Return what operators want beside what is being cancelled, or wait for it up to this many seconds.

        Raises ActorGone or DeploymentFailed.
        """
        asked: Asked = await self.call("take_operation", within_s, cancelling, timeout_s=within_s + ANSWER_WITHIN_S)
        return asked

    async def within(self, limits_s: Mapping[LimitedLatency, float]) -> dict[LimitedLatency, Within]:
        """Return how many sequences have kept each limit since its start. Raises ActorGone or DeploymentFailed."""
        return dict(await self.call("within", dict(limits_s), timeout_s=ANSWER_WITHIN_S))

    async def report(self, progress: Progress) -> None:
        """Tell how an operation stands. Raises ActorGone or DeploymentFailed."""
        await self.call("report", progress, timeout_s=ANSWER_WITHIN_S)
