"""The history of recent hand-offs, so that a report about one that was never released shows how it got there.

A hand-off that nobody releases costs its blocks for a lease and shows nowhere else. Here each event is one entry in a
short list, and the lists of the newest hand-offs are kept. Hand-offs that are stale are reported in a worker's status;
those that expire are logged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ridgeline.contracts.handoff import shown_id

REMEMBERED_LIVES: Final = 512
LONGEST_LIFE_EVENTS: Final = 24
"""Events kept for one hand-off; later ones replace the last entry."""


class HandoffJournal:
    """The events of recent hand-offs. It has no lock: its owner calls it under one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, list[tuple[float, str]]] = OrderedDict()

    def note(self, handoff_id: str, event: str) -> None:
        """Record an event of this hand-off, with the time."""
        life = self._lives.setdefault(handoff_id, [])
        if len(life) >= LONGEST_LIFE_EVENTS:
            life.pop()
        life.append((self._clock(), event))
        if len(self._lives) > REMEMBERED_LIVES:
            self._lives.popitem(last=False)

    def life(self, handoff_id: str) -> str:
        """Describe the hand-off's events in one sentence, each with its seconds since the first."""
        events = self._lives.get(handoff_id, [])
        began_s = events[0][0] if events else self._clock()
        entries = [f"{event} at {at_s - began_s:.3f} s" for at_s, event in events]
        return f"hand-off {shown_id(handoff_id)}: {', '.join([*entries, f'now {self._clock() - began_s:.3f} s'])}"
