"""Which cores of this node belong to workers, of whichever deployment.

Used by `cluster.runtime.actors` and `cluster.runtime.services` on the node where a worker runs. A core is held by a
socket with the core's number in its name: the kernel knows of no second one with that name, and drops it with the last
process that has it open. Containers with networks of their own do not see each other's.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path


class CoresTaken(RuntimeError):
    """A worker of another deployment has just taken one of these cores; the message names it."""


def this_machine() -> str:
    """Return a name of this machine that is the same for all processes that see each other's held cores.

    A kernel's boot and a network are one machine, and so are all of Ray's nodes there. The name of the host is part of
    it, since copies of a virtual machine that are restored from memory have the same boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = Path("/proc/self/ns/net").readlink()
    return f"{boot} {network} {socket.gethostname()}"


def taken_cores(cores: Iterable[int]) -> frozenset[int]:
    """Return those of the cores that a worker on this node holds."""
    return frozenset(core for core in cores if _is_taken(core))


def hold_cores(cores: Iterable[int]) -> ExitStack:
    """Hold the cores until the stack is closed and every process forked meanwhile has ended. Raises CoresTaken."""
    held = ExitStack()
    for core in cores:
        try:
            held.enter_context(_hold(core))
        except OSError as error:
            held.close()
            raise CoresTaken(
                f"core {core} of {socket.gethostname()} was free a moment ago and belongs to another worker now: "
                "start one deployment after the other"
            ) from error
    return held


def _is_taken(core: int) -> bool:
    try:
        _hold(core).close()
    except OSError:
        return True
    return False


def _hold(core: int) -> socket.socket:
    """Raises OSError if it is held."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        one.bind(f"\0ridgeline-core-{core}")
    except OSError:
        one.close()
        raise
    return one
