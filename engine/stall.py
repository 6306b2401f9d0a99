"""Distinguishes a hung engine from an idle one.

`ridgeline.engine.vllm_engine` feeds the watch; `ridgeline.worker_runtime.host` reads it.

An engine process can hang without ending: stopped by a signal, or waiting for a device or a lock. From outside this
shows only as work without reported steps. Work may leave before the engine counts as stalled, since clients give up, so
the time is added up over all work until a step is reported. A running engine reports a step for any work it is given,
and idle time does not count.

How long is too long depends on what the engine does meanwhile (`ridgeline.engine.activity`). One that does nothing gets
three times its longest step so far. One that computes gets three times the longest step so far, or three times the
length that it has foretold for the step that runs. It foretells no end for a step of a kind or size that it has hardly
met, which may have to compile something (`StepFit.foretell_s`). One that waits for a core, for swapped memory or for a
compiler gets `supervision.stall_timeout_s`, which is also the most that any gets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ridgeline.engine.activity import Doing

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
