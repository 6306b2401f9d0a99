"""The kernel that copies blocks on GPUs: by Triton's interpreter, bit for bit as torch does; and what is compiled."""

import importlib.util
import logging
from math import gcd

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.kv_transfer.memory import rows
from ridgeline.kv_transfer.memory.blocks import byte_rows
from ridgeline.kv_transfer.memory.device import DeviceMemory
from tests.support.interpreted_triton import interpreted_kernel
from tools.gpu.blocks import SHAPES, CacheShape, make_layers
from tools.gpu.machine import Machine

HOST = Machine(torch.device("cpu"), dry=True)
NUM_BLOCKS = 6
pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
    with interpreted_kernel():
        yield


def pools(layers):
    """Two pools of the same layers: one that uses the kernel, one that uses torch's functions."""
    made = [byte_rows(index, layer) for index, layer in enumerate(layers)]
    return DeviceMemory(made), DeviceMemory(made, may_use_kernel=False)


@pytest.fixture
def launches(monkeypatch):
    """The launches of the kernel: its unit, and rows x layers."""
    seen = []
    found = rows.kernel_for

    def kernel_for(device, unit):
        launch = found(device, unit)
        assert launch is not None

        def noted(table, shape, *rest):
            seen.append((unit, shape))
            launch(table, shape, *rest)

        return noted

    monkeypatch.setattr(rows, "kernel_for", kernel_for)
    return seen


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_blocks_of_real_shapes_are_gathered_scattered_and_copied_as_by_torch_in_one_launch_each(shape, launches):
    small = CacheShape(shape.name, 2, shape.heads, shape.tokens, shape.content, shape.dtype)
    source, target = (make_layers(HOST, small, NUM_BLOCKS) for _ in range(2))
    again = [layer.clone() for layer in target]
    ours, theirs = pools(source)
    to, expected_to = pools(target)[0], pools(again)[1]
    ids, places = [4, 0, 5], [1, 2, 3]
    blocks = ours.gather(ours.layers, ids)
    assert torch.equal(blocks, theirs.gather(theirs.layers, ids))
    assert b"".join(ours.read(1, ids)) == b"".join(theirs.read(1, ids))
    payload = memoryview(b"".join(ours.read(1, [2])))
    for pool in (to, expected_to):
        pool.write(1, [0], payload)
        pool.scatter(range(1), places, blocks[:1])
    assert sum(to.copies_from(ours, [3, 5], [5, 4])) == sum(expected_to.copies_from(theirs, [3, 5], [5, 4]))
    for here, there in zip(target, again, strict=True):
        assert torch.equal(here.view(torch.uint8), there.view(torch.uint8))
    unit = gcd(16, small.block_bytes)
    assert launches == [(unit, s) for s in [(3, 2), (3, 1), (1, 1), (1, 1), (3, 1), (2, 2)]]


@settings(max_examples=25)  # each interprets a few launches
@given(
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 3),
    st.lists(st.integers(0, 8), unique=True, min_size=1),
    st.randoms(),
)
def test_rows_of_any_size_and_distance_are_copied_and_nothing_else_is_touched(unit, size, gap, num_layers, ids, random):
    """Layers apart from each other or evenly spaced, with a margin that makes addresses multiples of the unit only."""
    row_bytes, stride = size * unit, (size + gap) * unit
    distance = 9 * stride + random.randint(0, 2) * unit
    storage, again, theirs = (
        torch.frombuffer(bytearray(random.randbytes(64 + num_layers * distance)), dtype=torch.uint8) for _ in range(3)
    )
    again.copy_(storage)

    def layers(of):
        start = -of.data_ptr() % 16 + unit % 16
        return [of.as_strided((9, row_bytes), (stride, 1), start + index * distance) for index in range(num_layers)]

    places = random.sample(range(9), len(ids))
    to, expected = DeviceMemory(layers(storage)), DeviceMemory(layers(again), may_use_kernel=False)
    from_ = DeviceMemory(layers(theirs))
    every = range(num_layers)
    list(to.copies_from(from_, ids, places, every))
    list(expected.copies_from(from_, ids, places, every))
    assert torch.equal(storage, again)
    assert torch.equal(to.gather(every, ids), expected.gather(every, ids))
    to.scatter(every, ids, to.gather(every, places))
    expected.scatter(every, ids, expected.gather(every, places))
    assert torch.equal(storage, again)


