"""The pool for GPU memory, run on tensors in host memory: all of it but the streams. See also `tests/gpu`."""

import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kv_transfer.memory.blocks import byte_rows
from ridgeline.kv_transfer.memory.device import LOOK_S, STREAMS, DeviceMemory, Mark, Streams, pool_of, works
from tests.support.patience import PATIENCE_S

NUM_LAYERS, NUM_BLOCKS, HEADS, TOKENS, CHANNELS = 3, 9, 2, 4, 6
LAYOUTS = {
    "LBHNC": ((NUM_LAYERS, NUM_BLOCKS, HEADS, TOKENS, CHANNELS), (0, 1, 2, 3, 4)),
    "LBNHC": ((NUM_LAYERS, NUM_BLOCKS, TOKENS, HEADS, CHANNELS), (0, 1, 3, 2, 4)),
    "BLHNC": ((NUM_BLOCKS, NUM_LAYERS, HEADS, TOKENS, CHANNELS), (1, 0, 2, 3, 4)),
}


def make_layers(order, margin=5, seed=0):
    """The whole storage as int16, and bf16 layers in it, behind a margin; any bits, NaNs among them."""
    shape, permutation = LAYOUTS[order]
    generator = torch.Generator().manual_seed(seed)
    storage = torch.randint(-(1 << 15), 1 << 15, (prod(shape) + 2 * margin,), dtype=torch.int16, generator=generator)
    return storage, list(storage[margin:-margin].view(torch.bfloat16).view(shape).permute(permutation))


def device_pool(layers):
    return DeviceMemory([byte_rows(index, layer) for index, layer in enumerate(layers)])


block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, min_size=1)


@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, NUM_LAYERS - 1), block_lists, st.randoms())
def test_it_reads_and_writes_as_the_host_pool_does_and_touches_nothing_else(order, layer, source_ids, random):
    target_ids = random.sample(range(NUM_BLOCKS), len(source_ids))
    _, source = make_layers(order, seed=1)
    storage, target = make_layers(order, seed=2)
    expected_storage, expected = make_layers(order, seed=2)
    payload = b"".join(device_pool(source).read(layer, source_ids))
    assert payload == b"".join(pool_of(source).read(layer, source_ids))
    device_pool(target).write(layer, target_ids, memoryview(payload))
    expected[layer].view(torch.int16)[target_ids] = source[layer].view(torch.int16)[source_ids]
    assert torch.equal(storage, expected_storage)


def test_buffers_are_reused_after_a_larger_read():
    _, layers = make_layers("LBHNC")
    pool = device_pool(layers)
    for block_ids in ([2], [8, 0, 5, 1], [4], [6, 3]):
        assert b"".join(pool.read(1, block_ids)) == b"".join(pool_of(layers).read(1, block_ids))


def test_each_thread_has_buffers_of_its_own():
    _, layers = make_layers("LBHNC")
    pool = device_pool(layers)
    both_have_read = threading.Barrier(2, timeout=PATIENCE_S)

    def read(block_id):
        views = pool.read(0, [block_id])
        both_have_read.wait()
        return b"".join(views)

    with ThreadPoolExecutor(2) as threads:
        seen = list(threads.map(read, [3, 7]))
    assert seen == [b"".join(pool_of(layers).read(0, [block_id])) for block_id in (3, 7)]


def test_a_cache_allocated_in_inference_mode_is_written_from_another_thread():
    with torch.inference_mode():
        storage, layers = make_layers("BLHNC")
        pool = device_pool(layers)
    payload = b"".join(pool.read(2, [1]))
    with ThreadPoolExecutor(1) as threads:
        threads.submit(pool.write, 2, [4], memoryview(payload)).result()
    assert torch.equal(layers[2][4].view(torch.int16), layers[2][1].view(torch.int16))
    assert torch.equal(storage[:5], make_layers("BLHNC")[0][:5])


def test_layers_on_several_devices_are_refused():
    with pytest.raises(ValueError, match="one device"):
        DeviceMemory([torch.zeros((2, 8), dtype=torch.uint8), torch.zeros((2, 8), dtype=torch.uint8, device="meta")])


def test_committing_changes_nothing():
    storage, layers = make_layers("LBNHC")
    device_pool(layers).commit()
    assert torch.equal(storage, make_layers("LBNHC")[0])


