"""The control messages to a source over gRPC: describe yourself, renew a lease, release blocks.

Its methods run on one event loop and block no thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Set
from typing import Any, Final

import grpc
import msgspec

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import KvHandoff, shown_id
from ridgeline.contracts.rpc.channel import open_channel
from ridgeline.contracts.rpc.tls import TlsFiles
from ridgeline.kv_transfer.interfaces import SourceDescription
from ridgeline.kv_transfer.wire import grpc_methods

log = logging.getLogger(__name__)

CONTROL_DEADLINE_S: Final = 3.0
RELEASE_RETRY_DELAYS_S: Final = (0.2, 0.5, 1.0)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_description: Final = msgspec.msgpack.Decoder(SourceDescription).decode


class GrpcControl:
    """One channel to each source, kept until `forget` or `close`; pullers share it. Each call has a deadline."""

    def __init__(
        self, largest_message_bytes: int = grpc_methods.CONTROL_MESSAGE_BYTES, tls: TlsFiles | None = None
    ) -> None:
        self._tls = tls
        self._options = grpc_methods.channel_options(largest_message_bytes)
        self._channels: dict[str, grpc.Channel] = {}

    def channel(self, address: str) -> grpc.Channel:
        """Return the channel to a source, opened on first use; call it on the event loop's thread only."""
        if address not in self._channels:
            self._channels[address] = open_channel(address, self._options, self._tls)
        return self._channels[address]

    async def describe(self, address: str) -> SourceDescription:
        """Ask a source about itself. Raises TransferFailed if it is unreachable."""
        answer = await self._call(address, grpc_methods.DESCRIBE, None)
        return grpc_methods.read_answer(_decode_description, answer, address)

    async def renew(self, address: str, handoff_id: str) -> None:
        """Extend the lease. Raises LeaseExpired or UnknownHandoff if it is gone, TransferFailed if unreachable.

        A hand-off that is announced but not yet published is unknown: its lease has not begun.
        """
        await self._call(address, grpc_methods.RENEW, handoff_id)

    async def release(self, address: str, handoff_id: str, reader: int = 0, readers: int = 1) -> None:
        """Release the blocks, without error if already done or unknown. Raises TransferFailed only if unreachable."""
        await self._call(address, grpc_methods.RELEASE, grpc_methods.Release(handoff_id, reader, readers))

    def forget(self, address: str) -> None:
        """Drop the channel to a source that has left for good. Calls in progress and later calls still work."""
        self._channels.pop(address, None)  # not closed, which would end its calls: it is freed with the last of them

    def known(self) -> Set[str]:
        """Return the addresses to which a channel is kept."""
        return self._channels.keys()

    async def close(self) -> None:
        """Close all connections. Calling it again does nothing."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()

    async def _call(self, address: str, method: str, argument: Any) -> bytes:
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        channel = self.channel(address)  # referenced until the answer is there: see `forget`
        call = channel.unary_unary(f"/{grpc_methods.SERVICE}/{method}").future(
            _encode(argument), timeout=CONTROL_DEADLINE_S
        )
        call.add_done_callback(lambda _: loop.call_soon_threadsafe(answered.set))
        try:
            await answered.wait()
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.code() is not grpc.StatusCode.OK:
            raise grpc_methods.error_of(call, address)
        answer: bytes = call.result()
        return answer


async def release_with_retries(release: Callable[[KvHandoff], Awaitable[None]], handoff: KvHandoff) -> None:
    """Release; if the source stays unreachable, leave the blocks to the end of their lease."""
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
