"""Where blocks lie in a source's memory, and how reads of them are cut; nothing here needs NIXL."""

import msgspec
import numpy as np
import pytest
import torch

from ridgeline.decode_worker.kv_fetch.pinned import Readable, pieces
from ridgeline.kv_transfer.memory.blocks import CannotOpen
from ridgeline.kv_transfer.memory.device import pool_of
from ridgeline.kv_transfer.nixl.agent import merged
from ridgeline.kv_transfer.nixl.source import NixlOffer


def offer(**changes):
    fields = {"num_blocks": 8, "block_bytes": 10, "layer_addresses": (1000, 2000), "layer_strides_bytes": (10, 16)}
    return NixlOffer(metadata=b"", device_index=0, **fields | changes)


def test_neighbours_are_read_as_one_where_nothing_lies_between_them():
    rows = offer().part(0, 10).of([2, 3, 4, 7, 0], range(2))
    assert rows.tolist() == [
        *[[1020, 30, 0], [1070, 10, 0], [1000, 10, 0]],
        *[[2032, 10, 0], [2048, 10, 0], [2064, 10, 0], [2112, 10, 0], [2000, 10, 0]],
    ]


def test_a_part_of_each_block_is_read_by_itself():
    assert offer().part(4, 3).of([2, 3], range(1)).tolist() == [[1024, 3, 0], [1034, 3, 0]]


@pytest.mark.parametrize("block_ids", [[8], [-1], [0, 99]])
def test_blocks_that_a_source_does_not_have_are_refused(block_ids):
    with pytest.raises(ValueError, match="of a source of 8"):
        offer().part(0, 10).of(block_ids, range(1))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"num_blocks": 1 << 40},
        {"layer_addresses": (), "layer_strides_bytes": ()},
        {"layer_strides_bytes": (10,)},
        {"layer_addresses": (-1, 5)},
        {"layer_addresses": (1 << 63, 5)},
        {"layer_strides_bytes": (9, 10)},
        {"layer_strides_bytes": (10, 1 << 50)},
        {"device_index": -1},
    ],
)
def test_an_offer_of_no_cache_is_refused(changes):
    with pytest.raises((CannotOpen, msgspec.ValidationError)):
        msgspec.convert({**msgspec.structs.asdict(offer()), **changes}, NixlOffer).check()


def test_an_offer_of_a_cache_is_accepted():
    msgspec.convert(msgspec.structs.asdict(offer()), NixlOffer).check()


@pytest.mark.parametrize(("start", "num_bytes"), [(-1, 3), (0, 11), (8, 3), (0, 0)])
def test_a_part_outside_a_block_is_refused(start, num_bytes):
    with pytest.raises(ValueError, match="not inside a block"):
        offer().part(start, num_bytes)


@pytest.mark.parametrize("most_bytes", [1, 10, 25, 60, 1000])
def test_pieces_cover_every_block_of_every_layer_once_and_fit(most_bytes):
    readable = Readable([5, 6, 7], [0, 2, 4], range(1, 6), 0)
    cut = list(pieces(readable, 10, most_bytes))
    seen = [(layer, s, t) for piece in cut for layer in piece.layers for s, t in zip(*_ids(piece), strict=True)]
    assert sorted(seen) == [(layer, s, t) for layer in range(1, 6) for s, t in ((5, 0), (6, 2), (7, 4))]
    assert all(len(piece.layers) * len(piece.source_ids) * 10 <= max(10, most_bytes) for piece in cut)


def _ids(piece):
    return piece.source_ids, piece.target_ids


def test_memory_is_registered_once_where_layers_overlap():
    assert merged([(100, 50), (0, 50), (140, 30), (110, 5), (50, 10)]) == [(0, 50), (50, 10), (100, 70)]


def test_a_pool_of_interleaved_layers_says_where_each_block_lies():
    buffer = torch.arange(240, dtype=torch.uint8).view(4, 2, 30)  # 4 blocks, each with 2 layers
    pool = pool_of([buffer[:, 0], buffer[:, 1]])
    spans = pool.spans()
    assert [span.address - buffer.data_ptr() for span in spans] == [0, 30]
    assert {(span.stride_bytes, span.num_bytes) for span in spans} == {(60, 210)}
    np.testing.assert_array_equal(pool.read(1, [0])[0], buffer[0, 1].numpy())
