"""What quantising costs: error bounds, independence of heads and blocks, sizes, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.contracts import errors
from ridgeline.kv_transfer.interfaces import FetchProgress
from ridgeline.kv_transfer.memory.blocks import BlockPool
from ridgeline.kv_transfer.options import TransferOptions
from ridgeline.kv_transfer.transports import make_transport
from ridgeline.kv_transfer.wire import codec, frames
from ridgeline.prefill_worker.kv_source.block_server import RankCache
from tests.support.samples import kv_layout

DTYPES = ("bfloat16", "float16", "float32")
HALF_ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
SMALLEST_STEP = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}
HEADS, ELEMENTS = 3, 24


def layout_of(kv_dtype="bfloat16", heads=HEADS, elements=ELEMENTS, ranks=1, **changes):
    item_bytes = {"float32": 4}.get(kv_dtype, 2)
    fields = {
        "kv_dtype": kv_dtype,
        "block_size_tokens": 4,
        "num_kv_heads": heads,
        "block_bytes": heads // ranks * elements * item_bytes,
        "tensor_parallel_size": ranks,
    }
    return kv_layout(**fields | changes)


def codec_of(name, kv_dtype="bfloat16", **changes):
    layout = layout_of(kv_dtype, **changes)
    return codec.make_codec(name, layout, layout.block_bytes)


def as_blocks(values):
    """[blocks, heads, elements] as one memoryview a block."""
    rows = values.contiguous().view(torch.uint8).reshape(len(values), -1).numpy()
    return [memoryview(row) for row in rows]


def round_trip(made, values):
    """What arrives, through bytes as a network would carry them."""
    payload = b"".join(made.encode(as_blocks(values)))
    assert len(payload) == made.encoded_bytes(len(values))
    decoded = made.decode(memoryview(payload), len(values))
    return torch.frombuffer(bytearray(decoded), dtype=values.dtype).view(values.shape)


def scales_of(made, values):
    blocks, heads = values.shape[:2]
    return np.frombuffer(b"".join(made.encode(as_blocks(values))), np.float32, blocks * heads).reshape(blocks, heads)


@st.composite
def kv_values(draw, dtype):
    """[blocks, heads, elements] of finite values, each head of a size of its own."""
    seed = draw(st.integers(0, 2**32 - 1))
    blocks = draw(st.integers(1, 4))
    exponents = st.floats(-4, 4) if dtype == "float16" else st.floats(-30, 37)
    sizes = draw(st.lists(exponents, min_size=blocks * HEADS, max_size=blocks * HEADS))
    random = torch.Generator().manual_seed(seed)
    unit = torch.rand((blocks, HEADS, ELEMENTS), generator=random, dtype=torch.float64) * 2 - 1
    if draw(st.booleans()):
        unit **= 9  # many small elements beside few large ones
    return (unit * 10.0 ** torch.tensor(sizes, dtype=torch.float64).view(blocks, HEADS, 1)).to(getattr(torch, dtype))


@settings(max_examples=60)
@given(st.data(), st.sampled_from(DTYPES))
def test_int8_is_off_by_half_a_scale_at_most(data, dtype):
    values = data.draw(kv_values(dtype))
    made = codec_of("int8", dtype)
    arrived = round_trip(made, values).double()
    scales = torch.tensor(scales_of(made, values)).double()[..., None]
    # Half a step of the code, and what the element's own format cannot say of the result.
    allowed = scales * (0.5 + 1e-4) + arrived.abs() * HALF_ULP[dtype] + SMALLEST_STEP[dtype]
    assert ((values.double() - arrived).abs() <= allowed).all()


@settings(max_examples=60)
@given(st.data(), st.sampled_from(DTYPES))
def test_fp8_is_off_by_a_sixteenth_of_each_element_at_most(data, dtype):
    values = data.draw(kv_values(dtype))
    made = codec_of("fp8", dtype)
    arrived = round_trip(made, values).double()
    scales = torch.tensor(scales_of(made, values)).double()[..., None]
    exact = values.double()
    smallest_code_step = 2.0**-9
    allowed = torch.maximum(exact.abs() * 2.0**-4, scales * smallest_code_step / 2) * (1 + 1e-4)
    allowed += arrived.abs() * HALF_ULP[dtype] + SMALLEST_STEP[dtype]
    assert ((exact - arrived).abs() <= allowed).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_of_a_format_does_not_overflow(name, dtype):
    most = torch.finfo(getattr(torch, dtype)).max
    values = torch.tensor([most, -most, most / 2, 0.0]).repeat(HEADS * ELEMENTS // 4).to(getattr(torch, dtype))
    arrived = round_trip(codec_of(name, dtype), values.view(1, HEADS, ELEMENTS))
    assert arrived.isfinite().all()
    assert arrived.double().abs().max() == pytest.approx(most, rel=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fp8_code_is_decoded_as_pytorch_decodes_it(dtype):
    numbers = torch.arange(256, dtype=torch.uint8)
    codes = numbers[(numbers & 0x7F) != 0x7F]  # not the two NaN
    made = codec_of("fp8", dtype, heads=1, elements=len(codes))
    payload = np.float32([1.0]).tobytes() + codes.numpy().tobytes()
    arrived = torch.frombuffer(bytearray(made.decode(memoryview(payload), 1)), dtype=getattr(torch, dtype))
    assert torch.equal(arrived.float(), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(name, dtype):
    values = torch.zeros((2, HEADS, ELEMENTS), dtype=getattr(torch, dtype))
    made = codec_of(name, dtype)
    assert not any(b"".join(made.encode(as_blocks(values))))
    assert not any(bytes(made.decode(memoryview(b"".join(made.encode(as_blocks(values)))), 2)))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_values_too_small_for_a_scale_become_zeros(name):
    values = torch.full((1, HEADS, ELEMENTS), codec.SMALLEST_PEAK / 2)
    assert (round_trip(codec_of(name, "float32"), values) == 0).all()
    values = torch.full((1, HEADS, ELEMENTS), codec.SMALLEST_PEAK)
    assert torch.allclose(round_trip(codec_of(name, "float32"), values), values, rtol=1e-2, atol=0)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_element_becomes_finite_and_spoils_no_other(name, dtype):
    values = torch.randn((2, HEADS, ELEMENTS), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    broken = values.clone()
    broken[0, 1, 3:6] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    broken[1, 2, :] = float("nan")
    broken[1, 0, :] = -float("inf")
    others = torch.ones_like(values, dtype=torch.bool)
    others[0, 1, 3:6] = others[1, 2, :] = others[1, 0, :] = False
    values[~others] = 0
    made = codec_of(name, dtype)
    arrived, expected = round_trip(made, broken), round_trip(made, values)
    assert torch.equal(arrived[others], expected[others])
    peak = expected[0, 1].abs().max()
    assert arrived[0, 1, 3:6].tolist() == [0, peak, -peak]
    assert (arrived[1, 2] == 0).all()
    assert (arrived[1, 0] == 0).all(), "no finite element to take the size from"


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_every_head_of_every_block_has_a_scale_of_its_own(name):
    sizes = 10.0 ** torch.arange(6.0).view(2, 3, 1) - 0.5
    unit = torch.randn((2, HEADS, ELEMENTS), generator=torch.Generator().manual_seed(2))
    values = (unit * sizes).bfloat16()
    made = codec_of(name)
    scales = scales_of(made, values)
    np.testing.assert_allclose(scales * made.largest_code, values.float().abs().amax(2).numpy(), rtol=1e-6)
    changed = values.clone()
    changed[1, 0] *= 1000
    arrived, other = round_trip(made, values), round_trip(made, changed)
    differs = (arrived != other).any(dim=2)
    assert differs.tolist() == [[False] * 3, [True, False, False]]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_part_of_a_block_is_encoded_as_within_the_whole(name):
    layout = layout_of(heads=4)
    values = torch.randn((3, 4, ELEMENTS), generator=torch.Generator().manual_seed(3)).bfloat16()
    whole = round_trip(codec.make_codec(name, layout, layout.block_bytes), values)
    part = codec.make_codec(name, layout, layout.block_bytes // 2)
    assert torch.equal(round_trip(part, values[:, 2:]), whole[:, 2:])
    # The same heads, as the two ranks of a source that holds half of them each see them.
    half = layout_of(heads=4, ranks=2)
    assert torch.equal(round_trip(codec.make_codec(name, half, half.block_bytes), values[:, 2:]), whole[:, 2:])


@pytest.mark.parametrize("elements", [codec.TILE_ELEMENTS - 1, codec.TILE_ELEMENTS + 1, 5000])
def test_tiles_do_not_show(elements):
    values = torch.randn((7, 1, elements), generator=torch.Generator().manual_seed(4)).bfloat16()
    made = codec_of("int8", heads=1, elements=elements)
    together = round_trip(made, values)
    for index, value in enumerate(values):
        assert torch.equal(round_trip(made, value[None]), together[index][None])


@pytest.mark.parametrize(
    ("name", "dtype", "item_bytes"),
    [("none", "bfloat16", 2), ("int8", "bfloat16", 2), ("fp8", "float16", 2), ("int8", "float32", 4)],
)
def test_sizes_are_known_before_anything_is_encoded(name, dtype, item_bytes):
    made = codec_of(name, dtype)
    each = HEADS * ELEMENTS * item_bytes if name == "none" else HEADS * (4 + ELEMENTS)
    assert [made.encoded_bytes(count) for count in (0, 1, 7)] == [0, each, 7 * each]


def test_raw_blocks_are_not_copied():
    made = codec_of("none")
    blocks = as_blocks(torch.zeros((2, HEADS, ELEMENTS)))
    assert made.encode(blocks) is blocks
    payload = memoryview(b"12")
    assert made.decode(payload, 1) is payload


def refusal(name, layout, part_bytes=None):
    with pytest.raises(ValueError, match=" ") as caught:
        codec.make_codec(name, layout, layout.block_bytes if part_bytes is None else part_bytes)
    return str(caught.value)


def test_what_cannot_be_encoded_is_refused_in_a_sentence():
    assert "unknown wire_dtype 'int4'; there are none, int8, fp8" in refusal("int4", layout_of())
    for kv_dtype in ("auto", "uint8", "float8_e4m3fn"):
        sentence = refusal("int8", layout_of(kv_dtype, block_bytes=96))
        assert repr(kv_dtype) in sentence
        assert "set transfer.wire_dtype to none" in sentence
    assert "not 3 heads of bfloat16" in refusal("fp8", layout_of(block_bytes=100))
    assert "not 3 heads of bfloat16" in refusal("fp8", layout_of(block_bytes=15))
    assert "not whole heads of 48 bytes" in refusal("int8", layout_of(), part_bytes=72)
    assert "not whole heads" in refusal("int8", layout_of(), part_bytes=0)
    assert "too small" in refusal("int8", layout_of(elements=4))


def test_where_nothing_is_encoded_any_layout_will_do():
    assert codec.make_codec("none", layout_of("auto", block_bytes=101), 7).encoded_bytes(2) == 14


def test_blocks_and_payloads_of_another_size_are_refused():
    made = codec_of("int8")
    with pytest.raises(ValueError, match="bytes"):
        made.encode([memoryview(bytes(10))])
    for size in (0, made.encoded_bytes(2) - 1, made.encoded_bytes(2) + 1):
        with pytest.raises(ValueError, match="are not 2 blocks"):
            made.decode(memoryview(bytes(size)), 2)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e37, -1.0])
def test_scales_no_encoder_writes_are_refused(scale):
    made = codec_of("int8", heads=1)
    with pytest.raises(ValueError, match="scale"):
        made.decode(memoryview(np.float32([scale]).tobytes() + bytes(ELEMENTS)), 1)


# --- in frames


def pool_of(values):
    """One layer's blocks for each of [layers, blocks, heads, elements], and the bytes they lie in."""
    layers = [layer.contiguous().view(torch.uint8).reshape(len(layer), -1).numpy() for layer in values]
    return BlockPool(layers), layers


