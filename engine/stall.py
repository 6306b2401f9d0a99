"""Distinguishes a hung engine from an idle one.

`ridgeline.engine.vllm_engine` feeds the watch; `ridgeline.worker_runtime.host` reads it.

An engine process can hang without ending: stopped by a signal, or waiting for a device or a lock. From outside this
shows only as work without reported steps. Work may leave before the engine counts as stalled, since clients give up, so
the time is added up over all work until a step is reported. A running engine reports a step for any work it is given,
and idle time does not count.

An engine that computes a long chunk on a busy machine and one that hangs look alike from outside: no step. But one that
hangs does nothing, is stopped, or has all the cores that it asks for and gets nowhere. One that waits for its turn on
them, for a disk, or for a compiler may be well.

How long is too long depends on what the engine does meanwhile (`Activity`). One that does nothing gets
three times its longest step so far. One that computes gets three times the longest step so far, or three times the
length that it has foretold for the step that runs. It foretells no end for a step of a kind or size that it has hardly
met, which may have to compile something (`StepFit.foretell_s`). One that waits for a core, for swapped memory or for a
compiler gets `supervision.stall_timeout_s`, which is also the most that any gets.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

LONGEST_STEPS = 3.0
"""An engine is given so many times its longest step."""
LEAST_STILL_S = 5.0
"""But this long at the least, also before its first step: for about as long, routers give work to one that does not
answer (`ridgeline.router.fleet.worker`)."""
LEAST_PART = 1 / 3
"""And one that computes this part of `supervision.stall_timeout_s` at the least: only after it do routers doubt it too,
and it is long beside what may come between two steps, as compiling a kernel for a sampling parameter that is new."""
FORETOLD_FROM_S = LEAST_STILL_S / LONGEST_STEPS
"""Steps that are expected to be shorter need not be foretold: three times that is below the least that is given."""
FADES = 0.999
"""What the longest step counts for after each later one: one that a busy machine made long fades in thousands."""


class StallWatch:
    """Measures how long work has been waiting for a step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waited_s = 0.0
        """Seconds before `_since_s` in which work got no step."""
        self._since_s = clock()
        self._has_work = False
        self._longest_s = 0.0
        """The longest step before the last look; it fades."""
        self._newest_s = 0.0
        """The longest step since the last look; the next look may come late, and tell that part of it was no step."""
        self._still_s = 0.0
        """Seconds with work, and since the last step, in which the engine did nothing."""
        self._computes_s = 0.0
        """The same, in which it computed."""
        self._foretold_s = math.inf

    def moved(self) -> None:
        """Record that the engine has reported a step."""
        took_s = self.stalled_s(has_work=self._has_work)
        self._longest_s *= FADES
        self._newest_s = max(took_s, FADES * self._newest_s)
        self._waited_s = self._still_s = self._computes_s = 0.0
        self._since_s = self._clock()

    def foretold(self, seconds: float) -> None:
        """Record how long the engine expects its running steps to take: infinite if it cannot know, 0 without any."""
        self._foretold_s = seconds

    def work_begins(self) -> None:
        """Record that the engine gets its first work after being idle."""
        self._has_work = True
        self._since_s = self._clock()

    def work_ends(self) -> None:
        """Record that the last work has left, finished or not."""
        self._has_work = False
        now_s = self._clock()
        self._waited_s += now_s - self._since_s
        self._since_s = now_s

    def stood_still(self, seconds: float) -> None:
        """Record that whoever watches stood still for so long, perhaps with the whole machine: that is no evidence.

        Steps may have been reported, and work may have left, between its end and this call.
        """
        now_s = self._clock()
        before_s = max(0.0, self._since_s + seconds - now_s)  # so much of it was before `_since_s`
        self._since_s = min(now_s, self._since_s + seconds)
        in_a_step_s = max(0.0, before_s - self._waited_s)
        self._waited_s = max(0.0, self._waited_s - before_s)
        self._newest_s = max(0.0, self._newest_s - in_a_step_s)

    def looked(self, after_s: float, doing: Doing) -> None:
        """Record what the engine has done in the `after_s` since the last look."""
        self._still_s = self._still_s + after_s if doing == "nothing" and self._has_work else 0.0
        self._computes_s += after_s if doing == "computes" and self._has_work else 0.0
        self._longest_s, self._newest_s = max(self._longest_s, self._newest_s), 0.0

    def is_stalled(self, timeout_s: float, *, has_work: bool) -> bool:
        """Return whether it hangs; it is given `timeout_s` at the most."""
        longest_s = max(self._longest_s, self._newest_s)
        still_limit_s = max(LEAST_STILL_S, LONGEST_STEPS * longest_s)
        limit_s = max(LEAST_STILL_S, LEAST_PART * timeout_s, LONGEST_STEPS * max(longest_s, self._foretold_s))
        return (
            self.stalled_s(has_work=has_work) >= timeout_s
            or self._still_s >= min(timeout_s, still_limit_s)
            or self._computes_s >= min(timeout_s, limit_s)
        )

    def stalled_s(self, *, has_work: bool) -> float:
        """Return the seconds with work since the last step, including the time until now if it `has_work`."""
        return self._waited_s + (self._clock() - self._since_s if has_work else 0.0)


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
