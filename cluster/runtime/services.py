"""What runs in the process behind an actor: a worker's host with its engine, a router, or the dispatcher.

`ridgeline.cluster.runtime.handles` names the classes, and the actors of `ridgeline.cluster.runtime.actors` pass on its
calls.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import psutil

from ridgeline.cluster.config.models import RidgelineConfig
from ridgeline.cluster.node_address import address_here
from ridgeline.cluster.node_cores import hold_cores_soon
from ridgeline.cluster.runtime.processes import ProcessId, is_tracker, semaphores_of
from ridgeline.contracts.vocabulary import Health, Pool
from ridgeline.engine.config import EngineConfig
from ridgeline.engine.vllm_workarounds.forked import CPU_ENGINE_MODULES
from ridgeline.router.gc_schedule import GcSchedule
from ridgeline.router.settings import PoolHardware, RouterSettings, SharedWith

IMPORTED = (
    "ridgeline.cluster.runtime.handlers",
    "ridgeline.cluster.runtime.services",
    "ridgeline.engine.connector.kv_connector",
    "ridgeline.engine.request.forced_tokens",
    "ridgeline.engine.vllm_engine",
    "ridgeline.engine.worker_extension",
    "ridgeline.router.server",
    "ridgeline.router.shared.dispatcher",
    "ridgeline.worker_runtime.host",
    *CPU_ENGINE_MODULES,
)
"""What services with engines on CPUs import, sooner or later. What is missing here costs time, no more."""
ROUTER_LEFT = 143
"""Exit status of a router or dispatcher that ended on SIGTERM: 128 + 15."""
SLOW_LOOP_S = 5.0
DEAD_LOOP_S = 120.0
"""How long the loop of the only router may be stuck on one thing before it counts as dead; slowness alone must not cost
every client its stream."""
DEAD_SHARED_LOOP_S = 20.0
"""The same for one of several routers, which keeps its part of the new connections meanwhile and would cost no more
than its own streams, and for their dispatcher, which carries none: as long as any actor may take for an answer."""
LOOK_AGAIN_S = 1.0
"""After how long a loop that looks stuck is looked at again: if this process stood still, its loop goes on by then."""
logger = logging.getLogger(__name__)


class NotServing(RuntimeError):
    """The process of a router or the dispatcher has been started again and does not serve yet."""


@dataclass(frozen=True)
class WorkerReady:
    """A worker that serves its data plane."""

    address: str
    pid: int
    engine_pids: tuple[int, ...]
    num_kv_blocks: int
    cores: tuple[int, ...]
    engine_processes: tuple[ProcessId, ...] = ()
    semaphores: tuple[str, ...] = ()
    """Files that its processes have made, which must not outlive them."""


class _Service:
    """What both kinds of service can be asked on their node."""

    async def prepare_model(self, path_or_name: str) -> str:
        """Return what to load as the model on this node, where the default model is made if need be.

        Raises ModelError, which names the node.
        """
        from ridgeline.cluster.model_store import ModelError, prepare_model

        try:
            return str(await asyncio.to_thread(prepare_model, path_or_name))
        except ModelError as error:
            raise ModelError(f"on {socket.gethostname()}: {error}") from error


class WorkerService(_Service):
    """One engine, the handlers of its pool, one data-plane server."""

    OFF_LOOP: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._host: Any = None
        self._cores = ExitStack()

    async def unfit(self, config: RidgelineConfig, workers: dict[Pool, int]) -> list[str]:
        """Return why this node cannot run so many workers of each pool; each sentence names the fix."""
        from ridgeline.cluster.doctor.checks import failures, node_checks

        return failures(node_checks(config, workers))

    async def hardware(self, dtype: str, cores: int, gpus: int, fp8: bool) -> PoolHardware | str:
        """Return the peaks of a worker on this node, or why none are known; measures a CPU if nobody has yet."""
        from ridgeline.cluster.node_gpus import worker_hardware

        return worker_hardware(dtype, cores, gpus, fp8=fp8)

    async def start(self, config: EngineConfig, cores: tuple[int, ...], holds_cores: bool) -> WorkerReady:
        """Load the engine on `cores` and serve; SIGTERM drains it from then on. Takes 10 to 60 s.

        If it `holds_cores`, no other worker of this node gets them until its processes have ended.
        """
        from ridgeline.cluster.runtime.handlers import HANDLERS
        from ridgeline.engine.vllm_engine import VllmEngine
        from ridgeline.engine.vllm_workarounds.cores import BIND_VARIABLE, bind_list
        from ridgeline.worker_runtime.host import WorkerHost

        config = replace(config, transfer=replace(config.transfer, host=address_here(config.transfer.host)))
        config = replace(config, device=device_of(cores, os.environ.get("CUDA_VISIBLE_DEVICES", "")))
        if config.transfer.tls is not None:
            config.transfer.tls.check()  # on this node, before the engine takes its half minute
        if holds_cores:
            self._cores = await hold_cores_soon(cores)  # before the engine's process, which inherits that
        engine = VllmEngine(config)
        everywhere = os.sched_getaffinity(0)
        # The engine process inherits the cores; this front end then gives its own pinning up.
        if cores:
            os.sched_setaffinity(0, cores)
            if config.tensor_parallel_size > 1:  # known only now: Ray sets the environment before it picks the node
                os.environ[BIND_VARIABLE] = bind_list(cores, config.tensor_parallel_size)
        try:
            engine.start()
        finally:
            os.sched_setaffinity(0, everywhere)
        host = WorkerHost(engine, HANDLERS)
        address = await host.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, host.drain)
        self._host = host
        engines = _engine_processes()
        pids = tuple(process.pid for process in engines)
        semaphores = semaphores_of((os.getpid(), *pids))
        return WorkerReady(address, os.getpid(), pids, engine.num_kv_blocks, cores, engines, semaphores)

    async def failure(self) -> Health:
        """Report whether the worker must be replaced, and why.

        A process without a host has taken the place of one that died.
        """
        return "actor_died" if self._host is None else self._host.failure()

    async def close_peer_mappings(self) -> None:
        """Close what is open here of other workers' KV caches."""
        if self._host is not None:
            await self._host.close_peer_mappings()

    async def ending(self) -> str:
        """Say how the engine's process ended, and where its output is; empty if it runs."""
        return "" if self._host is None else str(self._host.ending)

    async def stop(self) -> None:
        """End the engine process and the server."""
        if self._host is not None:
            await self._host.stop()
            self._host = None
        self._cores.close()


