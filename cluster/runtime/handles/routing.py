"""The actors that are connected to every worker: the routers, and the dispatcher if there are several of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ridgeline.cluster.config.api_keys import KeyHashes
from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.folders import log_name
from ridgeline.cluster.runtime.actors import ServiceActor, engine_environment
from ridgeline.cluster.runtime.environment import forwarded_variables
from ridgeline.cluster.runtime.handles.actor import ANSWER_WITHIN_S, LOOPBACK, ActorHandle, DeploymentFailed
from ridgeline.cluster.runtime.plan import Plan
from ridgeline.contracts.rpc.address import http_url, ip_address
from ridgeline.contracts.vocabulary import Pool
from ridgeline.router.front.operations import Asked
from ridgeline.router.settings import PoolHardware, RouterStart, SharedWith

ROUTER_SERVICE = "ridgeline.cluster.runtime.services:RouterService"
DISPATCHER_SERVICE = "ridgeline.cluster.runtime.services:DispatcherService"


class NameTaken(DeploymentFailed):
    """Another deployment of this Ray cluster has this name."""


def _routing_environment(config: RidgelineConfig) -> dict[str, str]:
    ours = engine_environment(1, config.supervision.start_timeout_s, on_cpu=not config.uses_gpus())
    return forwarded_variables() | ours


def routers_place(config: RidgelineConfig) -> PlacementGroup | None:
    """Take `router.resources` once: routers that share a port are on one node, and are started on another together."""
    return placement_group([dict(config.router.resources)]) if config.router.resources else None


def _beside_this_process(config: RidgelineConfig, place: PlacementGroup | None) -> dict[str, Any]:
    """Have it run in this place or else on the node of `serve`: elsewhere nobody would look for its port."""
    if place is not None:
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(place)}
    if config.ray.address is None:
        return {}
    here = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}


def _routing_actor(plan: Plan, service: str, name: str, place: PlacementGroup | None = None) -> Any:
    """Create the actor, whose name in Ray begins with the deployment's. Raises NameTaken."""
    options = ray.remote(ServiceActor).options(
        name=f"{plan.config.name}/{name}",
        num_cpus=0,
        runtime_env={"env_vars": _routing_environment(plan.config) | plan.config.logging_of(name).variables()},
        max_restarts=-1,
        **_beside_this_process(plan.config, place),
    )
    try:
        return options.remote(service, f"ridgeline::{name}", log_name(plan.config.name, name))
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


def _relayed(method: str, within_s: float | None = ANSWER_WITHIN_S) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return the method of this name that asks the service. It raises NotReached, ActorGone or DeploymentFailed."""

    async def relayed(handle: ActorHandle, *args: Any) -> Any:
        return await handle.call(method, *args, timeout_s=within_s)

    return relayed


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

    # What `ridgeline.router.router_control` does with workers.
    replace_worker = _relayed("replace_worker", None)
    remove_worker = _relayed("remove_worker", None)
    unreached = _relayed("unreached")
    note_away = _relayed("note_away")
    members = _relayed("members")
    load = _relayed("load")
    drain_worker = _relayed("drain_worker")


class DispatcherHandle(RoutingHandle):
    """The dispatcher's actor."""

    kind = "dispatcher"

    def __init__(self, plan: Plan) -> None:
        super().__init__("dispatcher", _routing_actor(plan, DISPATCHER_SERVICE, "dispatcher"), plan)
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

    def __init__(
        self,
        plan: Plan,
        number: int = 0,
        dispatcher: DispatcherHandle | None = None,
        place: PlacementGroup | None = None,
    ) -> None:
        """`number`: which of several; these have a dispatcher."""
        name = "router" if dispatcher is None else f"router-{number}"
        super().__init__(name, _routing_actor(plan, ROUTER_SERVICE, name, place), plan)
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

    async def use_keys(self, keys: KeyHashes) -> bool:
        """Have it take these keys, and its successors; False if it has them. Raises ActorGone or DeploymentFailed."""
        settings = replace(
            self._settings,
            api_key_hashes=keys.clients,
            admin_key_hashes=keys.admins,
            metrics_key_hashes=keys.metrics,
        )
        if settings == self._settings:
            return False
        await self.call("use_keys", settings, timeout_s=ANSWER_WITHIN_S)
        self._settings = settings
        return True

    async def take_operation(self, within_s: float, cancelling: str) -> Asked:
        """Return what operators want beside what is being cancelled, or wait for it up to this many seconds.

        Raises ActorGone or DeploymentFailed.
        """
        asked: Asked = await self.call("take_operation", within_s, cancelling, timeout_s=within_s + ANSWER_WITHIN_S)
        return asked

    note_wanted = _relayed("note_wanted")
    report = _relayed("report")


Routing = RouterHandle | DispatcherHandle
"""What knows all workers."""
