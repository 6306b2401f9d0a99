"""The Ray actors: each asks a process of its own to run a service, and outlives it, so that another may follow at once.

Ray places, starts and ends them; no token and no KV byte passes through them, nor through the processes' sockets: only
calls of the supervisor.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from ridgeline.cluster.doctor.facts import read_cpu_flags
from ridgeline.cluster.node_cores import taken_cores, this_machine
from ridgeline.cluster.runtime.environment import forget_server_variables
from ridgeline.cluster.runtime.processes import ProcessId, end_processes, this_process
from ridgeline.cluster.runtime.ray_workarounds.sigterm import on_sigterm
from ridgeline.cluster.runtime.service_process.calls import ServiceClient, ServiceGone
from ridgeline.cluster.runtime.service_process.launch import start_service
from ridgeline.contracts.vocabulary import Health
from ridgeline.roofline.process_cores import usable_cores

WITHOUT_SERVICE = 143
"""Exit status of an actor that gets SIGTERM while it has no service: 128 + 15."""


@dataclass(frozen=True)
class NodePlace:
    """The node an actor landed on: enough to give it cores, an interface and a number format."""

    node_id: str
    host: str
    cores: tuple[int, ...]
    """Those that the actor may run on."""
    process: ProcessId
    """The actor's."""
    machine: str
    """Whose cores these are: nodes of one machine share them."""
    cpu_flags: frozenset[str] = frozenset()
    """What the processor can do, as the kernel calls it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The node's labels in Ray."""
    taken: frozenset[int] = frozenset()
    """The cores that workers have already, of this deployment or of another one."""


def engine_environment(
    cores: int,
    start_timeout_s: float,
    *,
    on_cpu: bool,
    ranks: int = 1,
    mps_percent: int | None = None,
    compiles: bool = False,
) -> dict[str, str]:
    """Return the environment of a service's process; vLLM reads part of it at import, so it must be set before."""
    env = {
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_timeout_s)),
        "GRPC_VERBOSITY": "ERROR",
        "VLLM_LOGGING_LEVEL": "WARNING",  # for what vLLM decides by it; its lines are written as ours are
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "PYTHONUTF8": "1",  # PyTorch reads templates of its own in the locale's encoding, and they are no ASCII
        "PYTHONSAFEPATH": "1",  # a file of the working folder is nobody's module, in the processes below either
    }
    if on_cpu:
        env |= {
            # Allows the in-process ("uni") executor: the multiprocess one spins at 100 % of a core while idle.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(cores // ranks),
            # vLLM looks up n-grams with numba, which gives the whole process so many OpenMP threads: by default one for
            # each core that it may use, and threads that wait for one another's core make steps ten times as long.
            "NUMBA_NUM_THREADS": str(cores // ranks),
            # Huge pages for weights and KV: a decode step reads all weights once, with fewer TLB misses then.
            "THP_MEM_ALLOC_ENABLE": "1",
            # oneDNN keeps a compiled kernel, 240 KB here, for each number of tokens a step has ever had, up to 1,024 of
            # them: 245 MB by which an engine's memory grows over thousands of prompts. vLLM keeps the last 32 of each
            # layer by itself, so fewer here cost no time.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
        }
    else:
        env["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # vLLM would fork, which has not been tried with CUDA
    if on_cpu and not compiles:
        # Small helpers of vLLM's sampler are compiled at their first use, even if the model is not: 20 s in the middle
        # of serving, for everybody.
        env["TORCH_COMPILE_DISABLE"] = "1"
    if mps_percent is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(mps_percent)  # read when the process first uses the GPU
    return env


class ServiceActor:
    """The actor of one service; `service` is its class, `module:Class`, and `title` what `ps` shows.

    The service's output goes to the file `log` beside Ray's own, also when it is started again here.
    """

    def __init__(self, service: str, title: str, log: str = "") -> None:
        forget_server_variables()
        self._service = service
        self._title = title
        self._log = log
        self._client: ServiceClient | None = None
        self._collecting: asyncio.Task[None] | None = None

    async def place(self) -> NodePlace:
        """Report where Ray put it."""
        return _place()

    async def begin(self) -> ProcessId:
        """Start the service's process and return which it is."""
        self._client = await start_service(self._service, self._title, on_gone=self._forget, log=self._log)
        on_sigterm(self._pass_sigterm_on)
        return self._client.process

    async def clear(self, processes: Sequence[ProcessId], files: Sequence[str]) -> NodePlace:
        """End what is left of the service, so that `begin` may start it anew here; returns where that is."""
        await asyncio.to_thread(end_processes, processes, files)
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        return _place()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the service. Raises ServiceGone."""
        if self._client is None:
            raise ServiceGone("the service's process has ended, and another one has not begun yet")
        return await self._client.call(method, *args)

    async def call_apart(self, method: str, *args: Any) -> Any:
        """Call a method in a process of its own, which then ends: an engine must not inherit what it does to OpenMP."""
        client = await start_service(self._service, self._title, on_gone=lambda: None)
        try:
            return await client.call(method, *args)
        finally:
            await client.close()

    async def failure(self) -> Health:
        """Report whether the service must be replaced, and why: an actor without one has replaced one that died."""
        if self._client is None:
            return "actor_died"
        try:
            health: Health = await self._client.call("failure")
        except ServiceGone:
            return "actor_died"
        return health

    def _forget(self) -> None:
        """The service's process has ended: report it from now on, and collect it."""
        gone, self._client = self._client, None
        if gone is not None:
            self._collecting = asyncio.create_task(gone.close(), name="collect-service")

    def _pass_sigterm_on(self) -> None:
        """Let the service decide what SIGTERM means; without one there is nothing to end gently."""
        if self._client is None:
            os._exit(WITHOUT_SERVICE)
        os.kill(self._client.process.pid, signal.SIGTERM)


def _place() -> NodePlace:
    context, cores = ray.get_runtime_context(), tuple(usable_cores())
    return NodePlace(
        node_id=context.get_node_id(),
        host=ray.util.get_node_ip_address(),
        cores=cores,
        process=this_process(),
        machine=this_machine(),
        cpu_flags=read_cpu_flags(),
        labels=dict(context.get_node_labels()),
        taken=taken_cores(cores),
    )
