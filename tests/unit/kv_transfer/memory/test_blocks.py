"""The byte view of a paged cache."""

import mmap
import resource

import numpy as np
import pytest
import torch

from ridgeline.kv_transfer.memory import host
from ridgeline.kv_transfer.memory.device import pool_of
from ridgeline.kv_transfer.memory.host import HostMemory


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def layers_in_one_storage(order: str, num_layers: int = 3, num_blocks: int = 5) -> list[torch.Tensor]:
    """bf16 layers [B, H, N, C] carved out of one storage, as the engine does."""
    heads, tokens, channels = 2, 4, 6
    storage = torch.randn(num_layers * num_blocks * heads * tokens * channels).to(torch.bfloat16)
    shapes = {
        "LBHNC": ((num_layers, num_blocks, heads, tokens, channels), (0, 1, 2, 3, 4)),
        "LBNHC": ((num_layers, num_blocks, tokens, heads, channels), (0, 1, 3, 2, 4)),
        "BLHNC": ((num_blocks, num_layers, heads, tokens, channels), (1, 0, 2, 3, 4)),
    }
    shape, permutation = shapes[order]
    return list(storage.view(shape).permute(permutation))


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_blocks_are_seen_in_place(order):
    layers = layers_in_one_storage(order)
    pool = pool_of(layers)
    assert (pool.num_layers, pool.num_blocks, pool.block_bytes) == (3, 5, 96)
    assert [bytes(view) for view in pool.read(1, [4, 0])] == [as_bytes(layers[1][4]), as_bytes(layers[1][0])]


def test_token_major_blocks_are_one_run_of_bytes():
    layers = layers_in_one_storage("LBNHC")
    (seen,) = pool_of(layers).read(2, [3])
    assert bytes(seen) == as_bytes(layers[2][3].permute(1, 0, 2))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_writing_reaches_the_engine_and_only_the_named_blocks(order):
    source, target = layers_in_one_storage(order), layers_in_one_storage(order)
    expected = [layer.clone() for layer in target]
    expected[1][[3, 0]] = source[1][[2, 4]]
    payload = b"".join(pool_of(source).read(1, [2, 4]))
    pool_of(target).write(1, [3, 0], memoryview(payload))
    assert all(torch.equal(seen, wanted) for seen, wanted in zip(target, expected, strict=True))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 6)[:, ::2], "not contiguous"),
        (torch.zeros(2, 4, 6).transpose(0, 1), "not contiguous"),
        (torch.zeros(4, 6).expand(2, 4, 6), "overlap"),
        (torch.zeros(4), "num_blocks"),
        (torch.zeros(4, 6, device="meta"), "host memory"),
    ],
)
def test_a_cache_it_cannot_view_is_refused(tensor, message):
    with pytest.raises(ValueError, match=message):
        pool_of([tensor])


def test_layers_must_agree():
    with pytest.raises(ValueError, match="same shape"):
        HostMemory([np.zeros((2, 8), np.uint8), np.zeros((2, 9), np.uint8)])
    with pytest.raises(ValueError, match="at least one"):
        HostMemory([])


@pytest.mark.parametrize("block_ids", [[-1], [5], [0, 99]])
def test_ids_outside_the_pool_are_refused(block_ids):
    pool = HostMemory([np.zeros((5, 8), np.uint8)])
    with pytest.raises(ValueError, match="outside the pool"):
        pool.read(0, block_ids)
    with pytest.raises(ValueError, match="outside the pool"):
        pool.write(0, block_ids, memoryview(bytes(8 * len(block_ids))))


def test_a_payload_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="do not fill"):
        HostMemory([np.zeros((5, 8), np.uint8)]).write(0, [1, 2], memoryview(bytes(15)))


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_committing_keeps_what_the_cache_holds(order):
    layers = layers_in_one_storage(order)
    before = [layer.clone() for layer in layers]
    pool_of(layers).commit()
    assert all(torch.equal(seen, was) for seen, was in zip(layers, before, strict=True))


def test_memory_between_layers_is_not_entered():
    whole = np.zeros((4, mmap.PAGESIZE), np.uint8)
    assert host._populated([whole[:2], whole[2:]])
    assert not host._populated([whole[:1], whole[2:]])


def minor_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


UNKNOWN_ADVICE = 999


@pytest.mark.parametrize("advice", [host.MADV_POPULATE_WRITE, UNKNOWN_ADVICE])
def test_after_committing_a_lazily_allocated_cache_writes_cause_no_page_faults(advice, monkeypatch):
    monkeypatch.setattr(host, "MADV_POPULATE_WRITE", advice)  # an older kernel knows none to enter pages at once
    pages = 2000
    with mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE) as memory:
        cache = np.frombuffer(memory, np.uint8)[123 : 123 + pages * mmap.PAGESIZE]  # blocks that begin within pages
        pool = HostMemory([cache.reshape(pages // 4, -1)])
        payload = memoryview(b"x" * cache.nbytes)
        before = minor_faults()
        pool.commit()
        committed = minor_faults()
        pool.write(0, range(pool.num_blocks), payload)
        written = minor_faults()
        del cache, pool
    assert committed - before >= pages
    assert written - committed < pages / 20
