"""The `grpc` transport's receiving end: reaches any host, checks every frame, and holds one frame in memory."""

from __future__ import annotations

from typing import Any

from ridgeline.decode_worker.kv_fetch.stream import SourceStream
from ridgeline.decode_worker.kv_fetch.threads import FetchThreads
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import Pull, Puller, SourceDescription
from ridgeline.kv_transfer.memory.glibc import keep_freed_memory
from ridgeline.kv_transfer.wire import grpc_methods
from ridgeline.kv_transfer.wire.frames import FrameReader


class GrpcPuller(Puller):
    """The `grpc` transport. Each pull borrows one thread, which writes every frame straight into the pool."""

    name = "grpc"

    def __init__(self, control: GrpcControl) -> None:
        keep_freed_memory()
        self._control = control
        self._threads = FetchThreads("kv-fetch")

    def unsupported_reason(self, source: SourceDescription) -> str | None:
        return None  # a source that answered `describe` can be reached

    async def pull(self, pull: Pull) -> None:
        stream = SourceStream(self._control.channel(pull.address), grpc_methods.FETCH, pull)
        reader = FrameReader(pull.pool, pull.target_block_ids, pull.progress)

        def consume(call: Any) -> None:
            for frame in call:
                reader.accept(frame)
            reader.finish()
            pull.progress.first_token = grpc_methods.first_token_of(call)

        await self._threads.run(pull, lambda: stream.run(consume), stream.cancel)

    async def close(self) -> None:
        self._threads.close()
