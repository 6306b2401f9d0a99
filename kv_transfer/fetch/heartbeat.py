"""The fetching side's duty to its sources: keep leases alive while blocks are wanted, give them back when not.

Runs on the `TransferService`'s event loop and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from contracts import errors
from contracts.handoff import KvHandoff, shown_id
from kv_transfer.fetch.fetcher import KvFetcher

log = logging.getLogger(__name__)

BEATS_PER_LEASE: Final = 6
"""Five beats may be lost before a lease runs out."""
SHORTEST_BEAT_S: Final = 0.02
RELEASE_RETRY_DELAYS_S: Final = (0.2, 0.5, 1.0)


class Heartbeats:
    """One task for each watched hand-off, ending by itself when the lease is lost."""

    def __init__(self, fetcher: KvFetcher) -> None:
        self._fetcher = fetcher
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def watch(self, handoff: KvHandoff) -> None:
        """Begin renewing; nothing happens if it is watched already."""
        if handoff.handoff_id in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._beat(handoff))
        self._tasks[handoff.handoff_id] = task
        task.add_done_callback(lambda _: self._forget(handoff.handoff_id, task))

    def stop(self, handoff: KvHandoff) -> None:
        """Stop renewing; the lease then lives out its time."""
        task = self._tasks.pop(handoff.handoff_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop all."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, handoff_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(handoff_id) is task:
            del self._tasks[handoff_id]

    async def _beat(self, handoff: KvHandoff) -> None:
        """Renew until refused, or until a whole lease passed without success: an unpublished or unreachable source
        may still come."""
        loop = asyncio.get_running_loop()
        give_up_at_s = loop.time() + handoff.lease_s
        while True:
            await asyncio.sleep(max(SHORTEST_BEAT_S, handoff.lease_s / BEATS_PER_LEASE))
            try:
                await self._fetcher.renew(handoff)
                give_up_at_s = loop.time() + handoff.lease_s
            except errors.HandoffError as error:
                if error.reason == errors.LEASE_EXPIRED or loop.time() >= give_up_at_s:
                    log.warning(
                        "stopped renewing hand-off %s of %s: %s", shown_id(handoff.handoff_id), handoff.addresses, error
                    )
                    return


async def release_with_retries(release: Callable[[KvHandoff], Awaitable[None]], handoff: KvHandoff) -> None:
    """Release; if the source stays unreachable, leave the blocks to their lease's end."""
    for delay_s in (*RELEASE_RETRY_DELAYS_S, None):
        try:
            await release(handoff)
            return
        except errors.HandoffError as error:
            if delay_s is None:
                log.warning(
                    "could not release hand-off %s of %s: %s", shown_id(handoff.handoff_id), handoff.addresses, error
                )
                return
            await asyncio.sleep(delay_s)