def device_of(cores: Sequence[int], gpus: str) -> str:
    """Return a name that is equal for workers of one node that compute on the same cores, or on the same GPUs.

    `gpus` are those that Ray gave the worker; empty if not known.
    """
    if cores:
        return f"cores {' '.join(map(str, sorted(cores)))}"
    return f"GPUs {gpus}" if gpus else ""


class _RoutingService(_Service):
    """What a router and the dispatcher have in common: both are connected to all workers."""

    OFF_LOOP = frozenset({"failure"})
    TITLE: str

    def __init__(self) -> None:
        self._server: Any = None
        self._leaving: asyncio.Task[None] | None = None
        self._dead_loop_s = DEAD_LOOP_S

    def _make(self, settings: RouterSettings) -> Any:
        raise NotImplementedError

    async def prepare(self, settings: RouterSettings) -> None:
        """Import and load what takes long; the engines load meanwhile."""
        if settings.tls is not None:
            settings.tls.check()
        self._dead_loop_s = DEAD_LOOP_S if settings.routers == 1 else DEAD_SHARED_LOOP_S
        self._server = self._make(settings)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._begin_to_leave)

    def __getattr__(self, name: str) -> Any:
        """Return a method of what serves here: those of `RouterControl`, and a router's own. Raises NotServing."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._serving(), name)

    def failure(self) -> Health:
        """Report whether it must be replaced: it ended by itself, or this process has taken the place of one that died.

        Runs in another thread than its loop: a busy loop is reported, one that is stuck for long is a failure.
        """
        if self._server is None or self._server.ended:
            return "actor_died"
        silent_s = self._server.loop_silent_s
        if silent_s >= self._dead_loop_s:
            time.sleep(LOOK_AGAIN_S)
            if self._server is None or self._server.loop_silent_s >= self._dead_loop_s:
                return "unreachable"
            return ""
        if silent_s >= SLOW_LOOP_S:
            logger.warning("the %s's event loop is busy for %.0f s: until then all it does waits", self.TITLE, silent_s)
        return ""

    async def stop(self) -> None:
        """Close its port, since the deployment ends."""
        await self._close()

    async def _close(self) -> None:
        if self._server is not None:
            await self._server.stop()
            self._server = None

    def _begin_to_leave(self) -> None:
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(), name="leave")

    async def _leave(self) -> None:
        """End on SIGTERM; Ray takes this for a crash and starts another one, as intended."""
        try:
            await self._close()
        finally:
            os._exit(ROUTER_LEFT)

    def _serving(self) -> Any:
        if self._server is None:
            raise NotServing(f"the {self.TITLE} does not serve yet")
        return self._server


class RouterService(_RoutingService):
    """A router: the HTTP front end."""

    TITLE = "router"

    def _make(self, settings: RouterSettings) -> Any:
        """Import vLLM's server and load the tokenizer."""
        from ridgeline.router.server import Router

        return Router(settings)

    async def serve(
        self, worker_addresses: list[str], hardware: dict[Pool, PoolHardware], shared: SharedWith | None, some: bool
    ) -> str:
        """Connect to the workers, or to `some`, open the port, and return the URL."""
        url = str(await self._server.serve(worker_addresses, hardware, shared, some=some))
        self._gc_schedule = GcSchedule(lambda: 0 if self._server is None else self._server.streams)
        self._gc_schedule.start()
        return url

    async def stop(self) -> None:
        """Close its port, since the deployment ends; after SIGTERM another process goes on with its counts."""
        router = self._server
        await self._close()
        if router is not None:
            router.forget_counts()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests; returns how many were still running after `timeout_s`."""
        return 0 if self._server is None else int(await self._server.drain(timeout_s))


class DispatcherService(_RoutingService):
    """What several routers share."""

    TITLE = "dispatcher"

    def _make(self, settings: RouterSettings) -> Any:
        from ridgeline.router.shared.dispatcher import Dispatcher

        return Dispatcher(settings)

    async def serve(self, worker_addresses: list[str], host: str, some: bool) -> str:
        """Connect to the workers, or to `some`, listen for routers on an interface of this node; returns host:port."""
        address = str(await self._server.serve(worker_addresses, address_here(host), 0, some=some))
        gc.collect()
        gc.freeze()  # vLLM's modules are 600,000 objects: to look at them all again would take 0.3 s
        return address


def _engine_processes() -> tuple[ProcessId, ...]:
    """Return the engine's processes below this one, without Python's own resource tracker."""
    children = psutil.Process().children(recursive=True)
    engines = (child for child in children if not is_tracker(child))
    return tuple(sorted((ProcessId.of(child) for child in engines), key=lambda process: process.pid))
