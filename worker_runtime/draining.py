"""When a worker that leaves may go: once nobody needs its KV blocks any more."""

from __future__ import annotations

import asyncio
from typing import Protocol

POLL_S = 0.1
SETTLED_S = 1.0
"""How long a worker must report that nothing is held: what a request leaves behind is published one step after its end.
"""
LEASE_MARGIN_S = 2.0


class CounterSource(Protocol):
    """Where the engine's newest statistics are."""

    @property
    def counters(self) -> dict[str, float]: ...


async def kv_unneeded(stats: CounterSource, lease_s: float) -> None:
    """Wait until no hand-off is open and no block is pinned, at most for the time of a lease."""
    loop = asyncio.get_running_loop()
    give_up_s = loop.time() + max(lease_s, SETTLED_S) + LEASE_MARGIN_S
    free_since_s = loop.time()
    while loop.time() < give_up_s:
        if stats.counters.get("open_leases", 0.0) or stats.counters.get("pinned_blocks", 0.0):
            free_since_s = loop.time()
        elif loop.time() - free_since_s >= SETTLED_S:
            return
        await asyncio.sleep(POLL_S)
