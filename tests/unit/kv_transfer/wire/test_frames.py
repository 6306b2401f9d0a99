"""Frame sizes and their balance; damage is covered by the conformance suite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.contracts import errors
from ridgeline.kv_transfer.interfaces import FetchProgress
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.wire import frames


@given(st.integers(1, 1 << 22), st.integers(1, 5000), st.integers(1, 1 << 21))
def test_frames_stay_within_the_target_unless_one_block_does_not(block_bytes, num_blocks, target_bytes):
    step = frames.blocks_per_frame(block_bytes, num_blocks, target_bytes)
    assert 1 <= step <= num_blocks
    assert step == 1 or step * block_bytes <= target_bytes


@settings(max_examples=40)
@given(st.integers(1, 4), st.lists(st.integers(0, 19), unique=True), st.integers(1, 200))
def test_what_is_written_is_read(num_layers, block_ids, target_bytes):
    random = np.random.default_rng(1)
    source = [random.integers(0, 256, (20, 16), dtype=np.uint8) for _ in range(num_layers)]
    target = [np.zeros((20, 16), np.uint8) for _ in range(num_layers)]
    progress = FetchProgress(started_s=0.0)
    reader = frames.FrameReader(HostMemory(target), block_ids[::-1], progress)
    for frame in frames.write_frames(HostMemory(source), block_ids, 0, target_bytes):
        reader.accept(frame)
    if block_ids:
        reader.finish()
    assert progress.num_bytes == num_layers * len(block_ids) * 16
    for ours, theirs in zip(target, source, strict=True):
        np.testing.assert_array_equal(ours[block_ids[::-1]], theirs[block_ids])


def test_a_frame_after_the_last_is_refused():
    pool = HostMemory([np.zeros((2, 16), np.uint8)])
    reader = frames.FrameReader(pool, [0, 1], FetchProgress(started_s=0.0))
    (frame,) = frames.write_frames(pool, [0, 1])
    reader.accept(frame)
    with pytest.raises(errors.TransferFailed, match="due"):
        reader.accept(frame)


def test_segments_arrive_in_the_order_prefill_makes_them_final():
    random = np.random.default_rng(1)
    source = [random.integers(0, 256, (20, 16), dtype=np.uint8) for _ in range(3)]
    target = [np.zeros((20, 16), np.uint8) for _ in range(3)]
    ids = [5, 9, 1, 2, 3, 0, 17]
    reader = frames.FrameReader(HostMemory(target), range(7), FetchProgress(started_s=0.0))
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        for frame in frames.write_frames(HostMemory(source), ids[start:stop], start, target_bytes=40):
            reader.accept(frame)
    reader.finish()
    for ours, theirs in zip(target, source, strict=True):
        np.testing.assert_array_equal(ours[:7], theirs[ids])


@pytest.mark.parametrize("skipped", range(8))
def test_a_stream_of_segments_with_a_frame_missing_is_refused(skipped):
    pool = HostMemory([np.zeros((8, 16), np.uint8) for _ in range(2)])
    reader = frames.FrameReader(pool, range(8), FetchProgress(started_s=0.0))
    stream = [*frames.write_frames(pool, range(4), 0, 32), *frames.write_frames(pool, range(4, 8), 4, 32)]
    assert len(stream) == 8
    del stream[skipped]

    def read_all():
        for frame in stream:
            reader.accept(frame)
        reader.finish()

    with pytest.raises(errors.TransferFailed, match=r"due|ended"):
        read_all()
