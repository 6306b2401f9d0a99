"""The Ray actors: thin shells that put a worker host or the router into a process.

Made by `cluster.runtime.deployment`. Ray places, starts and ends them; no token and no KV byte passes through them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from cluster.runtime.environment import forget_server_variables
from cluster.runtime.processes import ProcessId, is_tracker, semaphores_of, this_process
from cluster.runtime.ray_workarounds.sigterm import on_sigterm
from contracts.vocabulary import Health, Pool
from engine.config import EngineConfig, HostSettings
from router.fleet.pairing import KvPair
from router.settings import PoolHardware, RouterSettings

ROUTER_LEFT = 143
"""Exit status of a router that ended on SIGTERM: 128 + 15."""


HEALTH = "health"
"""Concurrency group: a thread with an event loop of its own, in which a busy router can still report its health."""
SLOW_LOOP_S = 5.0
DEAD_LOOP_S = 120.0
"""How long the router's loop may be stuck on one thing before it counts as dead; slowness alone must not cost every
client its stream."""
HOLD_S = 2.0
"""How long a question after an actor's health may wait for news; unasked, an actor could not say that it is well."""
LOOK_EVERY_S = 0.5
"""How often an actor looks at its own health meanwhile."""
logger = logging.getLogger(__name__)


class NotServing(RuntimeError):
    """The router process has been started again and does not serve yet."""


@dataclass(frozen=True)
class NodePlace:
    """The node an actor landed on: enough to give it cores and an interface."""

    node_id: str
    host: str
    cores: tuple[int, ...]
    pid: int
    started_s: float = 0.0

    @property
    def process(self) -> ProcessId:
        """The actor's process."""
        return ProcessId(self.pid, self.started_s)


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