@given(st.integers(0, 2), st.sampled_from([16, 24, 20]), st.sampled_from([0, 8, 4]), st.randoms())
def test_rows_are_the_same_whether_copied_in_words_or_in_bytes(margin, block_bytes, gap, random):
    """Aligned ones go in words of eight bytes; any odd start, size or distance of blocks goes in single ones."""
    stride = block_bytes + gap
    storage = torch.randint(0, 256, (margin * 4 + NUM_BLOCKS * stride,), dtype=torch.uint8)
    rows = storage[margin * 4 :].as_strided((NUM_BLOCKS, block_bytes), (stride, 1), margin * 4)
    ids = random.sample(range(NUM_BLOCKS), 4)
    memory = DeviceMemory([rows])
    into = memory.gather(range(1), ids)[0]
    assert torch.equal(into, rows[ids])
    before, expected = storage.clone(), storage.clone()
    view = expected.as_strided((NUM_BLOCKS, block_bytes), (stride, 1), margin * 4)
    view[ids] = 255 - into
    memory.scatter(range(1), ids, 255 - into[None])
    assert torch.equal(storage, expected)
    assert not torch.equal(storage, before)


def test_however_many_threads_copy_there_are_a_few_streams_and_they_have_high_priority():
    made: list[tuple[torch.device, int]] = []

    def make(device, priority):
        made.append((device, priority))
        return len(made)

    streams = Streams(torch.device("cuda", 3), make)
    with ThreadPoolExecutor(44) as threads:
        taken = list(threads.map(lambda _: streams.take(), range(44)))
    assert made == [(torch.device("cuda", 3), -1)] * STREAMS
    assert {taken.count(stream) for stream in range(1, STREAMS + 1)} == {44 // STREAMS}


def test_memory_of_the_host_has_no_streams():
    assert Streams(torch.device("cpu")).take() is None


class Event:
    """Of a stream that reaches it after so many looks."""

    def __init__(self, looks):
        self.looks, self.slept = looks, False

    def query(self):
        self.looks -= 1
        return self.looks < 0

    def synchronize(self):
        self.slept = True


@pytest.mark.parametrize(("looks", "sleeps"), [(0, False), (2, False), (1 << 40, True)])
def test_a_thread_sleeps_unless_its_copies_end_at_once(looks, sleeps, monkeypatch):
    clock = iter(number * LOOK_S / 4 for number in range(100))
    monkeypatch.setattr("ridgeline.kv_transfer.memory.device.time.perf_counter", lambda: next(clock))
    mark = Mark(None)
    mark._event = Event(looks)
    mark.wait()
    assert mark._event.slept == sleeps
    assert next(clock) <= 2 * LOOK_S


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("doing", ["gather", "scatter", "read", "write", "copies_from"])
def test_an_error_by_which_the_gpu_is_lost_is_reported_wherever_it_comes(doing, lost, monkeypatch):
    told = []
    layers = [byte_rows(index, layer) for index, layer in enumerate(make_layers("LBHNC")[1])]
    memory = DeviceMemory(layers, on_lost=told.append)
    pool = memory.part(0, 8)
    blocks = pool.gather(range(1), [1, 2])
    error = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("ridgeline.kv_transfer.memory.rows._IndexedCopy.queue", fail)
    monkeypatch.setattr("ridgeline.kv_transfer.memory.device.works", lambda _device: not lost)
    work = {
        "gather": lambda: pool.gather(range(1), [1]),
        "scatter": lambda: pool.scatter(range(1), [1, 2], blocks),
        "read": lambda: pool.read(0, [1]),
        "write": lambda: pool.write(0, [1], memoryview(bytes(8))),
        "copies_from": lambda: list(pool.copies_from(pool, [1], [2])),
    }
    with pytest.raises(RuntimeError, match="illegal"):
        work[doing]()
    assert set(told) == ({error} if lost else set())


def test_host_memory_is_never_lost():
    assert works(torch.device("cpu"))


# --- from one pool to another


@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from(sorted(LAYOUTS)), block_lists, st.randoms(), st.data())
def test_blocks_of_another_pool_are_copied_as_the_host_pool_does(from_order, to_order, source_ids, random, data):
    first = data.draw(st.integers(0, NUM_LAYERS - 1))
    layers = range(first, data.draw(st.integers(first + 1, NUM_LAYERS)))
    target_ids = random.sample(range(NUM_BLOCKS), len(source_ids))
    _, source = make_layers(from_order, seed=1)
    storage, target = make_layers(to_order, seed=2)
    expected_storage, expected = make_layers(to_order, seed=2)
    copied = sum(device_pool(target).copies_from(device_pool(source), source_ids, target_ids, layers))
    pool = pool_of(expected)
    assert copied == sum(pool.copies_from(pool_of(source), source_ids, target_ids, layers))
    assert torch.equal(storage, expected_storage)


