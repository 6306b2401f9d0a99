"""What a worker says of itself."""

import pytest

from ridgeline.contracts.handoff import LayerGroup
from ridgeline.contracts.workers import StepModel
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


@pytest.mark.parametrize(
    "corrections",
    [(1.0, 1.23, 1.49, 1.19, 0.45), (1.0, 1.0, 1.7, 1.15, 0.44, 1.0, 1.45, 1.0, 1.0, 1.0, 1.16), (1.0, 1.0), ()],
)
def test_in_order_no_batch_decodes_faster_than_half_of_it(corrections):
    """The first two were fitted on a machine that others used."""
    model = StepModel(
        base_s=0.051,
        per_prefill_token_s=0.001,
        per_sequence_s=0.0457,
        per_context_token_s=3e-6,
        per_attended_token_s=0.0,
        corrections=corrections,
        most_decode_tokens=8,
    ).in_order()
    times_s = [model.decode_s(1.5 * 2**bits, 0) for bits in range(4)]
    assert times_s == sorted(times_s)
    assert len(model.corrections) == len(corrections)
    assert model.corrections[5:] == corrections[5:]
    assert model.in_order().corrections == pytest.approx(model.corrections)