def engine_environment(cores: int, *, on_cpu: bool, ranks: int = 1) -> dict[str, str]:
    """Return the environment of an engine's process; vLLM reads it at import, so it must be set before."""
    env = {
        "GRPC_VERBOSITY": "ERROR",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
    if on_cpu:
        # Allows the in-process ("uni") executor: the multiprocess one spins at 100 % of a core while idle.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env |= {"OMP_NUM_THREADS": str(cores // ranks)}
        # Small helpers of vLLM's sampler are compiled at their first use: 20 s in the middle of serving, for everybody.
        env |= {"TORCH_COMPILE_DISABLE": "1"}
        # Huge pages for weights and KV: a decode step reads all weights once, and fewer TLB misses make that faster.
        env |= {"THP_MEM_ALLOC_ENABLE": "1"}
        # oneDNN keeps a compiled kernel, 240 KB here, for each number of tokens a step has ever had, up to 1,024 of
        # them: 245 MB by which an engine's memory grows over thousands of prompts. vLLM keeps the last 32 of each
        # layer by itself, so fewer here cost no time.
        env |= {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
    return env


class WorkerActor:
    """The actor of a worker: one engine, one handler, one data-plane server."""

    def __init__(self) -> None:
        forget_server_variables()
        self._host: Any = None

    async def place(self) -> NodePlace:
        """Report where Ray put it."""
        return _place()

    async def hardware(self, dtype: str, cores: int, gpus: int) -> PoolHardware:
        """Return the peaks of a worker on this node; measures them if nobody has yet."""
        from cluster.node_hardware import worker_hardware

        return worker_hardware(dtype, cores, gpus)

    async def start(self, config: EngineConfig, cores: tuple[int, ...], settings: HostSettings) -> WorkerReady:
        """Load the engine on `cores` and serve; SIGTERM drains it from then on. Takes 10 to 60 s."""
        from decode_worker.handler import DecodeHandler
        from engine.vllm_engine import VllmEngine
        from engine.vllm_workarounds.cores import BIND_VARIABLE, bind_list
        from prefill_worker.handler import PrefillHandler
        from worker_runtime.host import Handler, WorkerHost

        if config.tls is not None:
            config.tls.check()  # on this node, before the engine takes its half minute
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
        handler: Handler = PrefillHandler() if config.pool == "prefill" else DecodeHandler()
        host = WorkerHost(engine, handler, settings)
        address = await host.start()
        on_sigterm(host.drain)
        self._host = host
        engines = _engine_processes()
        pids = tuple(process.pid for process in engines)
        semaphores = semaphores_of((os.getpid(), *pids))
        return WorkerReady(address, os.getpid(), pids, engine.num_kv_blocks, cores, engines, semaphores)

    async def failure(self, known: Health | None = None) -> Health:
        """Report whether the worker must be replaced, and why; as long as that is `known`, wait `HOLD_S` for news.

        A process without a host has taken the place of one that died.
        """
        return await other_than(known, lambda: "actor_died" if self._host is None else self._host.failure())

    async def stop(self) -> None:
        """End the engine process and the server."""
        if self._host is not None:
            await self._host.stop()
            self._host = None


class RouterActor:
    """The actor of the router: the HTTP front end."""

    def __init__(self) -> None:
        forget_server_variables()
        self._router: Any = None
        self._leaving: asyncio.Task[None] | None = None

    async def place(self) -> NodePlace:
        """Report where Ray put it."""
        return _place()

    async def prepare(self, settings: RouterSettings) -> None:
        """Import vLLM's server and load the tokenizer; the engines load meanwhile."""
        from router.server import Router

        if settings.tls is not None:
            settings.tls.check()
        self._router = Router(settings)
        on_sigterm(self._begin_to_leave)

    async def serve(self, worker_addresses: list[str], hardware: dict[Pool, PoolHardware]) -> str:
        """Connect to the workers, open the port, and return the URL."""
        url = str(await self._router.serve(worker_addresses, hardware))
        gc.collect()
        gc.freeze()  # vLLM's modules are 600,000 objects: to look at them all again stops every stream for 0.3 s
        return url

    async def kv_pairs(self) -> list[KvPair]:
        """Return what carries KV between which workers."""
        return list(self._router.kv_pairs)

    async def replace_worker(self, address: str, reason: str) -> None:
        """Take in a worker that has been started again because of `reason`.

        Raises NotServing, WorkerLost, PairingRefused.
        """
        await self._serving().replace_worker(address, reason)

    async def remove_worker(self, worker_id: str) -> None:
        """Forget a worker that has left for good. Raises NotServing."""
        await self._serving().remove_worker(worker_id)

    async def unreached(self, for_s: float) -> list[str]:
        """Return the addresses of workers that the router has not reached for too long. Raises NotServing."""
        return list(self._serving().unreached(for_s))

    @ray.method(concurrency_group=HEALTH)  # type: ignore[untyped-decorator]
    async def failure(self, known: Health | None = None) -> Health:
        """Report whether the router must be replaced; as long as that is `known`, wait `HOLD_S` for news.

        Runs in another thread than the router: a busy loop is reported, one that is stuck for minutes is a failure.
        """
        return await other_than(known, self._health)

    def _health(self) -> Health:
        """Return why it must be replaced: it ended by itself, or this process has taken the place of one that died."""
        if self._router is None or self._router.ended:
            return "actor_died"
        silent_s = self._router.loop_silent_s
        if silent_s >= DEAD_LOOP_S:
            return "unreachable"
        if silent_s >= SLOW_LOOP_S:
            logger.warning("the router's event loop is busy for %.0f s: until then every stream stands still", silent_s)
        return ""

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests; returns how many were still running after `timeout_s`."""
        return 0 if self._router is None else int(await self._router.drain(timeout_s))

    async def stop(self) -> None:
        """Close the port."""
        if self._router is not None:
            await self._router.stop()
            self._router = None

    def _begin_to_leave(self) -> None:
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(), name="leave")

    async def _leave(self) -> None:
        """End on SIGTERM; Ray takes this for a crash and starts another one, as intended."""
        try:
            await self.stop()
        finally:
            os._exit(ROUTER_LEFT)

    def _serving(self) -> Any:
        if self._router is None:
            raise NotServing("the router does not serve yet")
        return self._router


async def other_than(
    known: Health | None,
    health: Callable[[], Health],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Health:
    """Return the health as soon as it is another than `known`, or after `HOLD_S`."""
    give_up_s = clock() + HOLD_S
    while (now := health()) == known and clock() < give_up_s:
        await sleep(LOOK_EVERY_S)
    return now


def _place() -> NodePlace:
    context = ray.get_runtime_context()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    me = this_process()
    return NodePlace(context.get_node_id(), ray.util.get_node_ip_address(), cores, me.pid, me.started_s)


def _engine_processes() -> tuple[ProcessId, ...]:
    """Return the engine's processes below this one, without Python's own resource tracker."""
    children = psutil.Process().children(recursive=True)
    engines = (child for child in children if not is_tracker(child))
    return tuple(sorted((ProcessId.of(child) for child in engines), key=lambda process: process.pid))
