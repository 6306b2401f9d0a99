"""What each process of an engine does before vLLM's own code, and what it leaves behind when it fails.

vLLM's front end cannot tell why a process of its engine ended (`ridgeline.engine.root_cause`), its kernels use tiles
unasked (`ridgeline.engine.vllm_workarounds.amx`), and it leaves the file of its process groups in the temporary folder.
It also asks how a process ended before the kernel can say it. Installed where the engine's process is started; that one
installs it for the processes of its ranks.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import platform
import uuid
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc

from ridgeline.engine.root_cause import CauseFile
from ridgeline.engine.vllm_workarounds.amx import ask_for_tiles

logger = init_logger(f"vllm.{__name__}")
_run_engine_core = EngineCoreProc.run_engine_core
_run_rank = WorkerProc.worker_main
_make_rank = WorkerProc.__init__
_finished_procs = CoreEngineProcManager.finished_procs
COLLECTED_WITHIN_S = 5.0
"""From the end of a process's pipe to that of the process, which frees the engine's memory in between."""


def cause_file(vllm_config: VllmConfig) -> CauseFile:
    """Return where the processes of this engine leave why they cannot go on."""
    assert vllm_config.kv_transfer_config is not None
    return CauseFile(envs.VLLM_RPC_BASE_PATH, str(vllm_config.kv_transfer_config.engine_id))


def prepare_engine_processes() -> None:
    """Have the next engine of this process begin with `run_engine`, and vLLM told how its processes ended."""
    EngineCoreProc.run_engine_core = staticmethod(run_engine)  # looked up by this name
    CoreEngineProcManager.finished_procs = finished_processes


def finished_processes(manager: CoreEngineProcManager) -> dict[str, int]:
    """Return the exit code of each process that has ended, by name: vLLM's `finished_procs`.

    A forked process closes the pipe by which vLLM sees its end before it can be waited for.
    """
    for process in manager.processes:
        if process.pid is not None and wait([process.sentinel], 0):
            process.join(COLLECTED_WITHIN_S)
    return dict(_finished_procs(manager))


def run_engine(*args: Any, **kwargs: Any) -> None:
    """Be the engine's process: vLLM's `EngineCoreProc.run_engine_core`."""
    _prepare()
    WorkerProc.worker_main = staticmethod(run_rank)  # looked up by this name
    for executor in (uniproc_executor, multiproc_executor):
        executor.get_file_store_init_method = _file_of_groups
    _told(_run_engine_core)(*args, **kwargs)


def run_rank(*args: Any, **kwargs: Any) -> None:
    """Be the process of a rank: vLLM's `WorkerProc.worker_main`, which keeps its errors to its own log."""
    _prepare()
    WorkerProc.__init__ = _told(_make_rank)  # called by the next line
    _run_rank(*args, **kwargs)


def end_process(cause: CauseFile) -> Callable[[BaseException], None]:
    """Return what ends this process after an error by which it has lost its GPU; another engine takes its place then.

    Left alone, it would live on and answer every request with an error.
    """

    def end(error: BaseException) -> None:
        cause.leave(error)
        logger.critical("the GPU does nothing more for this engine, whose process ends: %s", error)
        os._exit(os.EX_SOFTWARE)

    return end


def _prepare() -> None:
    if not ask_for_tiles() and "amx_tile" in _cpu_flags():
        logger.warning(
            "the kernel allows no AMX tiles here: in bfloat16 the engine may be ended by SIGILL: set model.dtype to "
            "float32 if it is"
        )
    faulthandler.enable()  # a process that is ended by SIGSEGV or SIGILL then says where it was


def _cpu_flags() -> str:
    if platform.system() != "Linux":
        return ""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line for line in file if line.startswith("flags")), "")


def _told(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(run)
    def telling(*args: Any, **kwargs: Any) -> None:
        try:
            run(*args, **kwargs)
        except Exception as error:
            cause_file(kwargs["vllm_config"]).leave(error)
            raise

    return telling


def _file_of_groups() -> str:
    """Return vLLM's own kind of path, in the folder of its sockets, which is removed with the worker."""
    return f"file://{envs.VLLM_RPC_BASE_PATH}/vllm_dist_{uuid.uuid4().hex}"
