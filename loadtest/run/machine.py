"""Describes the machine of a run for summary.json, and notices other work on it."""

import contextlib
import os
import platform
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from ridgeline.loadtest.errors import LoadTestError
from ridgeline.roofline.process_cores import usable_cores

WATCH_S = 0.5
BUSY_PERCENT = 20.0


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and software of the machine that sends the load (locally also the server's)."""
    return {
        "processor": _processor_name(),
        "cores": len(usable_cores()),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


class CpuReading(msgspec.Struct, frozen=True):
    """CPU seconds of all cores of this machine so far, and those that other guests and our processes took."""

    all_s: float
    idle_s: float
    stolen_s: float
    ours_s: Mapping[psutil.Process, float]


class Disturbance(msgspec.Struct, frozen=True):
    """Shares of this machine's CPU time during a round that others took."""

    stolen: float
    """By other guests of the same host."""
    other: float
    """By processes that do not serve the variant that runs, and did not start with this command."""


def read_cpu(serving: Collection[int] | None = None) -> CpuReading:
    """Read the CPU times of the machine and of this process with all of its descendants.

    With `serving`, the processes of those ids and their descendants count instead of this process's, which serve
    another variant; what this process itself and its ended children take, the client among them, counts in any case.
    """
    times = psutil.cpu_times()
    stolen_s: float = getattr(times, "steal", 0.0)
    idle_s: float = times.idle + getattr(times, "iowait", 0.0)
    # The times of guests are contained in those of the user.
    counted = {name: value for name, value in times._asdict().items() if not name.startswith("guest")}
    this = psutil.Process()
    ours_s: dict[psutil.Process, float] = {}
    for process in _tree([this.pid]) if serving is None else {this, *_tree(serving)}:
        with contextlib.suppress(psutil.Error):
            ours_s[process] = sum(process.cpu_times()[:4])
    return CpuReading(sum(counted.values()), idle_s, stolen_s, ours_s)


def _tree(roots: Collection[int]) -> set[psutil.Process]:
    found: set[psutil.Process] = set()
    for pid in roots:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            found |= {root, *root.children(recursive=True)}
    return found


def listeners(url: str) -> frozenset[int] | None:
    """Return the ids of this machine's processes that serve a URL, none for another machine's.

    None if it is this machine's, but of processes that this user may not see.
    """
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    except OSError:
        return frozenset()
    own = {address.address.partition("%")[0] for each in psutil.net_if_addrs().values() for address in each}
    if not found & own:
        return frozenset()
    try:
        open_here = psutil.net_connections(kind="tcp")
    except psutil.Error:
        return None
    listening = [one.pid for one in open_here if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,)]
    return frozenset(pid for pid in listening if pid is not None) or None


def serving_processes(urls: Collection[str]) -> frozenset[int] | None:
    """Return the processes of this machine that serve these URLs: what listens there, and what that is connected to.

    A proxy's own servers are found by the connections that it has open to them. None if a process that listens is
    another user's, which this user may not see.
    """
    found = [listeners(url) for url in urls]
    if any(each is None for each in found):
        return None
    serving = {process.pid for each in found for process in _tree(each or ())}
    open_here = psutil.net_connections(kind="tcp") if serving else []
    listening = {one.laddr[1:]: one.pid for one in open_here if one.status == psutil.CONN_LISTEN and one.pid}
    own = {address.address for each in psutil.net_if_addrs().values() for address in each}
    while True:
        behind = {
            listening[one.raddr[1:]]
            for one in open_here
            if one.pid in serving and one.raddr and one.raddr[0] in own and one.raddr[1:] in listening
        }
        if behind <= serving:
            return frozenset(serving)
        serving |= {process.pid for process in _tree(behind)}


def disturbance(before: CpuReading, after: CpuReading) -> Disturbance:
    """Return what others took between two readings.

    The time of a process of ours that was killed meanwhile counts as others', unless its parent took it over.
    """
    all_s = after.all_s - before.all_s
    if all_s <= 0:
        return Disturbance(0.0, 0.0)
    stolen_s = after.stolen_s - before.stolen_s
    busy_s = all_s - (after.idle_s - before.idle_s) - stolen_s
    ours_s = sum(time_s - before.ours_s.get(process, 0.0) for process, time_s in after.ours_s.items())
    return Disturbance(stolen_s / all_s, max(0.0, busy_s - ours_s) / all_s)


def busy_note() -> str | None:
    """Watch this machine for a moment and say so if other work takes a good part of its cores; blocks meanwhile."""
    busy_percent: float = psutil.cpu_percent(interval=WATCH_S)
    if busy_percent < BUSY_PERCENT:
        return None
    return (
        f"other work took {busy_percent:.0f} % of this machine's cores before the first start: what is measured holds "
        "for a machine that is so busy, and may differ from run to run"
    )


def parse_cores(text: str | None) -> tuple[int, ...]:
    """Return the cores that a list such as `0-1,3` names; empty without one. Raises LoadTestError."""
    cores: set[int] = set()
    for part in (text or "").split(",") if text else ():
        first, _, last = part.partition("-")
        try:
            named = range(int(first), int(last or first) + 1)
            if not named:
                raise ValueError(part)
            cores.update(named)
        except ValueError:
            raise LoadTestError(f"the client's cores '{text}' are not understood: give a list such as 0-1,3") from None
    here = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if missing := sorted(cores - here):
        raise LoadTestError(
            f"the client cannot run on core {missing[0]}: this process may use {', '.join(map(str, sorted(here)))}"
        )
    return tuple(sorted(cores))


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
