"""The `collective` transport's receiving end: tensors of pinned blocks through a pair group.

There is one group for each source process, formed when it is first used. It carries one copy's tensors at a time, in
the order in which they were asked for. A copy that is cancelled or fails in the middle drops its group, and the next
one forms another. A tensor is written when its checksum is right. `group.py` says which parts of this have run;
`pinned` asks for the pin and checks what the source says.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final

import grpc
import msgspec
import torch

from ridgeline.contracts import errors
from ridgeline.contracts.rpc.address import split_host_port
from ridgeline.decode_worker.kv_fetch.pinned import Copy, PinnedPuller, Readable, pieces
from ridgeline.decode_worker.kv_fetch.stream import read_last_events
from ridgeline.kv_transfer.collective.group import FETCHER_RANK, FORM_S, PairGroup, backend_for, join_store
from ridgeline.kv_transfer.collective.wire import COLLECT, FORMED, JOIN, TENSOR_BYTES, WINDOW, Invitation, TensorRequest
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import Pull
from ridgeline.kv_transfer.memory.blocks import CannotOpen
from ridgeline.kv_transfer.memory.glibc import keep_freed_memory
from ridgeline.kv_transfer.wire import grpc_methods

TURN_LOOK_S: Final = 0.02
"""How often a copy that waits for its turn looks whether it was cancelled."""
STALLED_S: Final = 5.0
"""A tensor that takes longer has lost its source; a cancelled pull waits for its tensor, so no longer than this."""
REFUSAL_S: Final = 1.0
"""How long the source's word on a tensor that did not come is waited for."""

_decode_invitation: Final = msgspec.msgpack.Decoder(Invitation).decode
_decode_checksum: Final = msgspec.msgpack.Decoder(int).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class CollectivePuller(PinnedPuller["_Peer"]):
    """The `collective` transport; keeps one pair group for each source process."""

    name = "collective"
    covered_by_tls = False  # torch.distributed has none
    not_offered = "its build of torch.distributed has no backend for its device"

    def __init__(self, control: GrpcControl, device: torch.device, host: str) -> None:
        """`device` is the pool's; `host` is this machine's address to use."""
        super().__init__(control, "kv-collect")
        keep_freed_memory()
        self._backend = backend_for(device)
        self._host = host

    def open(self, offer: dict[str, Any]) -> _Peer:
        if self._backend is None or offer.get("backend") != self._backend:
            raise CannotOpen(f"its backend is {offer.get('backend')}, {self._backend or 'none'} here")
        return _Peer(self._host)

    def copier(self, opened: _Peer, pull: Pull) -> Copy:
        channel = self._control.channel(pull.address)
        return lambda readable: opened.copy(readable, pull, channel)


class _Peer:
    """One source process, and the group with it once there is one."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._turn = threading.Lock()
        self.membership: _Membership | None = None

    def copy(self, readable: Readable, pull: Pull, channel: grpc.Channel) -> Generator[int, None, None]:
        """Copy what is readable in its turn; see `pinned.Copy`."""
        while not self._turn.acquire(timeout=TURN_LOOK_S):
            if time.monotonic() >= pull.give_up_at_s:
                sentence = f"other transfers from {pull.address} took all the time"
                raise errors.TransferFailed(errors.TIMEOUT, sentence)
            yield 0
        membership, self.membership = self.membership, None
        try:
            if membership is None or membership.group.broken:
                membership = _Membership.join(
                    channel, pull.address, pull.source.incarnation, self._host, pull.pool.device
                )
            under_way: deque[tuple[Readable, Any]] = deque()
            for piece in pieces(readable, pull.pool.block_bytes, TENSOR_BYTES[pull.pool.device.type]):
                under_way.append((piece, membership.ask(piece, pull)))
                if len(under_way) == WINDOW:
                    yield membership.land(*under_way.popleft(), pull)
            while under_way:
                yield membership.land(*under_way.popleft(), pull)
            self.membership = membership  # all that was asked for has come, so it can be used again
        finally:
            if membership is not None and self.membership is None:
                membership.leave()
            self._turn.release()


class _Membership:
    """This process's membership in a group; the source keeps its own while the Join stream is open."""

    def __init__(self, channel: grpc.Channel, call: Any, name: str, group: PairGroup) -> None:
        self.group = group
        self._name = name
        self._asked = 0
        self._ask = channel.unary_unary(f"/{grpc_methods.SERVICE}/{COLLECT}")
        self.leave = weakref.finalize(self, _leave, channel, call, group)
        """Leave the group and release threads that wait in it, at both ends. Calling it again does nothing."""

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
            _leave(channel, call, group)
            if isinstance(failure, errors.HandoffError):
                raise
            raise grpc_methods.error_of(failure, address) from failure
        finally:
            patience.cancel()
        return cls(channel, call, invitation.group, group)

    def ask(self, piece: Readable, pull: Pull) -> Any:
        """Ask for a piece; return the call, whose answer is the checksum."""
        ask = TensorRequest(
            group=self._name,
            number=self._asked,
            request=pull.request,
            first_block=piece.first,
            num_blocks=len(piece.source_ids),
            first_layer=piece.layers.start,
            end_layer=piece.layers.stop,
        )
        self._asked += 1
        return self._ask.future(_encode(ask), timeout=max(0.0, pull.give_up_at_s - time.monotonic()))

    def land(self, piece: Readable, call: Any, pull: Pull) -> int:
        """Receive a piece that was asked for and write it to its blocks; return its bytes. Raises a HandoffError."""
        pool = pull.pool
        blocks = pool.staging(len(piece.layers), len(piece.source_ids))
        try:
            self.group.receive(blocks, min(pull.give_up_at_s, time.monotonic() + STALLED_S))
        except errors.TransferFailed as error:
            with suppress(grpc.FutureTimeoutError):
                if (failure := call.exception(REFUSAL_S)) is not None and grpc_methods.reason_of(failure):
                    raise grpc_methods.error_of(failure, pull.address) from failure
            if error.reason == errors.TIMEOUT and time.monotonic() < pull.give_up_at_s:
                sentence = f"{pull.address} sent nothing whole for {STALLED_S:g} s"
                raise errors.TransferFailed(errors.UNREACHABLE, sentence) from error
            raise
        try:
            checksum = grpc_methods.read_answer(_decode_checksum, call.result(), pull.address)
        except grpc.RpcError as failure:
            raise grpc_methods.error_of(failure, pull.address) from failure
        if pool.on_host([pool.checksum(blocks)]) != [checksum]:
            raise errors.TransferFailed(errors.CORRUPTED, "the checksum of a tensor is wrong")
        pool.scatter(piece.layers, piece.target_ids, blocks)
        return blocks.nbytes


def _leave(channel: grpc.Channel, call: Any, group: PairGroup | None) -> None:  # the channel ends its calls if it goes
    if group is not None:
        group.break_off()
    call.cancel()
    read_last_events(call)


def _next(call: Any) -> bytes:
    """Return the stream's next message. Raises TransferFailed if it ended instead."""
    for message in call:
        return bytes(message)
    raise errors.TransferFailed(errors.UNREACHABLE, "the source ended the pair group")
