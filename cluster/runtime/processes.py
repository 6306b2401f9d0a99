"""Processes of one node: names for them that last, and their end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GONE_WITHIN_S = 10.0
RESOURCE_TRACKER = "resource_tracker"
SAME_START_S = 2.0
"""Tolerance for start times: they are computed from the boot time, which moves when the clock is set."""


@dataclass(frozen=True)
class ProcessId:
    """A process, identified by pid and start time, so that a reused pid is not mistaken for it."""

    pid: int
    started_s: float
    folder: str = ""
    """Where its temporary files are, which must not outlive it; it is the folder's only user."""

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        """Return the identity of a running process."""
        return cls(process.pid, process.create_time())


def this_process() -> ProcessId:
    """Return the caller's own identity."""
    return ProcessId.of(psutil.Process())


def semaphores_of(pids: Sequence[int]) -> tuple[str, ...]:
    """List the files of the named semaphores that these processes have made so far; they outlive a SIGKILL.

    Python's resource tracker would remove them, but Ray may kill it along with an actor that it watches. /proc/PID/maps
    shows the name under which a file was created, so files are matched by inode.
    """
    inodes = {int(line.split()[4]) for pid in pids for line in _maps(pid) if "/dev/shm/sem." in line}
    return tuple(str(path) for path in Path("/dev/shm").glob("sem.mp-*") if _inode(path) in inodes)


def _maps(pid: int) -> list[str]:
    """Return what a process has mapped; nothing if it has ended, as helpers of an engine's start do."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return []


def _inode(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return None


def end_processes(processes: Sequence[ProcessId], files: Sequence[str] = ()) -> list[int]:
    """SIGKILL these processes and all below them, even if they are stopped, and remove the files they leave behind.

    Returns the pids of those that are still there after 10 s. Python's resource trackers end by themselves.
    """
    found: list[psutil.Process] = []
    for process in processes:
        found += _with_descendants(process)
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    give_up_s = time.monotonic() + GONE_WITHIN_S
    while (left := [one.pid for one in found if _runs(one)]) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    ended = {one.pid for one in found if not _runs(one)}
    ended |= {process.pid for process in processes if not psutil.pid_exists(process.pid)}
    for file in (*map(Path, files), *(file for pid in ended for file in _shared_memory_of(pid))):
        file.unlink(missing_ok=True)
    for folder in {process.folder for process in processes} - {""}:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _shared_memory_of(pid: int) -> list[Path]:
    """List what CUDA and torch leave in /dev/shm when a process that shared GPU memory ends, killed or not.

    Both put the pid into the name: CUDA in hexadecimal (seen with driver 580.159), torch as its reference counters.
    """
    return [found for name in (f"torch_{pid}_*", f"cuda.shm.*.{pid:x}.*") for found in Path("/dev/shm").glob(name)]


def _with_descendants(process: ProcessId) -> list[psutil.Process]:
    try:
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.started_s) > SAME_START_S:
            return []
        return [found, *(child for child in found.children(recursive=True) if not is_tracker(child))]
    except psutil.NoSuchProcess:
        return []


def is_tracker(process: psutil.Process) -> bool:
    """Return whether this is Python's resource tracker; False if it has ended, or nobody has collected it yet."""
    try:
        return RESOURCE_TRACKER in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _runs(process: psutil.Process) -> bool:
    """Return whether it still runs, or holds anything: a zombie does until its last thread has ended.

    The first thread of a killed process may be a zombie while another one still frees the memory and then closes the
    sockets, with which cores are held.
    """
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False
