"""The `collective` transport's receiving end: whole tensors through a pair group, their descriptions over gRPC.

There is one group for each source, formed when it is first used. It runs one transfer at a time, since its messages
carry no names. A transfer that is cancelled or fails in the middle drops its group, and the next fetch forms another.
Checksums come last, so a transfer that fails by them has written the blocks that it was for. `group.py` says which
parts of this have run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import msgspec
import torch

from ridgeline.contracts import errors
from ridgeline.contracts.rpc.address import split_host_port
from ridgeline.decode_worker.kv_fetch.stream import SourceStream, read_last_events
from ridgeline.decode_worker.kv_fetch.threads import run_in_thread
from ridgeline.kv_transfer.collective.group import FETCHER_RANK, FORM_S, PairGroup, backend_for, join_store
from ridgeline.kv_transfer.collective.wire import (
    COLLECT,
    FORMED,
    JOIN,
    Chunk,
    End,
    Invitation,
    Transfer,
    most_blocks,
)
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import Pull, Puller, SourceDescription
from ridgeline.kv_transfer.memory.glibc import keep_freed_memory
from ridgeline.kv_transfer.wire import grpc_methods

MAX_CONCURRENT_FETCHES: Final = 8
FORMING_THREADS: Final = 4

_decode_invitation: Final = msgspec.msgpack.Decoder(Invitation).decode
_decode_told: Final = msgspec.msgpack.Decoder(Chunk | End).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class CollectivePuller(Puller):
    """The `collective` transport; keeps one pair group for each source process."""

    name = "collective"
    covered_by_tls = False  # torch.distributed has none

    def __init__(self, control: GrpcControl, device: torch.device, host: str) -> None:
        """`device` is the pool's; `host` is this machine's address to use."""
        keep_freed_memory()
        self._control = control
        self._device = device
        self._backend = backend_for(device)
        self._host = host
        self._pairs: dict[str, _Pair] = {}
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT_FETCHES, thread_name_prefix="kv-collect")
        self._forming = ThreadPoolExecutor(FORMING_THREADS, thread_name_prefix="kv-pair")

    def unsupported_reason(self, source: SourceDescription) -> str | None:
        if self._backend is None:
            return f"this build of torch.distributed has no backend for {self._device.type}"
        theirs = source.offers.get(self.name, {}).get("backend")
        if theirs != self._backend:
            return f"its backend is {theirs or 'none'}, {self._backend} here"
        return None

    async def pull(self, pull: Pull) -> None:
        pair = self._pair(pull)
        async with pair.turn(pull):
            membership = await self._membership(pair, pull)
            transfer = _RunningTransfer(pull, membership)
            try:
                await run_in_thread(self._threads, transfer.run, transfer.stop)
            finally:
                if not transfer.settled or self._pairs.get(pull.address) is not pair:
                    self._leave(pair)

    def forget(self, source: SourceDescription) -> None:
        for address, pair in list(self._pairs.items()):
            if pair.incarnation == source.incarnation:
                del self._pairs[address]
                if not pair.lock.locked():  # otherwise the transfer that holds the group leaves it at its end
                    self._leave(pair)

    async def close(self) -> None:
        for pair in self._pairs.values():
            self._leave(pair)
        self._pairs.clear()
        self._forming.shutdown(wait=False)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pair(self, pull: Pull) -> _Pair:
        """Return the pair with this source, after dropping that of an earlier process at its address."""
        pair = self._pairs.get(pull.address)
        if pair is None or pair.incarnation != pull.source.incarnation:
            if pair is not None:
                self._leave(pair)
            pair = self._pairs[pull.address] = _Pair(pull.source.incarnation)
        return pair

    async def _membership(self, pair: _Pair, pull: Pull) -> _Membership:
        """Form the group unless it exists. Forming continues if we are cancelled: the next fetch will need it."""
        if pair.membership is not None and _has_broken(pair.membership):
            self._leave(pair)
        if pair.membership is None:
            channel = self._control.channel(pull.address)
            pair.membership = self._forming.submit(
                lambda: _Membership.join(channel, pull.address, pair.incarnation, self._host, self._device)
            )
        forming = asyncio.wrap_future(pair.membership)
        await asyncio.wait((forming,), timeout=pull.give_up_at_s - time.monotonic())
        if not forming.done():
            raise errors.TransferFailed(errors.TIMEOUT, f"no pair group with {pull.address} in time")
        try:
            return forming.result()
        except errors.HandoffError:
            pair.membership = None
            raise

    def _leave(self, pair: _Pair) -> None:
        """Leave the group on another thread, because closing one can block."""
        membership, pair.membership = pair.membership, None
        if membership is not None:
            self._forming.submit(_leave_when_formed, membership)


@dataclass(slots=True)
class _Pair:
    """The state kept for one source process; used on the event loop only."""

    incarnation: str
    membership: Future[_Membership] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def turn(self, pull: Pull) -> AsyncIterator[None]:
        """Wait for the group; raises TransferFailed(`timeout`) if the transfers before this one take too long."""
        try:
            async with asyncio.timeout(pull.give_up_at_s - time.monotonic()):
                await self.lock.acquire()
        except TimeoutError as error:
            sentence = f"other transfers from {pull.address} took all the time"
            raise errors.TransferFailed(errors.TIMEOUT, sentence) from error
        try:
            yield
        finally:
            self.lock.release()


def _has_broken(membership: Future[_Membership]) -> bool:
    return membership.done() and membership.exception() is None and membership.result().group.broken


def _leave_when_formed(membership: Future[_Membership]) -> None:
    if membership.exception() is None:
        membership.result().leave()


class _Membership:
    """This process's membership in a group; the source keeps its own while the Join stream is open."""

    def __init__(self, channel: grpc.Channel, call: Any, name: str, group: PairGroup) -> None:
        self.channel = channel
        self.name = name
        self.group = group
        self._call = call

    @classmethod
    def join(
        cls, channel: grpc.Channel, address: str, incarnation: str, host: str, device: torch.device
    ) -> _Membership:
        """Meet the source; blocks up to a few times FORM_S. Raises TransferFailed."""
        call = channel.unary_stream(f"/{grpc_methods.SERVICE}/{JOIN}")(b"")
        patience = threading.Timer(3 * FORM_S, call.cancel)
        patience.daemon = True
        patience.start()
        group: PairGroup | None = None
        try:
            invitation = grpc_methods.read_answer(_decode_invitation, _next(call), address)
            if invitation.incarnation != incarnation:
                raise errors.TransferFailed(errors.STALE_PAIRING, f"{address} is another process now")
            store = join_store(split_host_port(address)[0], invitation.store_port)
            group = PairGroup.form(FETCHER_RANK, invitation.group, store, host, device, address)
            if _next(call) != FORMED:
                raise errors.TransferFailed(errors.UNREACHABLE, f"{address} formed no group")
        except (grpc.RpcError, errors.HandoffError) as failure:
            call.cancel()
            read_last_events(call)
            if group is not None:
                group.break_off()
            if isinstance(failure, errors.HandoffError):
                raise
            raise grpc_methods.error_of(failure, address) from failure
        finally:
            patience.cancel()
        return cls(channel, call, invitation.group, group)

    def leave(self) -> None:
        """Leave the group and release threads that wait in it, at both ends. Calling it again does nothing."""
        self.group.break_off()
        self._call.cancel()
        read_last_events(self._call)