def two_pools(seed=5):
    values = torch.randn((2, 8, HEADS, ELEMENTS), generator=torch.Generator().manual_seed(seed)).bfloat16()
    source, _ = pool_of(values)
    target, layers = pool_of(torch.zeros_like(values))
    return values, source, target, layers


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_frames_carry_encoded_blocks_and_the_reader_counts_what_it_wrote(name):
    values, source, target, layers = two_pools()
    ids, made, progress = [5, 1, 7], codec_of(name), FetchProgress(started_s=0.0)
    reader = frames.FrameReader(target, [0, 2, 4], progress, codec_of(name))
    sent = list(frames.write_frames(source, ids, codec=made, target_bytes=300))
    assert len(sent) == 4
    assert sum(map(frames.payload_bytes, sent)) == 2 * made.encoded_bytes(3)
    for frame in sent:
        reader.accept(frame)
    reader.finish()
    assert progress.num_bytes == 2 * 3 * source.block_bytes
    for layer, expected in zip(layers, values, strict=True):
        arrived = torch.from_numpy(layer).view(torch.bfloat16).view(expected.shape)
        assert torch.equal(arrived[[0, 2, 4]], round_trip(codec_of(name), expected[ids]))
        assert (arrived[[1, 3, 5, 6, 7]] == 0).all()


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 1 << 14))
def test_no_encoded_frame_is_larger_than_a_receiver_expects(num_blocks, elements):
    layout = layout_of(heads=1, elements=elements + 4)
    pool = BlockPool([np.zeros((8, layout.block_bytes), np.uint8)])
    made = codec.make_codec("int8", layout, layout.block_bytes)
    largest = max(map(len, frames.write_frames(pool, list(range(num_blocks)), codec=made)))
    assert largest <= frames.largest_frame_bytes(layout)


