"""A transport without a network, for tests: the same checks, frames and leases, within one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvLayout
from ridgeline.decode_worker.kv_fetch.threads import run_in_thread
from ridgeline.kv_transfer.interfaces import KvSource, Pull, Puller, SourceControl, SourceDescription
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.wire.codec import make_codec
from ridgeline.kv_transfer.wire.frames import FrameReader
from ridgeline.prefill_worker.kv_source.block_server import BlockServer
from ridgeline.prefill_worker.kv_source.lease import LeaseTable

_servers: Final[dict[str, BlockServer]] = {}
_ports: Final = itertools.count(1)


class MemoryKvSource(KvSource):
    """A source that fetchers find by its address in a table of this process."""

    def __init__(self, pool: BlockPool, leases: LeaseTable, layout: KvLayout) -> None:
        self.server = BlockServer(pool, leases, layout)
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


class MemoryControl(SourceControl):
    """Calls the server's methods directly."""

    async def describe(self, address: str) -> SourceDescription:
        return _server(address).describe()

    async def renew(self, address: str, handoff_id: str) -> None:
        _server(address).renew(handoff_id)

    async def release(self, address: str, handoff_id: str, reader: int = 0, readers: int = 1) -> None:
        _server(address).release(handoff_id, reader, readers)

    async def close(self) -> None:
        """Do nothing: no connection is open."""


class MemoryPuller(Puller):
    """Copies frame by frame, on a thread."""

    name = "memory"
    copies_raw = False

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="kv-fetch")

    def unsupported_reason(self, source: SourceDescription) -> str | None:
        return None

    async def pull(self, pull: Pull) -> None:
        stopped = threading.Event()
        await run_in_thread(self._threads, lambda: _copy(pull, stopped), stopped.set)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _copy(pull: Pull, stopped: threading.Event) -> None:
    """Copy on a fetch thread, checking between frames whether both sides are still there."""
    codec = make_codec(pull.request.wire_dtype, pull.request.layout, pull.request.part_bytes)
    reader = FrameReader(pull.pool, pull.target_block_ids, pull.progress, codec)

    def accept_all(frames: Generator[bytes, None, int | None]) -> int | None:
        while True:
            try:
                frame = next(frames)
            except StopIteration as end:
                first_token: int | None = end.value
                return first_token
            if stopped.is_set():
                raise errors.TransferCancelled(errors.CANCELLED, "cancelled by the fetching side")
            _server(pull.address)
            reader.accept(frame)

    with closing(_server(pull.address).frames(pull.request, lambda: not stopped.is_set())) as frames:
        pull.progress.first_token = accept_all(frames)
    reader.finish()


def _server(address: str) -> BlockServer:
    server = _servers.get(address)
    if server is None:
        raise errors.TransferFailed(errors.UNREACHABLE, f"nothing serves {address}")
    return server
