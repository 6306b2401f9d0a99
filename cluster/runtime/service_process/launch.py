"""Gets a process for a service: from a preloaded parent where there is one, else a fresh one.

`ridgeline.cluster.runtime.deployment` starts the preloaded parent of its machine, before Ray; actors learn of it by a
variable.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ridgeline.cluster.folders import own_folder
from ridgeline.cluster.runtime.environment import search_path
from ridgeline.cluster.runtime.service_process.calls import Collect, ServiceClient, ServiceGone, encode
from ridgeline.cluster.runtime.service_process.child import ServiceStart

PRELOADED = "RIDGELINE_PRELOADED"
"""Variable with the path of the parent's socket; set by us for actors, no setting."""
PRELOADED_WITHIN_S = 120.0
"""How long a start waits for the parent, which may still import; then it does without."""
END_WITHIN_S = 5.0
PYTHON = (sys.executable, "-P")
"""The current folder may hold modules of the same names as ours, or as Python's own."""
logger = logging.getLogger(__name__)


async def start_service(service: str, title: str, on_gone: Callable[[], None], log: str = "") -> ServiceClient:
    """Start `module:Class` in a process of its own with this process's environment, output and standing.

    Its output goes to the file `log` beside this process's own, if that is a file. `on_gone` is called when that
    process has ended. Raises ServiceGone if it ends at once, and what its class raises if it cannot be made. The caller
    sets the deadline.
    """
    path = os.environ.get(PRELOADED)
    if path is not None:
        try:
            async with asyncio.timeout(PRELOADED_WITHIN_S):
                return await _started(_forked(path), _collected_by_its_parent, service, title, on_gone, log)
        except (OSError, ServiceGone) as error:  # TimeoutError is an OSError
            why = str(error) or type(error).__name__
            logger.warning("the preloaded parent at %s forks nothing (%s): this start takes longer", path, why)
    sock, child = _fresh()
    return await _started(sock, partial(asyncio.to_thread, _collect, child), service, title, on_gone, log)


async def _started(
    sock: socket.socket, collect: Collect, service: str, title: str, on_gone: Callable[[], None], log: str
) -> ServiceClient:
    environment = {name: value for name, value in os.environ.items() if name != PRELOADED}
    try:
        with _output(log) as files:
            socket.send_fds(sock, [b"."], files)
        sock.sendall(encode(ServiceStart(service, title, environment, os.nice(0), _oom_score_adj())))
        return await ServiceClient.open(sock, on_gone, collect)
    except BaseException:
        sock.close()
        raise


@contextmanager
def _output(log: str) -> Iterator[list[int]]:
    """Yield the files for output and errors: those of this process, or one for both beside them."""
    own = Path(os.readlink("/proc/self/fd/2"))
    if not log or not own.is_file():  # a terminal, a pipe
        yield [1, 2]
        return
    with own.with_name(log).open("ab") as file:
        yield [file.fileno()] * 2


def _oom_score_adj() -> int:
    """Return how readily the kernel ends this process when memory is short."""
    return int(Path("/proc/self/oom_score_adj").read_text(encoding="utf-8"))


def _forked(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock


async def _collected_by_its_parent() -> None:
    """Do nothing."""


def _fresh() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [*PYTHON, "-m", "ridgeline.cluster.runtime.service_process.child", str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=_python_environment())


def _collect(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


@contextmanager
def preloaded_parent(modules: Sequence[str], environment: Mapping[str, str], messages: Path) -> Iterator[str]:
    """Have one on this machine meanwhile; yields the path of its socket, which may be connected to at once.

    `modules`: what it imports. `environment`: variables that must be set when it does. `messages`: a file to which it
    writes what could not be imported.
    """
    directory = own_folder()
    path = str(directory / "preloaded.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, messages.open("ab") as errors:
        listener.bind(path)
        listener.listen(128)
        parent = subprocess.Popen(
            [*PYTHON, "-m", "ridgeline.cluster.runtime.service_process.child", str(listener.fileno()), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # what vLLM says when it is imported
            stderr=errors,
            pass_fds=[listener.fileno()],
            env={**_python_environment(), **environment},
            start_new_session=True,
        )
    try:
        yield path
    finally:
        parent.kill()  # it may still import, and has nothing that is lost
        parent.communicate()
        shutil.rmtree(directory, ignore_errors=True)


def _python_environment() -> dict[str, str]:
    """This process's, in which another Python finds the same modules."""
    return {**os.environ, "PYTHONPATH": search_path()}
