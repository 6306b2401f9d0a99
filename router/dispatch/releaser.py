"""Tells prefill workers, in the background, that a hand-off will not be fetched.

`ridgeline.router.server` creates it and gives it to the orchestrator.

Without it the blocks would stay pinned until their lease ends: harmless for a crash, but too slow when a client leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from ridgeline.contracts.errors import HandoffError
from ridgeline.contracts.handoff import KvHandoff
from ridgeline.contracts.rpc.tls import TlsFileError, TlsFiles
from ridgeline.kv_transfer.control import GrpcControl, release_with_retries

logger = logging.getLogger(__name__)


class HandoffReleaser:
    """A queue of hand-offs, and the task that releases them."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._control = GrpcControl(tls=tls)
        self._queue: asyncio.Queue[tuple[KvHandoff, float]] = asyncio.Queue()

    def release(self, handoff: KvHandoff, after_s: float = 0.0) -> None:
        """Queue a hand-off; never blocks. It has no effect on one that was fetched already."""
        self._queue.put_nowait((handoff, after_s))

    def forget(self, addresses: Iterable[str]) -> None:
        """Close the channels to workers that are gone, once nothing uses them."""
        for address in addresses:
            self._control.forget(address)

    async def run(self) -> None:
        """Release queued hand-offs, several at a time, until cancelled."""
        control = self._control

        async def release(handoff: KvHandoff) -> None:
            for address in handoff.addresses:
                try:
                    await control.release(address, handoff.handoff_id)
                except HandoffError:
                    control.forget(address)  # the worker may be gone, and nothing would report that again
                    raise

        async def release_later(handoff: KvHandoff, after_s: float) -> None:
            await asyncio.sleep(after_s)
            try:
                await release_with_retries(release, handoff)
            except TlsFileError as error:  # one failed release must not end the router
                logger.warning("a hand-off stays until its lease ends: %s", error)

        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    handoff, after_s = await self._queue.get()
                    group.create_task(release_later(handoff, after_s))
        finally:
            await control.close()
