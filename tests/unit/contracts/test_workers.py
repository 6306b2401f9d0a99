"""What a worker says of itself."""

import pytest

from ridgeline.contracts.handoff import LayerGroup
from tests.support.samples import kv_layout, worker_description

STATE = LayerGroup(kind="state", block_size=544, state="float32")


@pytest.mark.parametrize(
    ("groups", "prefix_block_tokens", "most_blocks"),
    [
        pytest.param((), 32, 1000, id="every token"),
        pytest.param((), 0, 0, id="no prefix cache"),
        pytest.param((LayerGroup(kind="full", block_size=544), STATE, STATE, STATE), 544, 250, id="states"),
        pytest.param(
            (
                LayerGroup(kind="full", block_size=32),
                *[LayerGroup(kind="window", block_size=32, reach_tokens=128)] * 5,
            ),
            32,
            166,
            id="windows",
        ),
        pytest.param(
            (LayerGroup(kind="full", block_size=64), LayerGroup(kind="chunk", block_size=32, reach_tokens=128)),
            64,
            333,
            id="blocks of two sizes",
        ),
    ],
)
def test_a_prefix_cache_keeps_so_many_blocks(groups, prefix_block_tokens, most_blocks):
    layout = kv_layout(groups=groups, block_size=groups[0].block_size if groups else 32)
    worker = worker_description(layout=layout, num_kv_blocks=1000, prefix_block_tokens=prefix_block_tokens)
    assert worker.most_prefix_blocks == most_blocks