def test_parts_of_blocks_are_copied_and_the_rest_of_each_stays():
    _, source = make_layers("LBHNC", seed=1)
    _, target = make_layers("LBHNC", seed=2)
    before = [layer.clone() for layer in target]
    half = device_pool(target).block_bytes // 2
    sum(device_pool(target).part(half, half).copies_from(device_pool(source).part(0, half), [3, 4], [7, 1]))
    for ours, theirs, earlier in zip(target, source, before, strict=True):
        assert torch.equal(ours[[7, 1], 1].view(torch.int16), theirs[[3, 4], 0].view(torch.int16))
        assert torch.equal(ours[:, 0].view(torch.int16), earlier[:, 0].view(torch.int16))


@pytest.mark.parametrize("apart", [False, True])
def test_blocks_are_copied_within_one_pool(apart):
    _, layers = make_layers("LBHNC", seed=1)
    layers = [layer.clone() for layer in layers] if apart else layers
    expected = [layer.view(torch.int16).clone() for layer in layers]
    pool = device_pool(layers)
    sum(pool.copies_from(pool, [1, 2, 3], [6, 5, 4]))
    sum(pool.copies_from(device_pool(layers), [7, 8], [7, 8]))
    for layer, before in zip(layers, expected, strict=True):
        before[[6, 5, 4]] = before[[1, 2, 3]]
        assert torch.equal(layer.view(torch.int16), before)


@pytest.fixture
def marks(monkeypatch):
    """The marks on the stream, as they are made and waited for: ("made" or "waited", number)."""
    seen = []

    class Mark:
        def __init__(self, _stream):
            self._number = sum(kind == "made" for kind, _ in seen)
            seen.append(("made", self._number))

        def wait(self):
            seen.append(("waited", self._number))

    monkeypatch.setattr("ridgeline.kv_transfer.memory.device.Mark", Mark)
    return seen


def test_a_piece_is_reported_when_it_has_arrived_and_the_next_is_queued_by_then(marks, monkeypatch):
    _, source = make_layers("LBHNC", seed=1)
    _, target = make_layers("LBHNC", seed=2)
    to = device_pool(target)
    monkeypatch.setattr("ridgeline.kv_transfer.memory.rows._IndexedCopy.piece_bytes", 2 * NUM_LAYERS * to.block_bytes)
    pieces = to.copies_from(device_pool(source), [0, 1, 5, 3, 8], [8, 2, 4, 6, 7])
    assert next(pieces) == 2 * NUM_LAYERS * to.block_bytes
    assert marks == [("made", 0), ("made", 1), ("waited", 0)]
    assert list(pieces) == [2 * NUM_LAYERS * to.block_bytes, NUM_LAYERS * to.block_bytes]
    assert [number for kind, number in marks if kind == "waited"] == [0, 1, 2, 3], "the last is the end's"


def test_a_copy_that_is_given_up_has_ended_on_the_device_when_it_is_closed(marks, monkeypatch):
    _, source = make_layers("LBHNC", seed=1)
    _, target = make_layers("LBHNC", seed=2)
    monkeypatch.setattr("ridgeline.kv_transfer.memory.rows._IndexedCopy.piece_bytes", 1)
    pieces = device_pool(target).copies_from(device_pool(source), [0, 1, 5], [8, 2, 4])
    next(pieces)
    pieces.close()
    assert marks[-2:] == [("made", 2), ("waited", 2)], "a mark behind all that was queued, and no more was"
    assert not torch.is_inference_mode_enabled()


def test_a_thread_is_in_inference_mode_only_while_it_launches():
    _, layers = make_layers("LBHNC")
    for _ in device_pool(layers).copies_from(device_pool(make_layers("LBHNC", seed=1)[1]), [0], [1]):
        assert not torch.is_inference_mode_enabled()