@pytest.mark.parametrize(("sent", "asked"), [("int8", "none"), ("none", "int8"), ("fp8", "int8"), ("int8", "fp8")])
def test_a_frame_of_a_codec_not_asked_for_is_refused(sent, asked):
    _, source, target, layers = two_pools()
    reader = frames.FrameReader(target, [0], FetchProgress(started_s=0.0), codec_of(asked))
    with pytest.raises(errors.TransferFailed, match=f"was asked for, wire_dtype {asked}") as caught:
        reader.accept(next(frames.write_frames(source, [1], codec=codec_of(sent))))
    assert caught.value.reason == errors.CORRUPTED
    assert not any(layer.any() for layer in layers)


@pytest.mark.parametrize("position", [0, 1, 3, 4 * HEADS - 1, 4 * HEADS, -1])
def test_a_flipped_bit_in_a_scale_or_a_code_is_noticed_before_anything_is_written(position):
    _, source, target, layers = two_pools()
    reader = frames.FrameReader(target, [0], FetchProgress(started_s=0.0), codec_of("int8"))
    frame = bytearray(next(frames.write_frames(source, [1], codec=codec_of("int8"))))
    frame[position if position < 0 else frames.HEADER_BYTES + position] ^= 0x10
    with pytest.raises(errors.TransferFailed, match="checksum") as caught:
        reader.accept(bytes(frame))
    assert caught.value.reason == errors.CORRUPTED
    assert not any(layer.any() for layer in layers)


