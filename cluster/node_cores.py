"""Which cores of this node belong to workers, of whichever deployment.

A core is held by a socket with the core's number in its name: the kernel knows of no second one with that name, and
drops it with the last process that has it open. Containers with networks of their own do not see each other's.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

HELD = "ridgeline-core-"
HOLD_WITHIN_S = 60.0
"""How long cores that are taken may be those of a worker's former process: several times as long as the end of one is
waited for (`ridgeline.cluster.runtime.processes`). After that they are another worker's."""
RETRY_S = 0.05


class CoresTaken(RuntimeError):
    """A worker of another deployment has just taken one of these cores; the message names it."""


def this_machine() -> str:
    """Return a name of this machine that is the same for all processes that see each other's held cores.

    A kernel's boot and a network are one machine, and so are all of Ray's nodes there. The name of the host is part of
    it, since copies of a virtual machine that are restored from memory have the same boot.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    network = Path("/proc/self/ns/net").readlink()
    return f"{boot} {network} {socket.gethostname()}"


def taken_cores(cores: Iterable[int]) -> frozenset[int]:
    """Return those of the cores that a worker on this node holds; it looks, and holds none itself meanwhile."""
    sockets = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    ends = {line.rpartition("@" + HELD)[2] for line in sockets if HELD in line}
    return frozenset(core for core in cores if str(core) in ends)


async def hold_cores_soon(cores: Iterable[int], within_s: float = HOLD_WITHIN_S) -> ExitStack:
    """Hold them as soon as they are free, see `hold_cores`. Raises CoresTaken if they are not in time."""
    wanted, give_up_s = tuple(cores), time.monotonic() + within_s
    while True:
        try:
            return hold_cores(wanted)
        except CoresTaken:
            if time.monotonic() >= give_up_s:
                raise
        await asyncio.sleep(RETRY_S)


def hold_cores(cores: Iterable[int]) -> ExitStack:
    """Hold the cores until the stack is closed and every process forked meanwhile has ended. Raises CoresTaken."""
    held = ExitStack()
    for core in cores:
        try:
            held.enter_context(_hold(core))
        except OSError as error:
            held.close()
            raise CoresTaken(
                f"core {core} of {socket.gethostname()} belongs to another worker: another deployment has taken it "
                "(`ridgeline status` shows them), or a worker that was killed has not quite ended"
            ) from error
    return held


def _hold(core: int) -> socket.socket:
    """Raises OSError if it is held."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        one.bind(f"\0{HELD}{core}")
    except OSError:
        one.close()
        raise
    return one
