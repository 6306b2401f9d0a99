"""Processes of one node: names for them that last, and their end. Used by `cluster.actor_slot`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

GONE_WITHIN_S = 10.0
RESOURCE_TRACKER = "resource_tracker"
SAME_START_S = 2.0
"""Start times are computed from the boot time, which moves when the clock is set."""


@dataclass(frozen=True)
class ProcessId:
    """A process and nobody who gets its number later."""

    pid: int
    started_s: float

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        """The name of a running process."""
        return cls(process.pid, process.create_time())


def this_process() -> ProcessId:
    """The caller's own."""
    return ProcessId.of(psutil.Process())


def end_processes(processes: Sequence[ProcessId]) -> list[int]:
    """SIGKILL these and all below them, also if they are stopped; the pids of those that are still there after 10 s.

    Python's resource trackers are left to end by themselves, which they do when what they track for is gone: they take
    its semaphores out of /dev/shm.
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
    return left


def _with_descendants(process: ProcessId) -> list[psutil.Process]:
    try:
        found = psutil.Process(process.pid)
        if abs(found.create_time() - process.started_s) > SAME_START_S:
            return []
        below = found.children(recursive=True)
        return [found, *(child for child in below if RESOURCE_TRACKER not in " ".join(child.cmdline()))]
    except psutil.NoSuchProcess:
        return []


def _runs(process: psutil.Process) -> bool:
    """A zombie holds nothing any more."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
