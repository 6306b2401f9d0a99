"""What each router must know of the others' admitted requests, kept up by differences.

With thousands of clients, telling everything each time would take half of the dispatcher's core. So a router tells
which clients' holdings have changed, and the dispatcher tells each router of those the sums of the others.
"""

from __future__ import annotations

from ridgeline.router.flow.admission import Held, Holdings
from ridgeline.router.shared.messages import Holds, Others


class Part:
    """What one router holds, and what it has been told of the others."""

    def __init__(self) -> None:
        self.own = Holdings()
        self.changed: set[str] = set()
        """Clients of which others may hold something else than it was told."""
        self.is_new = True
        """Whether it has been told nothing yet."""
        self._told: dict[str, Held] = {}
        self._told_rates = (0.0, 0.0)

    def differences(self, of_all: Holdings, rates: tuple[float, float]) -> Others | None:
        """Return what it must be told, and take it for told; None if there is nothing.

        `of_all` is what all routers hold, `rates` how fast that of the others ends.
        """
        changed: dict[str, Held] = {}
        for client in self.changed:
            now = of_all.of(client).without(self.own.of(client))
            if now == self._told.get(client, Held()):
                continue
            changed[client] = now
            if now == Held():
                del self._told[client]
            else:
                self._told[client] = now
        self.changed.clear()
        if not changed and rates == self._told_rates and not self.is_new:
            return None
        whole, self.is_new, self._told_rates = self.is_new, False, rates
        return Others(whole, changed, *rates)


class Parts:
    """All routers' parts, and their sum."""

    def __init__(self) -> None:
        self._parts: set[Part] = set()
        self._all = Holdings()

    def enter(self) -> Part:
        """Return a new router's part, which must be told of everything."""
        part = Part()
        part.changed.update(self._all.of_client)
        self._parts.add(part)
        return part

    def leave(self, part: Part) -> None:
        """Forget what a router held."""
        self.take(part, Holds(dict.fromkeys(part.own.of_client, Held())))
        self._parts.discard(part)

    def take(self, part: Part, holds: Holds) -> None:
        """Take a router's changes."""
        for client, held in holds.changed.items():
            before = part.own.of(client)
            self._all.put(client, self._all.of(client).plus(held.without(before)))
            part.own.put(client, held)
        part.own.sequences_per_s, part.own.blocks_per_s = holds.sequences_per_s, holds.blocks_per_s
        for other in self._parts:
            if other is not part:
                other.changed.update(holds.changed)

    def differences(self, part: Part) -> Others | None:
        """Return what a router must be told, and take it for told; None if there is nothing."""
        others = [one.own for one in self._parts if one is not part]
        rates = (sum(one.sequences_per_s for one in others), sum(one.blocks_per_s for one in others))
        return part.differences(self._all, rates)


class Changes:
    """Finds what a router has to tell of its own holdings."""

    def __init__(self) -> None:
        self._told = Holdings()

    def since_told(self, now: Holdings) -> Holds | None:
        """Return what differs from what was told last, and take it for told; None if nothing does."""
        told, self._told = self._told, now
        changed = {client: held for client, held in now.of_client.items() if told.of_client.get(client) != held}
        changed |= {client: Held() for client in told.of_client.keys() - now.of_client.keys()}
        rates = (now.sequences_per_s, now.blocks_per_s)
        if not changed and rates == (told.sequences_per_s, told.blocks_per_s):
            return None
        return Holds(changed, *rates)

    def everything(self, now: Holdings) -> Holds:
        """Return all of it, for a dispatcher that knows nothing of this router."""
        self._told = now
        return Holds(now.of_client, now.sequences_per_s, now.blocks_per_s)
