"""The unit that streaming transports send: some whole blocks of one layer behind a fixed header with a checksum.

The source's `FrameWriter` and the target's `FrameReader` are the only two who know the format. Frames come in one fixed
order (layer by layer, positions ascending), so a frame that is lost, doubled or out of place is an error at once, and
everything a header claims is checked against what is expected before a byte is written.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Final

import xxhash

from kv_transfer import errors
from kv_transfer.base import FetchProgress
from kv_transfer.blocks import BlockPool
from kv_transfer.handoff import WIRE_VERSION, KvLayout

MAGIC: Final = 0x524B5631
_PREFIX: Final = struct.Struct("<IHxxIIIQ")
"""magic, wire version, layer, first position, block count, payload bytes."""
_CHECKSUM: Final = struct.Struct("<Q")
"""xxh3_64 of prefix and payload."""
HEADER_BYTES: Final = _PREFIX.size + _CHECKSUM.size
TARGET_FRAME_BYTES: Final = 2 << 20
"""Large enough that per-frame work disappears (measured), small enough to hold many streams in memory."""


def blocks_per_frame(block_bytes: int, num_blocks: int, target_bytes: int = TARGET_FRAME_BYTES) -> int:
    """The largest equal share of `num_blocks` that fits the target size; one block is sent whole whatever its size."""
    most = max(1, target_bytes // block_bytes)
    frames = -(-num_blocks // most)
    return -(-num_blocks // frames)


def largest_frame_bytes(layout: KvLayout) -> int:
    """What a receiver must be ready to accept."""
    return HEADER_BYTES + max(TARGET_FRAME_BYTES, layout.block_bytes)


def write_frames(pool: BlockPool, block_ids: Sequence[int], target_bytes: int = TARGET_FRAME_BYTES) -> Generator[bytes]:
    """All layers of these blocks; each byte is copied once, when its frame is asked for."""
    if not block_ids:
        return
    step = blocks_per_frame(pool.block_bytes, len(block_ids), target_bytes)
    for layer in range(pool.num_layers):
        for first in range(0, len(block_ids), step):
            yield _frame(layer, first, pool.read(layer, block_ids[first : first + step]))


def payload_bytes(frame: bytes) -> int:
    """How much of a frame is KV."""
    return len(frame) - HEADER_BYTES


def _frame(layer: int, first: int, blocks: Sequence[memoryview]) -> bytes:
    num_bytes = sum(block.nbytes for block in blocks)
    prefix = _PREFIX.pack(MAGIC, WIRE_VERSION, layer, first, len(blocks), num_bytes)
    checksum = xxhash.xxh3_64(prefix)
    for block in blocks:
        checksum.update(block)
    return b"".join((prefix, _CHECKSUM.pack(checksum.intdigest()), *blocks))


class FrameReader:
    """Writes the frames of one fetch into the target blocks; any surprise raises TransferFailed(`corrupted`)."""

    def __init__(self, pool: BlockPool, target_block_ids: Sequence[int], progress: FetchProgress) -> None:
        self._pool = pool
        self._targets = target_block_ids
        self._progress = progress
        self._layer = 0
        self._first = 0

    def accept(self, frame: bytes) -> None:
        """Check one frame and write it."""
        self._progress.first_byte()
        count, payload = self._check(memoryview(frame))
        self._pool.write(self._layer, self._targets[self._first : self._first + count], payload)
        self._progress.landed(payload.nbytes)
        self._first += count
        if self._first == len(self._targets):
            self._layer, self._first = self._layer + 1, 0

    def finish(self) -> None:
        """The stream has ended: everything must have come."""
        if self._layer != self._pool.num_layers:
            raise _corrupted(f"the stream ended at layer {self._layer} of {self._pool.num_layers}, block {self._first}")

    def _check(self, frame: memoryview) -> tuple[int, memoryview]:
        if frame.nbytes < HEADER_BYTES:
            raise _corrupted(f"a frame of {frame.nbytes} bytes is shorter than its header")
        magic, version, layer, first, count, num_bytes = _PREFIX.unpack_from(frame)
        if (magic, version) != (MAGIC, WIRE_VERSION):
            raise _corrupted(f"not a frame of wire version {WIRE_VERSION}: magic {magic:#x}, version {version}")
        if (layer, first) != (self._layer, self._first) or layer >= self._pool.num_layers:
            raise _corrupted(f"layer {layer} block {first} came where layer {self._layer} block {self._first} was due")
        if not 1 <= count <= len(self._targets) - first:
            raise _corrupted(f"{count} blocks came where at most {len(self._targets) - first} were due")
        payload = frame[HEADER_BYTES:]
        if not num_bytes == payload.nbytes == count * self._pool.block_bytes:
            raise _corrupted(f"{payload.nbytes} bytes came for {count} blocks, the header says {num_bytes}")
        (checksum,) = _CHECKSUM.unpack_from(frame, _PREFIX.size)
        seen = xxhash.xxh3_64(frame[: _PREFIX.size])
        seen.update(payload)
        if seen.intdigest() != checksum:
            raise _corrupted(f"the checksum of layer {layer} block {first} is wrong")
        return count, payload


def _corrupted(message: str) -> errors.TransferFailed:
    return errors.TransferFailed(errors.CORRUPTED, message)
