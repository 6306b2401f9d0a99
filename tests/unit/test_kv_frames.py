"""Frame sizes and their balance; damage is covered by the conformance suite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import errors, frames
from kv_transfer.base import FetchProgress
from kv_transfer.blocks import BlockPool


@given(st.integers(1, 1 << 22), st.integers(1, 5000), st.integers(1, 1 << 21))
def test_frames_stay_within_the_target_unless_one_block_does_not(block_bytes, num_blocks, target_bytes):
    step = frames.blocks_per_frame(block_bytes, num_blocks, target_bytes)
    assert 1 <= step <= num_blocks
    assert step == 1 or step * block_bytes <= target_bytes


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 19), unique=True), st.integers(1, 200))
def test_what_is_written_is_read(num_layers, block_ids, target_bytes):
    random = np.random.default_rng(1)
    source = [random.integers(0, 256, (20, 16), dtype=np.uint8) for _ in range(num_layers)]
    target = [np.zeros((20, 16), np.uint8) for _ in range(num_layers)]
    progress = FetchProgress(started_s=0.0)
    reader = frames.FrameReader(BlockPool(target), block_ids[::-1], progress)
    for frame in frames.write_frames(BlockPool(source), block_ids, target_bytes):
        reader.accept(frame)
    if block_ids:
        reader.finish()
    assert progress.num_bytes == num_layers * len(block_ids) * 16
    for ours, theirs in zip(target, source, strict=True):
        np.testing.assert_array_equal(ours[block_ids[::-1]], theirs[block_ids])


def test_a_frame_after_the_last_is_refused():
    pool = BlockPool([np.zeros((2, 16), np.uint8)])
    reader = frames.FrameReader(pool, [0, 1], FetchProgress(started_s=0.0))
    (frame,) = frames.write_frames(pool, [0, 1])
    reader.accept(frame)
    with pytest.raises(errors.TransferFailed, match="due"):
        reader.accept(frame)
