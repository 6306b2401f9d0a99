"""Malformed transfer frames: valid streams in which frames are changed, cut, repeated, moved or forged.

A forged frame has a wrong header and a valid checksum. The reader may accept what means the same as the original, or
raise TransferFailed(corrupted). It must not raise anything else, write a byte outside the blocks it was given, or
allocate memory because a header claims it.
"""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash
from hypothesis import strategies as st

from ridgeline.contracts import errors
from ridgeline.kv_transfer.interfaces import FetchProgress
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.wire import frames

LAYERS, BLOCKS, BLOCK_BYTES = 2, 12, 128
CANARY = 0xA5
MOST_ALLOCATED_BYTES = 2 << 20
ONE_IN = 8
"""Allocations are traced in one of this many examples: tracing is slow, and each start keeps 0.7 KiB for good."""
FRAME_BYTES = 3 * BLOCK_BYTES
_HEADER = struct.Struct("<IIIIIIQ")
_HEADER_LIMITS = [2**32 - 1] * 6 + [2**64 - 1]
_DAMAGE = ("forge", "forge", "bend", "payload", "drop", "repeat", "swap", "cut", "junk", "other")
_ABSURD = [0, 1, 2, 3, 4, 6, 127, 128, 256, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]


@dataclass(frozen=True)
class Stream:
    """The input of a fetch: frames and the target blocks."""

    targets: tuple[int, ...]
    frames: tuple[bytes, ...]


def valid_frames(count: int, segments: int) -> list[bytes]:
    """Return an undamaged answer for `count` blocks, in this many segments."""
    random = np.random.default_rng(count)
    layers = [(random.standard_normal((BLOCKS, BLOCK_BYTES // 2)).astype(np.float32)) for _ in range(LAYERS)]
    pool = HostMemory([(layer.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8) for layer in layers])
    ids = list(range(count))
    sent: list[bytes] = []
    step = -(-count // segments)
    for first in range(0, count, step):
        written = frames.write_frames(pool, ids[first : first + step], first, FRAME_BYTES)
        sent += map(bytes, written)
    return sent


def sealed(frame: bytes) -> bytes:
    """Return the frame with a valid checksum."""
    prefix, payload = frame[: _HEADER.size], frame[frames.HEADER_BYTES :]
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + payload)) + payload


_VALID = {(count, segments): valid_frames(count, segments) for count in (1, 5) for segments in (1, 2)}


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Draw a valid answer with up to three kinds of damage."""
    count, segments = draw(st.sampled_from(sorted(_VALID)))
    sent = list(_VALID[count, segments])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(sent) - 1)) if sent else 0
        kind = draw(st.sampled_from(_DAMAGE))
        if kind == "junk" or not sent:
            sent.insert(at, draw(st.binary(max_size=80)))
        elif kind == "other":
            sent[at] = draw(st.sampled_from(_VALID[draw(st.sampled_from(sorted(_VALID)))]))
        elif kind == "drop":
            del sent[at]
        elif kind == "repeat":
            sent.insert(at, sent[at])
        elif kind == "swap":
            other = draw(st.integers(0, len(sent) - 1))
            sent[at], sent[other] = sent[other], sent[at]
        else:
            sent[at] = _damaged(draw, sent[at], kind)
    targets = draw(st.permutations(range(BLOCKS)))[:count]
    return Stream(tuple(targets), tuple(sent))


def _damaged(draw: st.DrawFn, frame: bytes, kind: str) -> bytes:
    if len(frame) < frames.HEADER_BYTES:
        return frame + draw(st.binary(max_size=8))
    if kind == "forge":
        fields = list(_HEADER.unpack_from(frame))
        for field in draw(st.lists(st.integers(0, len(fields) - 1), min_size=1, max_size=3)):
            value = draw(st.one_of(st.sampled_from(_ABSURD), st.integers(0, 2**64 - 1)))
            fields[field] = min(value, _HEADER_LIMITS[field])
        return sealed(_HEADER.pack(*fields) + frame[_HEADER.size :])
    if kind == "cut":
        cut = frame[: draw(st.integers(0, len(frame)))]
        return sealed(cut) if len(cut) >= frames.HEADER_BYTES and draw(st.booleans()) else cut
    first = frames.HEADER_BYTES if kind == "payload" else 0
    bent = bytearray(frame)
    for _ in range(draw(st.integers(1, 4))):
        bent[draw(st.integers(first, max(first, len(bent) - 1))) % len(bent)] ^= 1 << draw(st.integers(0, 7))
    return sealed(bytes(bent)) if draw(st.booleans()) else bytes(bent)


def check_stream(stream: Stream) -> None:
    """Feed the stream to a reader, then check the pool, its surroundings and the memory that was allocated."""
    memory = np.full((LAYERS, BLOCKS + 2, BLOCK_BYTES), CANARY, np.uint8)
    pool = HostMemory([memory[layer, 1:-1] for layer in range(LAYERS)])
    reader = frames.FrameReader(pool, stream.targets, FetchProgress(started_s=0.0))
    reason = errors.CORRUPTED
    try:
        with little_memory_taken(traced=zlib.crc32(b"".join(stream.frames)) % ONE_IN == 0):
            for frame in stream.frames:
                reader.accept(frame)
            reader.finish()
    except errors.TransferFailed as error:
        reason = error.reason
    assert reason == errors.CORRUPTED, f"refused as {reason}"
    untouched = [block + 1 for block in range(BLOCKS) if block not in stream.targets]
    assert (memory[:, [0, -1]] == CANARY).all(), "bytes beside the pool were written"
    assert (memory[:, untouched] == CANARY).all(), "blocks that were not asked for were written"


@contextmanager
def little_memory_taken(traced: bool) -> Iterator[None]:
    """Raise AssertionError if the block allocates more than `MOST_ALLOCATED_BYTES` at any time."""
    if not traced:
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < MOST_ALLOCATED_BYTES, f"{peak_bytes} bytes were allocated"
