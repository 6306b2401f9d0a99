"""Runs vLLM's own server as a process on one core. Its output goes to a file, and its end is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from ridgeline.cluster.runtime.actors import engine_environment
from ridgeline.cluster.runtime.plan import Plan
from ridgeline.engine.passed_args import words
from tests.support.free_port import free_port

STARTS_WITHIN_S = 300
ENDS_WITHIN_S = 20
TOLD_LINES = 25
LEAKS = ("nanobind: ", " - ")
"""Every process of vLLM that ends has hundreds of such lines, below its error."""
TIMEOUT_S = 300


class PlainServerEnded(RuntimeError):
    """Plain vLLM has ended, so that nothing can be compared with it."""


class PlainServer:
    """The process, its output, and `http` to ask it."""

    def __init__(self, process: subprocess.Popen[Any], output: Path, http: httpx.AsyncClient) -> None:
        self._process = process
        self._output = output
        self.http = http

    def check(self) -> None:
        """Raise PlainServerEnded, with exit code and last lines of output, if the process does not run."""
        code = self._process.poll()
        if code is not None:
            lines = self._output.read_text(errors="replace").splitlines()
            told = [line for line in lines if not line.startswith(LEAKS)][-TOLD_LINES:]
            raise PlainServerEnded("\n  ".join([f"plain vLLM ended with exit code {code}; its last lines:", *told]))

    async def ready(self, within_s: float = STARTS_WITHIN_S) -> None:
        """Wait until the server answers. Raises PlainServerEnded or TimeoutError."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            self.check()
            try:
                if (await self.http.get("/health")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.5)
        raise TimeoutError(f"plain vLLM did not answer within {within_s:.0f} s")


def arguments(plan: Plan, port: int) -> list[str]:
    """Return the arguments for one engine like the plan's decode worker, without what Ridgeline adds.

    Arguments of a single pool are left out too: speculation is one.
    """
    pool, model = plan.config.pools.decode, plan.config.model
    on_cpu = not pool.gpus_per_worker
    options = {
        "model": plan.model_path,
        "host": "127.0.0.1",
        "port": port,
        "served-model-name": plan.served_model_name,
        "dtype": plan.dtype,
        "max-model-len": model.max_model_len,
        "block-size": model.block_size,
        "max-num-seqs": pool.max_num_seqs,
        "max-num-batched-tokens": pool.max_num_batched_tokens,
        "kv-cache-memory-bytes": pool.kv_cache_memory_bytes,
        "tensor-parallel-size": pool.ranks,
        "distributed-executor-backend": "uni" if on_cpu else None,
        "worker-extension-cls": "tools.differential.worker.PlainWorkerExtension" if on_cpu else None,
    }
    passed = {**plan.engine_args}
    if plan.lora_modules:
        passed["lora_modules"] = [f"{module['name']}={module['path']}" for module in plan.lora_modules]
    eager = ["--enforce-eager"] if on_cpu else []
    return [*words(options), *words(passed), *eager, "--disable-log-stats", "--disable-uvicorn-access-log"]


@asynccontextmanager
async def plain_vllm(plan: Plan) -> AsyncIterator[PlainServer]:
    """Start plain vLLM, on CPUs on one core; `ready` waits until it answers."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *arguments(plan, port)]
    pool, starts_within_s = plan.config.pools.decode, plan.config.supervision.start_timeout_s
    on_cpu = not pool.gpus_per_worker
    compiles = not plan.config.model.is_eager(on_cpu=on_cpu)
    environment = os.environ | engine_environment(
        pool.cores_per_worker, starts_within_s, on_cpu=on_cpu, compiles=compiles
    )
    cores = {max(os.sched_getaffinity(0))} if on_cpu else os.sched_getaffinity(0)
    async with serving(command, environment, f"http://127.0.0.1:{port}", cores) as server:
        yield server


@asynccontextmanager
async def serving(
    command: Sequence[str], environment: Mapping[str, str], url: str, cores: Set[int] | None = None
) -> AsyncIterator[PlainServer]:
    """Run this command as the server at `url` until the block ends, on these cores; None: on the last one."""
    repository = Path(__file__).parents[2]
    # Its processes import nothing from the working folder, and `tools` is not installed.
    search = os.pathsep.join(filter(None, (str(repository), environment.get("PYTHONPATH"))))
    cores = cores or {max(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        with output.open("wb") as written:
            process: subprocess.Popen[Any] = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
                command,
                env={**environment, "PYTHONPATH": search},
                cwd=repository,
                stdout=written,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        try:
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as http:
                yield PlainServer(process, output, http)
        finally:
            await asyncio.to_thread(_end, process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(ENDS_WITHIN_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its engine too, which a crash leaves behind
    process.wait()
