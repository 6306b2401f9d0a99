"""What a hostile source of KV may send: transfer frames.

Valid frames are changed, cut, repeated, moved or forged; a forged one has a wrong header and a valid checksum. The
reader may accept what means the same as the original, or raise TransferFailed(corrupted). It must not raise anything
else, write a byte outside the blocks it was given, or allocate memory because a header claims it.
"""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import xxhash
from hypothesis import strategies as st

from ridgeline.contracts import errors
from ridgeline.kv_transfer.interfaces import FetchProgress
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.wire import frames
from tools.fuzz.damage import bent

LAYERS, BLOCKS, BLOCK_BYTES = 2, 12, 128
CANARY = 0xA5
MOST_ALLOCATED_BYTES = 2 << 20
ONE_IN = 8
"""Allocations are traced in one of this many examples: tracing is slow, and each start keeps 0.7 KiB for good."""
FRAME_BYTES = 3 * BLOCK_BYTES
_HEADER = struct.Struct("<IIIIIIQ")
_HEADER_LIMITS = [2**32 - 1] * 6 + [2**64 - 1]
_ABSURD = [0, 1, 2, 3, 4, 6, 127, 128, 256, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]

Stream = tuple[list[int], list[bytes]]
"""The input of a fetch: the target blocks, and frames."""


def _valid_frames(count: int, segments: int) -> list[bytes]:
    """Return an undamaged answer for `count` blocks, in this many segments."""
    random = np.random.default_rng(count)
    pool = HostMemory([random.integers(0, 256, (BLOCKS, BLOCK_BYTES), np.uint8) for _ in range(LAYERS)])
    ids, step = list(range(count)), -(-count // segments)
    parts = (frames.write_frames(pool, ids[at : at + step], at, FRAME_BYTES) for at in range(0, count, step))
    return [bytes(frame) for part in parts for frame in part]


_VALID = {(count, segments): _valid_frames(count, segments) for count in (1, 5) for segments in (1, 2)}
_any_frame = st.sampled_from([frame for sent in _VALID.values() for frame in sent])


def _sealed(frame: bytes) -> bytes:
    """Return the frame with a valid checksum."""
    prefix, payload = frame[: _HEADER.size], frame[frames.HEADER_BYTES :]
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + payload)) + payload


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    """Draw a valid answer in which up to three frames are damaged, left out, repeated, moved or of another answer."""
    count, segments = draw(st.sampled_from(sorted(_VALID)))
    sent = list(_VALID[count, segments])
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(sent)))
        old = sent[at : at + 1]
        one = st.one_of(_any_frame, st.binary(max_size=80), st.sampled_from(sent or [b""]))
        is_damaged = bool(old) and draw(st.booleans())
        sent[at : at + 1] = [draw(_damaged(old[0]))] if is_damaged else draw(st.lists(one, max_size=2))
    return draw(st.permutations(range(BLOCKS)))[:count], sent


@st.composite
def _damaged(draw: st.DrawFn, frame: bytes) -> bytes:
    if len(frame) < frames.HEADER_BYTES:
        return frame + draw(st.binary(max_size=8))
    if draw(st.booleans()):
        fields = list(_HEADER.unpack_from(frame))
        for field in draw(st.lists(st.integers(0, len(fields) - 1), min_size=1, max_size=3)):
            value = draw(st.one_of(st.sampled_from(_ABSURD), st.integers(0, 2**64 - 1)))
            fields[field] = min(value, _HEADER_LIMITS[field])
        return _sealed(_HEADER.pack(*fields) + frame[_HEADER.size :])
    other = draw(bent(frame, []))
    return _sealed(other) if len(other) >= frames.HEADER_BYTES and draw(st.booleans()) else other


def check_stream(stream: Stream) -> None:
    """Feed the stream to a reader, then check the pool, its surroundings and the memory that was allocated."""
    targets, sent = stream
    memory = np.full((LAYERS, BLOCKS + 2, BLOCK_BYTES), CANARY, np.uint8)
    reader = frames.FrameReader(
        HostMemory([memory[layer, 1:-1] for layer in range(LAYERS)]), targets, FetchProgress(started_s=0.0)
    )
    with _only_corrupted(), _little_memory_taken(traced=zlib.crc32(b"".join(sent)) % ONE_IN == 0):
        for frame in sent:
            reader.accept(frame)
        reader.finish()
    untouched = [block + 1 for block in range(BLOCKS) if block not in targets]
    assert (memory[:, [0, -1]] == CANARY).all(), "bytes beside the pool were written"
    assert (memory[:, untouched] == CANARY).all(), "blocks that were not asked for were written"


@contextmanager
def _only_corrupted() -> Iterator[None]:
    """Let the block end or fail as corrupted; raise AssertionError if it fails for another reason."""
    reason = errors.CORRUPTED
    try:
        yield
    except errors.TransferFailed as error:
        reason = error.reason
    assert reason == errors.CORRUPTED, f"refused as {reason}"


@contextmanager
def _little_memory_taken(traced: bool) -> Iterator[None]:
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
