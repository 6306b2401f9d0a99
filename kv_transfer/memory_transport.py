"""A transport without a network, for tests: same checks, frames and leases, handed over inside one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

from kv_transfer import errors
from kv_transfer.base import FetchProgress, KvFetcher, KvSource, SourceDescription, run_in_thread
from kv_transfer.block_server import BlockServer, FetchRequest
from kv_transfer.blocks import BlockPool
from kv_transfer.frames import FrameReader
from kv_transfer.handoff import KvHandoff, KvLayout
from kv_transfer.lease import LeaseTable

_servers: Final[dict[str, BlockServer]] = {}
_ports: Final = itertools.count(1)


class MemoryKvSource(KvSource):
    """Found by address in a table of this process."""

    def __init__(self, pool: BlockPool, leases: LeaseTable, layout: KvLayout) -> None:
        self.server = BlockServer(pool, leases, layout, publish_wait_s=1.0)
        self._address = f"memory:{next(_ports)}"

    @property
    def address(self) -> str:
        return self._address

    @property
    def bytes_sent_total(self) -> int:
        return self.server.bytes_sent_total

    def start(self) -> None:
        _servers[self._address] = self.server

    def close(self) -> None:
        _servers.pop(self._address, None)


class MemoryKvFetcher(KvFetcher):
    """Copies frame by frame on a thread."""

    def __init__(self, layout: KvLayout) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kv-fetch")
        self._layout = layout

    async def _pull(
        self,
        handoff: KvHandoff,
        first_block: int,
        target_block_ids: Sequence[int],
        pool: BlockPool,
        progress: FetchProgress,
    ) -> None:
        request = FetchRequest(
            handoff_id=handoff.handoff_id,
            first_block=first_block,
            num_blocks=len(target_block_ids),
            layout=self._layout,
        )
        stopped = threading.Event()
        reader = FrameReader(pool, target_block_ids, progress)
        await run_in_thread(self._threads, lambda: _copy(handoff.address, request, reader, stopped), stopped.set)

    async def renew(self, handoff: KvHandoff) -> None:
        _server(handoff.address).renew(handoff.handoff_id)

    async def release(self, handoff: KvHandoff) -> None:
        _server(handoff.address).release(handoff.handoff_id)

    async def describe(self, address: str) -> SourceDescription:
        return _server(address).describe()

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _copy(address: str, request: FetchRequest, reader: FrameReader, stopped: threading.Event) -> None:
    """Runs on a fetch thread; looks between frames whether both sides are still there."""
    with closing(_server(address).frames(request)) as frames:
        for frame in frames:
            if stopped.is_set():
                raise errors.TransferCancelled(errors.CANCELLED, "cancelled by the fetching side")
            _server(address)
            reader.accept(frame)
    reader.finish()


def _server(address: str) -> BlockServer:
    server = _servers.get(address)
    if server is None:
        raise errors.TransferFailed(errors.UNREACHABLE, f"nothing serves {address}")
    return server
