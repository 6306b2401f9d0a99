"""What is copied of a pin, and of one whose source says in another order than it should which layers are final."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ridgeline.contracts import errors
from ridgeline.decode_worker.kv_fetch.pinned import PinnedRead, Readable
from ridgeline.kv_transfer.interfaces import FetchProgress
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.wire.grpc_methods import PinnedBlocks

NUM_LAYERS = 3
TARGETS = (5, 2)


def a_pool(first: int) -> BlockPool:
    return HostMemory([np.full((8, 32), first + layer, np.uint8) for layer in range(NUM_LAYERS)])


def copied(
    *told: dict[str, Any],
    raise_if_cancelled: Callable[[], None] = lambda: None,
    ended: Callable[[], None] = lambda: None,
) -> tuple[BlockPool, FetchProgress]:
    """Copy what these messages say into two blocks; `ended` is called when a copy is over, however it ends."""
    source, target, progress = a_pool(0), a_pool(100), FetchProgress(0.0)

    def copy(readable: Readable) -> Generator[int, None, None]:
        try:
            yield from target.copies_from(source, readable.source_ids, readable.target_ids, readable.layers)
        finally:
            ended()

    pull: Any = SimpleNamespace(
        address="h:1",
        source=SimpleNamespace(incarnation="i"),
        target_block_ids=TARGETS,
        pool=target,
        progress=progress,
        lease_s=30.0,
    )
    messages = [PinnedBlocks(**{"incarnation": "i", "block_ids": [1, 2], "complete": False, **each}) for each in told]
    PinnedRead(pull, copy, raise_if_cancelled).consume(map(msgspec.msgpack.encode, messages))
    return target, progress


END = {"block_ids": [], "complete": True, "first_token": 7}
LAYERS = [{"final_layers": layer} for layer in (1, 2, 3)]


@pytest.mark.parametrize("told", [LAYERS, [LAYERS[0], LAYERS[2]], [{}], [{"block_ids": [1]}, {"block_ids": [2]}]])
def test_every_layer_of_every_block_is_copied_once(told):
    target, progress = copied(*told, END)
    for layer in range(NUM_LAYERS):
        assert [bytes(view) for view in target.read(layer, TARGETS)] == [bytes([layer] * 32)] * 2
        assert bytes(target.read(layer, [3])[0]) == bytes([100 + layer] * 32)
    assert (progress.num_bytes, progress.first_token) == (2 * NUM_LAYERS * 32, 7)


@pytest.mark.parametrize(
    "told",
    [
        [LAYERS[1], LAYERS[0]],
        [LAYERS[0], LAYERS[0]],
        [{"final_layers": NUM_LAYERS + 1}],
        [{"final_layers": 0}],
        [{"final_layers": -1}],
        [LAYERS[0], {"final_layers": 2, "block_ids": [1, 3]}],
        [LAYERS[0], END],
        [LAYERS[0], {"final_layers": 3, "block_ids": [1]}],
        [*LAYERS, LAYERS[0]],
        [LAYERS[0], {"final_layers": None, "block_ids": []}],
    ],
)
def test_layers_in_another_order_fail_the_copy(told):
    with pytest.raises(errors.TransferFailed) as failed:
        copied(*told, END)
    assert failed.value.reason == errors.CORRUPTED


def test_a_cancelled_copy_is_over_before_the_read_ends():
    ended = []

    def cancelled() -> None:
        assert not ended
        raise errors.TransferCancelled(errors.CANCELLED, "")

    with pytest.raises(errors.TransferCancelled):
        copied({}, END, raise_if_cancelled=cancelled, ended=lambda: ended.append(True))
    assert ended == [True]


def test_another_process_behind_the_address_is_another_pairing():
    with pytest.raises(errors.TransferFailed) as failed:
        copied({"incarnation": "another"}, END)
    assert failed.value.reason == errors.STALE_PAIRING
