"""The unit that streaming transports send: whole blocks of one layer, behind a fixed header with a checksum.

Only `write_frames` and `FrameReader` know the format. Blocks come in segments, as prefill makes them final: each
segment covers the positions after the last one's, layer by layer, positions ascending. So a frame that is lost,
duplicated or out of order is detected at once, and every claim of a header is checked before a byte is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from typing import Final

import xxhash

from ridgeline.contracts import errors
from ridgeline.contracts.handoff import WIRE_VERSION, KvLayout
from ridgeline.kv_transfer.interfaces import FetchProgress
from ridgeline.kv_transfer.memory.blocks import BlockPool

MAGIC: Final = 0x524B5631
_PREFIX: Final = struct.Struct("<IIIIIIQ")
"""Fields: magic, wire version, layer, first position, block count, position after the segment, payload bytes."""
_CHECKSUM: Final = struct.Struct("<Q")
"""Field: xxh3_64 of prefix and payload."""
HEADER_BYTES: Final = _PREFIX.size + _CHECKSUM.size
TARGET_FRAME_BYTES: Final = 2 << 20
"""Frame size aimed at: so large that per-frame work is negligible (measured), so small that many streams fit memory."""


def blocks_per_frame(block_bytes: int, num_blocks: int, target_bytes: int = TARGET_FRAME_BYTES) -> int:
    """Return the largest equal share of `num_blocks` that fits the target size, but at least one block."""
    most = max(1, target_bytes // block_bytes)
    frames = -(-num_blocks // most)
    return -(-num_blocks // frames)


def largest_frame_bytes(layout: KvLayout) -> int:
    """Return the frame size that a receiver must accept."""
    return HEADER_BYTES + max(TARGET_FRAME_BYTES, layout.block_bytes)


def write_frames(
    pool: BlockPool,
    block_ids: Sequence[int],
    position: int = 0,
    target_bytes: int = TARGET_FRAME_BYTES,
    wait_layer: Callable[[int], None] = lambda _: None,
) -> Generator[bytes]:
    """Yield the frames of one segment: all layers of these blocks, the first of which has this position.

    Each byte is copied once, when its frame is asked for. `wait_layer` is called before each layer and returns when
    that layer may be read.
    """
    if not block_ids:
        return
    step = blocks_per_frame(pool.block_bytes, len(block_ids), target_bytes)
    end = position + len(block_ids)
    for layer in range(pool.num_layers):
        wait_layer(layer)
        for first in range(0, len(block_ids), step):
            yield _frame(layer, position + first, end, pool.read(layer, block_ids[first : first + step]))


def payload_bytes(frame: bytes) -> int:
    """Return the KV bytes in a frame."""
    return len(frame) - HEADER_BYTES


def _frame(layer: int, first: int, end: int, blocks: Sequence[memoryview]) -> bytes:
    num_bytes = sum(block.nbytes for block in blocks)
    prefix = _PREFIX.pack(MAGIC, WIRE_VERSION, layer, first, len(blocks), end, num_bytes)
    checksum = xxhash.xxh3_64(prefix)
    for block in blocks:
        checksum.update(block)
    return b"".join((prefix, _CHECKSUM.pack(checksum.intdigest()), *blocks))


class FrameReader:
    """Writes the frames of one fetch into the target blocks; raises TransferFailed(`corrupted`) for unexpected ones."""

    def __init__(self, pool: BlockPool, target_block_ids: Sequence[int], progress: FetchProgress) -> None:
        self._pool = pool
        self._targets = target_block_ids
        self._progress = progress
        self._segment_start = 0
        self._segment_end = 0
        self._layer = 0
        self._next = 0

    def accept(self, frame: bytes) -> None:
        """Check one frame and write its blocks. Raises TransferFailed(`corrupted`)."""
        self._progress.first_byte()
        count, blocks = self._check(memoryview(frame))
        self._pool.write(self._layer, self._targets[self._next : self._next + count], blocks)
        self._progress.landed(blocks.nbytes)
        self._next += count
        if self._next == self._segment_end:
            self._layer += 1
            self._next = self._segment_start
            if self._segment_start or self._layer == self._pool.num_layers:
                self._progress.segment_ends()  # during a prefill, each layer may arrive as it is computed
            if self._layer == self._pool.num_layers:
                self._layer, self._next = 0, self._segment_end
                self._segment_start = self._segment_end

    def finish(self) -> None:
        """Check, at the end of the stream, that everything arrived. Raises TransferFailed(`corrupted`)."""
        if self._layer or self._next != len(self._targets):
            raise _corrupted(f"the stream ended at block {self._next} of {len(self._targets)}, layer {self._layer}")

    def _check(self, frame: memoryview) -> tuple[int, memoryview]:
        """Return (block count, payload). Nothing from the header is kept before the checksum has been verified."""
        if frame.nbytes < HEADER_BYTES:
            raise _corrupted(f"a frame of {frame.nbytes} bytes is shorter than its header")
        magic, version, layer, first, count, end, num_bytes = _PREFIX.unpack_from(frame)
        if (magic, version) != (MAGIC, WIRE_VERSION):
            raise _corrupted(f"not a frame of wire version {WIRE_VERSION}: magic {magic:#x}, version {version}")
        if (layer, first) != (self._layer, self._next):
            raise _corrupted(f"layer {layer} block {first} came where layer {self._layer} block {self._next} was due")
        begins = layer == 0 and first == self._segment_start
        if not first < end <= len(self._targets) or not (begins or end == self._segment_end):
            raise _corrupted(f"a segment ends at {end} of {len(self._targets)} blocks, {self._segment_end} was due")
        if not 1 <= count <= end - first:
            raise _corrupted(f"{count} blocks came where at most {end - first} were due")
        payload = frame[HEADER_BYTES:]
        if not num_bytes == payload.nbytes == count * self._pool.block_bytes:
            raise _corrupted(f"{payload.nbytes} bytes came for {count} blocks, the header says {num_bytes}")
        (checksum,) = _CHECKSUM.unpack_from(frame, _PREFIX.size)
        seen = xxhash.xxh3_64(frame[: _PREFIX.size])
        seen.update(payload)
        if seen.intdigest() != checksum:
            raise _corrupted(f"the checksum of layer {layer} block {first} is wrong")
        self._segment_end = end
        return count, payload


def _corrupted(message: str) -> errors.TransferFailed:
    return errors.TransferFailed(errors.CORRUPTED, message)
