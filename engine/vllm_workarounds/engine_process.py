"""What each process of an engine does before vLLM's own code, and what it leaves behind when it fails.

vLLM's front end cannot tell why a process of its engine ended (`ridgeline.engine.root_cause`), its kernels use tiles
unasked (`ask_for_tiles`), and it leaves the file of its process groups in the temporary folder.
It also asks how a process ended before the kernel can say it. Installed where the engine's process is started; that one
installs it for the processes of its ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any
from unittest.mock import patch

import vllm.renderers.hf
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor import multiproc_executor, uniproc_executor
from vllm.v1.executor.multiproc_executor import WorkerProc

from ridgeline.contracts.log_lines import configure_as_told
from ridgeline.engine.root_cause import CauseFile

logger = logging.getLogger(__name__)
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
    configure_as_told()  # a process that is not forked knows nothing of it
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


SYS_ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
XFEATURE_XTILEDATA = 18
"""Of arch_prctl(2) on x86-64; the same three numbers are in the kernel's documentation, arch/x86/xstate.rst."""


def ask_for_tiles(machine: str | None = None, syscall: Callable[[int, int, int], int] | None = None) -> bool:
    """Ask; returns whether this process may use tiles from now on. Without AMX the kernel refuses, and nothing changes.

    Linux lets a process use the CPU's matrix tiles only once it has asked; without that their first use is SIGILL,
    which ends the engine at its first step in bfloat16. vLLM's kernels use them unasked; oneDNN asks, when something
    of it happens to run first.

    Its threads and what it forks may then use them too; a program that it starts asks anew.
    """
    if (machine or platform.machine()) != "x86_64":
        return False
    ask = syscall or ctypes.CDLL(None).syscall
    return ask(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0


_POLL_S = 0.5
_started = threading.Event()


def exit_with_parent() -> None:
    """Start the watch, once per process; it ends this process within a second of the parent's end.

    vLLM's engine process does not watch the process that started it: after a SIGKILL of the worker it would keep its
    memory and its core forever. The connector starts the watch there and, if there are several ranks, in the process of
    each, which would notice only between two steps.
    """
    if _started.is_set():
        return
    _started.set()
    # Not getppid(): a parent that died while the model was loading would already have been replaced.
    parent = multiprocessing.parent_process()
    expected = os.getppid() if parent is None or parent.pid is None else parent.pid
    threading.Thread(target=_watch, args=(expected,), name="parent-watch", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    # There is nothing to clean up for: the parent is dead, and leases and streams end with the sockets.
    os._exit(1)


def forget_queue_names() -> None:
    """Unlink every queue that this process has created. Takes about 50 ms to scan all objects.

    vLLM removes a queue's name when the queue is closed in order. After a SIGKILL, or a stop that did not wait, the
    memory stays in /dev/shm forever, up to 240 MiB each. Once both ends have opened a queue its name is not needed, and
    without a name the memory is freed with the last process. The connector calls this when all queues are open.
    """
    for found in gc.get_objects():
        if type(found) is ShmRingBuffer and found.is_creator:
            found.shared_memory.unlink()
            found.is_creator = False  # otherwise closing the queue would unlink it again


@contextmanager
def one_tokenizer() -> Iterator[None]:
    """Have a front end that is made meanwhile copy no tokenizer.

    vLLM makes two copies of it for threads that render chats, before it starts the engine process. Here the router
    renders, and the front end gets tokens: its tokenizer is used in the event loop alone.
    """
    with patch.object(vllm.renderers.hf, "maybe_make_thread_pool", _as_it_is):
        yield


def _as_it_is(tokenizer: Any, copies: int = 1) -> Any:
    return tokenizer
