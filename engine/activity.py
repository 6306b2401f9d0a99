"""What the processes of an engine do, as the kernel tells. Read while a step is overdue.

An engine that computes a long chunk on a busy machine and one that hangs look alike from outside: no step. But one that
hangs does nothing, is stopped, or has all the cores that it asks for and gets nowhere. One that waits for its turn on
them, for a disk, or for a compiler may be well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

Doing = Literal["nothing", "computes", "waits"]
"""Whether an engine does nothing, computes at its full speed, or waits for something outside of it."""

STOPPED = frozenset("Tt")
"""States of a thread in /proc: stopped by a signal, or by a debugger."""
BUSY = frozenset("RD")
"""Running or ready to run; waiting for a disk or for memory that was swapped out."""
COMPUTES: Final = 0.75
"""The part of the time of all its cores that one which computes at its full speed uses at the least. With less, a step
takes more than 4/3 of its time: then it is slow, which is no sign of a hang. A single thread that loops beside idle
cores counts as slow too."""
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Glance:
    """What all threads of some processes were doing at a moment."""

    stopped: bool
    busy: bool
    ticks: int
    """CPU time that they have used, in the kernel's units."""
    processes: frozenset[int] = frozenset()
    """Those that were there."""
    cores: int = 1
    """How many they may use together."""


class Activity:
    """Watches the processes below this one."""

    def __init__(
        self,
        *,
        computes_here: bool,
        processes: Callable[[], Iterable[int]] = lambda: _below_this_process(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`computes_here`: whether the engine computes on cores, so that one which uses none is not computing."""
        self._computes_here = computes_here
        self._processes = processes
        self._clock = clock
        self._last: Glance | None = None
        self._looked_s = 0.0

    def doing(self) -> Doing:
        """Return what they have done since the last call; "nothing" also if one of them is stopped."""
        now, last = glance(self._processes()), self._last
        now_s, before_s = self._clock(), self._looked_s
        self._last, self._looked_s = now, now_s
        if now.stopped:
            return "nothing"
        if last is None or now.processes != last.processes:  # a compiler's come and go
            return "waits"
        used = now.ticks - last.ticks
        full = COMPUTES * TICKS_PER_S * (now_s - before_s)
        if not self._computes_here:  # its device computes, or hangs; only that it gets no core itself can be told here
            return "waits" if now.busy and used < full else "computes"
        if not now.busy and not used:
            return "nothing"
        return "computes" if used >= full * now.cores else "waits"


def glance(pids: Iterable[int]) -> Glance:
    """Look at every thread of these processes; those that have ended are left out."""
    states, ticks, processes, cores = set(), 0, frozenset(pids), set[int]()
    for pid in processes:
        with suppress(OSError):
            cores |= os.sched_getaffinity(pid)
        for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(OSError):
                stat = thread.read_text(encoding="utf-8", errors="replace")  # its name may hold anything
                _, _, fields = stat.rpartition(") ")
                state, *numbers = fields.split()
                states.add(state)
                ticks += int(numbers[10]) + int(numbers[11])
    return Glance(bool(states & STOPPED), bool(states & BUSY), ticks, processes, len(cores) or 1)


def _below_this_process() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]
