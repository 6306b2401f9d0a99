"""What the process of a service does: take over its actor's environment, make the service and answer calls.

It is forked by a parent that has imported what services need, or a program that takes the number of a connected socket.
That parent is this program too, with the number of a listening socket and the modules' names.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from setproctitle import setproctitle

from ridgeline.cluster.folders import own_folder
from ridgeline.cluster.runtime.processes import this_process
from ridgeline.cluster.runtime.service_process.calls import CallServer, Service, readable
from ridgeline.contracts.log_lines import configure_as_told

PR_SET_PDEATHSIG = 1
"""Of prctl(2): the signal that a process gets when its parent ends."""
CALLER_GONE = 1
"""Exit status of a service whose actor has ended: whatever it had is lost, as with the actor."""

VLLM_SOCKETS = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its sockets, which it leaves there when an engine is killed."""


@dataclass(frozen=True)
class ServiceStart:
    """The first message: what the process is to become."""

    service: str
    """`module:Class`, called without arguments."""
    title: str
    """The name under which `ps` shows the process."""
    environment: dict[str, str]
    niceness: int
    oom_score_adj: int
    """Ray sets both for its workers: which process the kernel lets wait, and which it ends when memory is short."""


class EndsWithParent:
    """Has what a service forks end with the process that forked it, and let go of the service's socket.

    The socket's end tells the actor that the service is gone. An engine that still loads has no other watch over its
    parent yet.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parent = 0

    def before(self) -> None:
        """Remember who forks."""
        self._parent = os.getpid()

    def after(self) -> None:
        """Run in the new process."""
        self._connection.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._parent:  # it ended before this could ask for the signal, which then never comes
            os._exit(CALLER_GONE)


def run(sock: socket.socket) -> None:
    """Become the service that the first message asks for; never returns."""
    try:
        received, log_files, *_ = socket.recv_fds(sock, 1, 2)
        if received:  # else the actor has ended before it asked for anything
            _become(Connection(sock.detach()), log_files)
    except EOFError:
        pass  # the same
    except BaseException:  # noqa: BLE001 - in a fork there is nobody above to report to
        traceback.print_exc()
    finally:
        os._exit(CALLER_GONE)


def _become(connection: Connection, log_files: Sequence[int]) -> None:
    start: ServiceStart = connection.recv()
    _take_over(start, log_files)
    ends = EndsWithParent(connection)
    os.register_at_fork(before=ends.before, after_in_child=ends.after)
    module, kind = start.service.split(":")
    try:
        service = getattr(import_module(module), kind)()
    except Exception as error:
        connection.send(readable(error))
        raise
    folder = own_folder()
    os.environ[VLLM_SOCKETS] = str(folder)
    uvloop.run(_serve(connection, service, folder))


def _take_over(start: ServiceStart, log_files: Sequence[int]) -> None:
    """Take the actor's environment, output and standing.

    OpenMP has read its variable already if torch was imported before.
    """
    for wanted, given in zip((1, 2), log_files, strict=True):
        os.dup2(given, wanted)
        os.close(given)
    setproctitle(start.title)  # before the environment moves, beside which the title is
    os.environ.clear()
    os.environ.update(start.environment)
    configure_as_told()
    os.nice(max(0, start.niceness - os.nice(0)))
    with suppress(OSError):  # lowering it takes a privilege
        Path("/proc/self/oom_score_adj").write_text(str(start.oom_score_adj), encoding="utf-8")
    if "torch" in sys.modules and "OMP_NUM_THREADS" in os.environ:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


async def _serve(connection: Connection, service: Service, folder: Path) -> None:
    def leave() -> None:
        shutil.rmtree(folder, ignore_errors=True)  # whoever would remove it otherwise may be gone as well
        os._exit(CALLER_GONE)

    process = replace(this_process(), folder=str(folder))
    CallServer(connection, service, on_gone=leave).start(asyncio.get_running_loop(), process)
    await asyncio.Event().wait()


def fork_for_each(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import what services need, then fork one for each connection; who connects meanwhile has only to wait.

    It makes no thread, no event loop and no CUDA context, so that its children can. What they have from it they share
    in memory. It returns when its standard input ends.

    What cannot be imported ends this: a module fails in another way when it is imported again, and a service that is
    started afresh meets, and tells, the first one.
    """
    gc.disable()  # it would look at the modules' objects again and again: a third of the CPU time of importing them
    for module in modules:
        import_module(module)
    gc.freeze()  # a child's garbage collector need not look at, and so copy, what it has from here
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then collects children that have ended
    while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
        if listener in ready:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # no memory for another process: the connection ends
                if os.fork() == 0:
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    run(connection)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the command, which then asks
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    if not sys.argv[2:]:
        run(control)
    fork_for_each(control, sys.argv[2:])
    shutil.rmtree(Path(control.getsockname()).parent, ignore_errors=True)  # the driver may have been killed
    os._exit(0)  # nothing here needs the seconds that Python takes to clear all this away