class _RunningTransfer:
    """One pull. `run` runs on its own thread; `stop` is called from the event loop."""

    def __init__(self, pull: Pull, membership: _Membership) -> None:
        self.settled = True
        """Whether all that was sent has been received, so that the group can be used again."""
        self._pull = pull
        self._membership = membership
        message = _encode(Transfer(group=membership.name, request=pull.request))
        self._stream = SourceStream(membership.channel, COLLECT, pull, message)
        self._landed = 0
        """The position of the next chunk: positions ascend."""
        self._checksums: list[torch.Tensor] = []

    def run(self) -> None:
        """Receive one whole answer. Raises a HandoffError."""
        self._stream.run(self._consume)

    def stop(self) -> None:
        """Make `run` raise soon; what is on its way is lost with the group. May be called again."""
        self.settled = False
        self._stream.cancel()
        self._membership.group.break_off()

    def _consume(self, call: Any) -> None:
        end = None
        for message in call:
            end = grpc_methods.read_answer(_decode_told, message, self._pull.address)
            if isinstance(end, Chunk):
                self.settled = False
                self._receive(end)
        if not isinstance(end, End):
            raise errors.TransferFailed(errors.UNREACHABLE, f"{self._pull.address} ended the transfer in the middle")
        self.settled = True
        if self._landed != len(self._pull.target_block_ids):
            raise _corrupted(f"the end came where block {self._landed} was due")
        if self._pull.pool.on_host(self._checksums) != end.checksums:
            raise _corrupted("the checksums of the tensors are wrong")
        self._pull.progress.first_token = end.first_token

    def _receive(self, chunk: Chunk) -> None:
        """Receive one tensor, and write it."""
        self._pull.progress.first_byte()
        pool = self._pull.pool
        check_chunk(chunk, self._landed, len(self._pull.target_block_ids), most_blocks(pool))
        blocks = pool.staging(pool.num_layers, chunk.count)
        self._membership.group.receive(blocks, self._pull.give_up_at_s)
        self._stream.raise_if_cancelled()
        self._checksums.append(pool.checksum(blocks))
        target_ids = self._pull.target_block_ids[chunk.first : chunk.first + chunk.count]
        pool.scatter(pool.layers, target_ids, blocks)
        self._landed += chunk.count
        self._pull.progress.landed(blocks.nbytes)
        if chunk.ends_segment:
            self._pull.progress.segment_ends()


def check_chunk(chunk: Chunk, due: int, num_blocks: int, most_blocks: int) -> None:
    """Raise TransferFailed(`corrupted`) unless this is the chunk that begins at position `due`, with blocks left."""
    if chunk.first != due or not 1 <= chunk.count <= min(num_blocks - due, most_blocks):
        raise _corrupted(f"{chunk.count} blocks from {chunk.first} came where block {due} of {num_blocks} was due")


def _corrupted(message: str) -> errors.TransferFailed:
    return errors.TransferFailed(errors.CORRUPTED, message)


def _next(call: Any) -> bytes:
    """Return the stream's next message. Raises TransferFailed if it ended instead."""
    for message in call:
        return bytes(message)
    raise errors.TransferFailed(errors.UNREACHABLE, "the source ended the pair group")