def test_a_payload_of_the_raw_size_is_refused_where_an_encoded_one_is_due():
    class Lying(codec.Raw):
        number = codec.Int8.number

    _, source, target, layers = two_pools()
    reader = frames.FrameReader(target, [0], FetchProgress(started_s=0.0), codec_of("int8"))
    with pytest.raises(errors.TransferFailed, match="bytes came for 1 blocks"):
        reader.accept(next(frames.write_frames(source, [1], codec=Lying(source.block_bytes))))
    assert not any(layer.any() for layer in layers)


def test_a_bad_scale_behind_a_right_checksum_is_corruption():
    class Bad(codec.Int8):
        def encode(self, blocks):
            (encoded,) = super().encode(blocks)
            np.frombuffer(encoded, np.float32, 1)[0] = np.nan
            return [encoded]

    values, source, target, layers = two_pools()
    good = codec_of("int8")
    reader = frames.FrameReader(target, [0], FetchProgress(started_s=0.0), good)
    with pytest.raises(errors.TransferFailed, match="a scale is negative") as caught:
        reader.accept(next(frames.write_frames(source, [1], codec=Bad(good._shape))))
    assert caught.value.reason == errors.CORRUPTED
    assert not any(layer.any() for layer in layers)
    assert values.isfinite().all()


# --- where transports are made


@pytest.mark.parametrize(
    ("name", "kv_dtype", "sentence"),
    [
        ("shm", "bfloat16", "shm copies blocks as they are: wire_dtype must be none, not int8"),
        ("grpc", "auto", "KV of type 'auto' cannot be sent as int8"),
        ("auto", "float8_e4m3fn", "KV of type 'float8_e4m3fn' cannot be sent as int8"),
    ],
)
def test_an_impossible_mixture_is_refused_when_the_engine_starts(name, kv_dtype, sentence):
    _, pool, _, _ = two_pools()
    layout = layout_of(kv_dtype, block_bytes=pool.block_bytes)
    with pytest.raises(ValueError, match=sentence):
        make_transport(RankCache(pool, None, layout), TransferOptions("127.0.0.1", transport=name, wire_dtype="int8"))
