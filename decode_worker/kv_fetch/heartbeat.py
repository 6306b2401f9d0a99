"""Lease renewal by the fetching side, while blocks are wanted. Runs on the `TransferService`'s event loop."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, shown_id
from ridgeline.decode_worker.kv_fetch.fetcher import KvFetcher

log = logging.getLogger(__name__)

BEATS_PER_LEASE: Final = 6
"""Renewals per lease time, so that five in a row may be lost before the lease runs out."""
SHORTEST_BEAT_S: Final = 0.02


class Heartbeats:
    """One task for each watched hand-off; it ends by itself when the lease is lost."""

    def __init__(self, fetcher: KvFetcher) -> None:
        self._fetcher = fetcher
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def watch(self, handoff: KvHandoff) -> None:
        """Start renewing; does nothing if the hand-off is watched already."""
        if handoff.handoff_id in self._tasks:
            return
        task = asyncio.get_running_loop().create_task(self._beat(handoff))
        self._tasks[handoff.handoff_id] = task
        task.add_done_callback(lambda _: self._forget(handoff.handoff_id, task))

    def stop(self, handoff: KvHandoff) -> None:
        """Stop renewing; the lease then runs until its end."""
        task = self._tasks.pop(handoff.handoff_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop renewing all leases."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, handoff_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(handoff_id) is task:
            del self._tasks[handoff_id]

    async def _beat(self, handoff: KvHandoff) -> None:
        """Renew until refused, or until a whole lease time has passed without success.

        An unpublished or unreachable source may still come.
        """
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