def test_rows_longer_than_a_program_copies_are_whole():
    rows_of = torch.randint(0, 256, (2, 4, 3 * 2048 * 8 + 24), dtype=torch.uint8)
    for layers in (rows_of, rows_of[..., 1:]):
        ours, theirs = pools(list(layers))
        assert torch.equal(ours.gather(range(2), [3, 1]), theirs.gather(range(2), [3, 1]))


def test_rows_further_apart_than_32_bits_count_are_copied():
    cache = torch.empty((3 << 31) + 32, dtype=torch.uint8)  # of which only the pages that are touched take memory
    layer = cache.as_strided((3, 32), ((1 << 31) + 16, 1), 0)
    layer[[0, 2]] = torch.arange(64, dtype=torch.uint8).view(2, 32)
    pool = pools([layer])[0]
    list(pool.copies_from(pool, [2], [1]))
    assert pool.gather(range(1), [1, 0]).flatten().tolist() == [*range(32, 64), *range(32)]


def test_the_pieces_of_a_copy_are_a_launch_each(launches, monkeypatch):
    monkeypatch.setattr(rows._KernelCopy, "piece_bytes", 2 * 2 * 64)
    source, target = (list(torch.randint(0, 256, (2, 7, 64), dtype=torch.uint8)) for _ in range(2))
    assert list(pools(target)[0].copies_from(pools(source)[0], [0, 3, 5, 6, 1], [6, 5, 4, 3, 2])) == [256, 256, 128]
    assert [shape for _, shape in launches] == [(2, 2), (2, 2), (1, 2)]
    for here, there in zip(target, source, strict=True):
        assert torch.equal(here[[6, 5, 4, 3, 2]], there[[0, 3, 5, 6, 1]])


def test_layers_that_are_laid_out_in_different_ways_are_left_to_torch(launches):
    layers = [torch.randint(0, 256, (4, 64), dtype=torch.uint8), torch.zeros((8, 64), dtype=torch.uint8)[::2]]
    blocks = pools(layers)[0].gather(range(2), [3, 0])
    assert not launches
    assert torch.equal(blocks, torch.stack([layer[[3, 0]] for layer in layers]))


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_where_the_kernel_does_not_work_torch_copies_and_the_log_says_why(fault, monkeypatch, caplog):
    from ridgeline.kv_transfer.memory import row_kernel

    def launcher(_unit):
        def launch(*_):
            if fault == "raises":
                raise RuntimeError("Failed to find C compiler.\nPlease specify via CC")

        return launch

    monkeypatch.setattr(row_kernel, "launcher", launcher)
    monkeypatch.setattr(rows, "_kernels", {})
    layers = [torch.randint(0, 256, (4, 64), dtype=torch.uint8)]
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert torch.equal(pools(layers)[0].gather(range(1), [2, 1])[0], layers[0][[2, 1]])
    why = {"raises": "Failed to find C compiler.", "is wrong": "its copy of a few rows is not equal to them"}[fault]
    text = f"KV blocks on cpu are copied by torch.index_select, since Triton does not work: {why}"
    assert [record.message for record in caplog.records] == [text]


@pytest.mark.parametrize(("unit", "load"), [(16, "v2.b64"), (8, "b64"), (4, "b32"), (2, "b16"), (1, "b8")])
def test_compiled_for_an_h100_each_thread_moves_the_widest_words_that_fit(unit, load, monkeypatch, tmp_path):
    """As it is launched: one variant for each unit, whatever the numbers are, and offsets of 64 bits."""
    triton = pytest.importorskip("triton")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA's GPUs")
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns
    spec = importlib.util.find_spec("ridgeline.kv_transfer.memory.row_kernel")
    compiled_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled_module)
    kernel = compiled_module.copy_rows
    signature = dict.fromkeys(("first", "num_rows", "row_units"), "i32") | {"table": "*i64"}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(4,): unit, (5,): compiled_module.PIECE},
    )
    made = triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
    moves = [
        line.split()[1] for line in made.asm["ptx"].splitlines() if line.strip().startswith("@") and ".global" in line
    ]
    assert {move for move in moves if move.startswith("ld")} == {f"ld.global.{load}"}
    assert {move for move in moves if move.startswith("st")} == {f"st.global.{load}"}
    assert {str(param.do_not_specialize) for param in kernel.params[1:4]} == {"True"}
