"""The `nixl` transport's receiving end: reads pinned blocks out of the source's registered memory, piece by piece.

Each piece lands in staging memory and is copied from there to its blocks, since a read cannot be aborted and must not
write to blocks that may be another request's by then. `pinned` asks for the pin and checks what the source says.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final

import msgspec

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import new_handoff_id
from ridgeline.decode_worker.kv_fetch.pinned import Copy, PinnedPuller, Readable, pieces
from ridgeline.kv_transfer.control import GrpcControl
from ridgeline.kv_transfer.interfaces import Pull
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.nixl.agent import Agent, Read
from ridgeline.kv_transfer.nixl.library import NixlFailed
from ridgeline.kv_transfer.nixl.source import BlockAddresses, NixlOffer
from ridgeline.kv_transfer.nixl.staging import PIECE_BYTES, Room, Staging

STALLED_S: Final = 5.0
"""A piece that takes longer has lost its source; a cancelled pull waits for its piece, so no longer than this."""
_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3


class Remote:
    """A source's agent, connected to until nobody refers to this any more."""

    def __init__(self, agent: Agent, offer: NixlOffer) -> None:
        """Connect. Raises NixlFailed."""
        self.name = agent.meet(offer.metadata)
        self.offer = offer
        weakref.finalize(self, _part, agent, self.name).atexit = False


def _part(agent: Agent, name: bytes) -> None:
    with suppress(NixlFailed):  # it has left already
        agent.part(name)


class NixlPuller(PinnedPuller[Remote]):
    """The `nixl` transport; keeps one connection for each source process."""

    name = "nixl"
    covered_by_tls = False  # UCX has none
    not_offered = "it does not offer its KV cache through NIXL"
    failures = (NixlFailed,)

    def __init__(self, control: GrpcControl, pool: BlockPool) -> None:
        """Start an agent for reads into this pool. Raises NixlFailed."""
        super().__init__(control, "kv-nixl")
        self._agent = Agent(new_handoff_id(), pool.device, answers=False)
        self._staging = Staging(self._agent, pool.device)

    def open(self, offer: dict[str, Any]) -> Remote:
        described = msgspec.convert(offer, NixlOffer)
        described.check()
        return Remote(self._agent, described)

    def copier(self, opened: Remote, pull: Pull) -> Copy:
        part = opened.offer.part(pull.request.part_start, pull.request.part_bytes)
        if part.num_layers != pull.pool.num_layers:
            raise ValueError(f"{part.num_layers} layers, {pull.pool.num_layers} here")
        return lambda readable: self._copy(readable, opened, part, pull)

    def _copy(self, readable: Readable, source: Remote, part: BlockAddresses, pull: Pull) -> Generator[int, None, None]:
        for piece in pieces(readable, pull.pool.block_bytes, PIECE_BYTES):
            yield self._move(piece, source, part, pull)

    def _move(self, piece: Readable, source: Remote, part: BlockAddresses, pull: Pull) -> int:
        """Read one piece into staging memory and copy it to its blocks; return its bytes."""
        theirs = part.of(piece.source_ids, piece.layers)
        room = self._staging.take(int(theirs[:, 1].sum()))
        try:
            read = self._agent.read(source.name, theirs, room.rows(theirs))
        except NixlFailed:
            self._staging.give_back(room)
            raise
        self._wait(read, room, pull)
        try:
            return _place(piece, room, pull.pool)
        finally:
            self._staging.give_back(room)

    def _wait(self, read: Read, room: Room, pull: Pull) -> None:
        """Return when the read has ended. If it fails, the room is given back; if it takes too long, abandoned."""
        stalled_at_s, pause_s = time.monotonic() + STALLED_S, _FIRST_PAUSE_S
        try:
            while not read.ended():
                now_s = time.monotonic()
                if now_s >= min(stalled_at_s, pull.give_up_at_s):
                    self._staging.abandon(room, read)
                    raise _late(pull, now_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except NixlFailed:
            self._staging.give_back(room)
            raise


def _late(pull: Pull, now_s: float) -> errors.TransferFailed:
    if now_s >= pull.give_up_at_s:
        return errors.TransferFailed(errors.TIMEOUT, f"a read from {pull.address} did not end in time")
    return errors.TransferFailed(errors.UNREACHABLE, f"{pull.address} sent nothing whole for {STALLED_S:g} s")


def _place(piece: Readable, room: Room, pool: BlockPool) -> int:
    """Copy a piece that has landed to its blocks; return its bytes."""
    shape = (len(piece.layers), len(piece.target_ids), pool.block_bytes)
    landed = room.memory[: math.prod(shape)]
    pool.scatter(piece.layers, piece.target_ids, landed.view(shape))
    return landed.nbytes
