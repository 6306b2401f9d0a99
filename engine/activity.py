"""What the processes of an engine do, as the kernel tells. Read by `engine.vllm_engine` while a step is overdue.

An engine that computes a long chunk on a busy machine and one that hangs look alike from outside: no step. But the one
uses its cores, or waits for its turn on them; the other does nothing, or is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

STOPPED = frozenset("Tt")
"""States of a thread in /proc: stopped by a signal, or by a debugger."""
BUSY = frozenset("RD")
"""Running or ready to run; waiting for a disk or for memory that was swapped out."""


@dataclass(frozen=True)
class Glance:
    """What all threads of some processes were doing at a moment."""

    stopped: bool
    busy: bool
    ticks: int
    """CPU time that they have used, in the kernel's units."""


class Activity:
    """Watches the processes below this one."""

    def __init__(
        self, *, computes_here: bool, processes: Callable[[], Iterable[int]] = lambda: _below_this_process()
    ) -> None:
        """`computes_here`: whether the engine computes on cores, so that one which uses none is not computing."""
        self._computes_here = computes_here
        self._processes = processes
        self._last: Glance | None = None

    def stands_still(self) -> bool:
        """Return whether one of them is stopped, or all have done nothing since the last call."""
        now, last = glance(self._processes()), self._last
        self._last = now
        if now.stopped:
            return True
        return self._computes_here and not now.busy and last is not None and now.ticks == last.ticks


def glance(pids: Iterable[int]) -> Glance:
    """Look at every thread of these processes; those that have ended are left out."""
    states, ticks = set(), 0
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
            with suppress(OSError):
                _, _, fields = thread.read_text().rpartition(") ")  # a name may hold anything
                state, *numbers = fields.split()
                states.add(state)
                ticks += int(numbers[10]) + int(numbers[11])
    return Glance(bool(states & STOPPED), bool(states & BUSY), ticks)


def _below_this_process() -> list[int]:
    return [child.pid for child in psutil.Process().children(recursive=True)]
