"""The lives of the last hand-offs, so that one which is left over can say how it got there.

Called by `kv_transfer.source.lease`.

A hand-off that nobody releases costs its blocks for a lease and shows nowhere else. Here every event is one entry of a
short list; the lists of the newest hand-offs are kept. What lingers is told with a worker's status, and what runs out
is logged.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from contracts.handoff import shown_id

REMEMBERED_LIVES: Final = 512
LONGEST_LIFE_EVENTS: Final = 24
"""Of one hand-off; what comes after them is not kept, but for the last one."""


class HandoffJournal:
    """Not locked: its owner calls it under a lock of its own."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lives: OrderedDict[str, list[tuple[float, str]]] = OrderedDict()

    def note(self, handoff_id: str, event: str) -> None:
        """Something happened to this hand-off now."""
        life = self._lives.setdefault(handoff_id, [])
        if len(life) >= LONGEST_LIFE_EVENTS:
            life.pop()
        life.append((self._clock(), event))
        if len(self._lives) > REMEMBERED_LIVES:
            self._lives.popitem(last=False)

    def life(self, handoff_id: str) -> str:
        """A sentence: each event with its seconds since the first one."""
        events = self._lives.get(handoff_id, [])
        began_s = events[0][0] if events else self._clock()
        told = [f"{event} at {at_s - began_s:.3f} s" for at_s, event in events]
        return f"hand-off {shown_id(handoff_id)}: {', '.join([*told, f'now {self._clock() - began_s:.3f} s'])}"
