"""Encodings of KV in transit: the bytes as they are, or one byte per element with one scale per head.

The source encodes and the target decodes, both separately for each layer, block and head; neither needs to know more
than where a head ends inside a block. Inside a head elements may lie in any order (CPUs pack them for their instruction
set), because all elements are treated alike; K and V of one head share its scale.

Values that cannot be rounded are defined: NaN becomes 0, an infinity becomes the largest finite value of its head with
its sign, and a head whose values are all below `SMALLEST_PEAK` becomes zeros. So a broken element affects no other one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.contracts.handoff import KvLayout
from ridgeline.kv_transfer.names import WIRE_DTYPES, WireDtype

SMALLEST_PEAK: Final = 2.0**-110
"""Below this, a scale or its inverse is not a normal float32; no model's keys or values are that small."""
TILE_ELEMENTS: Final = 32768
"""Elements converted at a time. They fit a core's second-level cache, and PyTorch does not use several threads for
operations this small, which would take cores from the engine."""

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]


class Codec(ABC):
    """Encodes or decodes the frames of one stream. It reuses its buffers and must not be shared between threads."""

    number: ClassVar[int]
    """The codec's number in every frame header."""
    name: ClassVar[WireDtype]

    @abstractmethod
    def encoded_bytes(self, count: int) -> int:
        """Return the bytes that `count` blocks take in a frame; never more than the blocks' own."""

    @abstractmethod
    def encode(self, blocks: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return the blocks as buffers to send one after the other, `encoded_bytes(len(blocks))` in all.

        They are valid until the next call. Raises ValueError if a block's size is not the one this codec was made for.
        """

    @abstractmethod
    def decode(self, payload: memoryview, count: int) -> memoryview:
        """Return the bytes of `count` blocks, one after the other, valid until the next call.

        Raises ValueError if `payload` has the wrong size or holds scales that no encoder writes.
        """


class Raw(Codec):
    """The blocks' own bytes, passed through without a copy."""

    number: ClassVar[int] = 0
    name: ClassVar[WireDtype] = "none"

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes

    def encoded_bytes(self, count: int) -> int:
        return count * self._block_bytes

    def encode(self, blocks: Sequence[memoryview]) -> Sequence[memoryview]:
        return blocks

    def decode(self, payload: memoryview, count: int) -> memoryview:
        return payload


@dataclass(frozen=True, slots=True)
class ElementType:
    """A float format whose bit patterns, read as integers without the sign, are ordered by magnitude."""

    torch_dtype: torch.dtype
    bits_dtype: type[np.signedinteger[Any]]
    infinity_bits: int
    """The pattern of infinity; larger ones, without the sign, are NaN."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.bits_dtype).itemsize

    @property
    def magnitude_mask(self) -> int:
        """A mask of all bits but the sign."""
        return int(np.iinfo(self.bits_dtype).max)

    def floats(self, bits: npt.NDArray[Any]) -> Floats:
        """Return non-negative bit patterns as float32 values."""
        values: Floats = torch.from_numpy(bits).view(self.torch_dtype).to(torch.float32).numpy()
        return values


ELEMENT_TYPES: Final = {
    "bfloat16": ElementType(torch.bfloat16, np.int16, 0x7F80),
    "float16": ElementType(torch.float16, np.int16, 0x7C00),
    "float32": ElementType(torch.float32, np.int32, 0x7F80_0000),
}
"""The element types that can be encoded, by `KvLayout.kv_dtype`."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads in one block, or in a part of one."""

    heads: int
    elements: int
    """Elements of one head, K and V together."""
    element_type: ElementType


class ScaledCodec(Codec):
    """One scale per head. Payload: float32 scales [blocks, heads], then one byte per element [blocks, heads, elements].

    All is little-endian. A scale is the head's largest magnitude divided by the largest code, so that the head's values
    use the whole range of codes.
    """

    largest_code: ClassVar[float]

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        self._block_bytes = shape.heads * shape.elements * shape.element_type.num_bytes
        self._block_encoded_bytes = shape.heads * (4 + shape.elements)
        if self._block_encoded_bytes >= self._block_bytes:
            raise ValueError(f"heads of {shape.elements} elements are too small to be sent as {self.name}")
        self._rows = max(1, TILE_ELEMENTS // shape.elements)
        self._raw = np.empty(0, np.uint8)
        self._encoded = np.empty(0, np.uint8)
        self._work = torch.empty((self._rows, shape.elements), dtype=torch.float32)
        self._magnitudes = np.empty((self._rows, shape.elements), shape.element_type.bits_dtype)

    @abstractmethod
    def _to_codes(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        """Round float32 [rows, elements] in [-largest_code, largest_code] to int8 patterns; may overwrite `scaled`."""

    @abstractmethod
    def _from_codes(self, codes: npt.NDArray[np.int8], scaled: torch.Tensor) -> None:
        """Fill `scaled` with the values of the codes, times `_code_unit`."""

    _code_unit: ClassVar[float] = 1.0

    def encoded_bytes(self, count: int) -> int:
        return count * self._block_encoded_bytes

    def encode(self, blocks: Sequence[memoryview]) -> Sequence[memoryview]:
        if any(block.nbytes != self._block_bytes for block in blocks):
            raise ValueError(f"not all blocks have {self._block_bytes} bytes")
        count, heads = len(blocks), len(blocks) * self._shape.heads
        self._reserve(count)
        raw = self._raw[: count * self._block_bytes]
        np.concatenate([np.frombuffer(block, np.uint8) for block in blocks], out=raw)
        bits = raw.view(self._shape.element_type.bits_dtype).reshape(heads, -1)
        peaks = self._peaks(bits)
        encoded = self._encoded[: self.encoded_bytes(count)]
        scales = encoded[: 4 * heads].view(np.float32)
        scales[:] = _scales(peaks, self.largest_code)
        with np.errstate(divide="ignore"):
            per_unit = np.where(peaks > 0, np.float32(self.largest_code) / peaks, np.float32(0))
        values = torch.from_numpy(bits).view(self._shape.element_type.torch_dtype)
        codes = torch.from_numpy(encoded[4 * heads :].view(np.int8).reshape(heads, -1))
        factors = torch.from_numpy(per_unit)[:, None]
        for value, factor, code in self._tiles(values, factors, codes):
            work = self._work[: len(value)]
            work.copy_(value)
            work.mul_(factor)
            self._to_codes(work, code)
        return [encoded.data]

    def decode(self, payload: memoryview, count: int) -> memoryview:
        if payload.nbytes != self.encoded_bytes(count):
            raise ValueError(f"{payload.nbytes} bytes are not {count} blocks as {self.name}")
        heads = count * self._shape.heads
        scales = np.frombuffer(payload, np.float32, heads)
        if not ((scales >= 0) & (scales <= np.finfo(np.float32).max / np.float32(self.largest_code))).all():
            raise ValueError("a scale is negative, too large or not a number")
        self._reserve(count)
        raw = self._raw[: count * self._block_bytes]
        bits = raw.view(self._shape.element_type.bits_dtype).reshape(heads, -1)
        values = torch.from_numpy(bits).view(self._shape.element_type.torch_dtype)
        codes = np.frombuffer(payload, np.int8, offset=4 * heads).reshape(heads, -1)
        factors = torch.from_numpy(scales / np.float32(self._code_unit))[:, None]
        for first, (value, factor) in enumerate(self._tiles(values, factors)):
            work = self._work[: len(value)]
            self._from_codes(codes[first * self._rows :][: len(value)], work)
            work.mul_(factor)
            value.copy_(work)
        return raw.data

    def _tiles(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """Iterate over groups of rows; one call that splits them is cheaper than a slice for each."""
        return zip(*(torch.split(tensor, self._rows) for tensor in tensors), strict=True)

    def _reserve(self, count: int) -> None:
        """Make the buffers large enough for this many blocks; they never shrink."""
        if self._raw.nbytes < count * self._block_bytes:
            self._raw = np.empty(count * self._block_bytes, np.uint8)
            self._encoded = np.empty(self.encoded_bytes(count), np.uint8)

    def _peaks(self, bits: npt.NDArray[Any]) -> Floats:
        """Return each row's largest magnitude as float32 [rows], 0 if below SMALLEST_PEAK.

        Makes `bits` finite in place.
        """
        kind = self._shape.element_type
        peaks = np.empty(len(bits), bits.dtype)
        for first in range(0, len(bits), self._rows):
            tile = bits[first : first + self._rows]
            magnitudes = np.bitwise_and(tile, kind.magnitude_mask, out=self._magnitudes[: len(tile)])
            magnitudes.max(axis=1, out=peaks[first : first + self._rows])
        for row in np.flatnonzero(peaks >= kind.infinity_bits):
            peaks[row] = _make_finite(bits[row], kind)
        floats = kind.floats(peaks)
        return np.where(floats < SMALLEST_PEAK, np.float32(0), floats)


class Int8(ScaledCodec):
    """Integers from -127 to 127: an error of at most half a scale, the same for small and large elements.

    The result is then rounded to the cache's own format, which for bfloat16 may add as much again.
    """

    number: ClassVar[int] = 1
    name: ClassVar[WireDtype] = "int8"
    largest_code: ClassVar[float] = 127.0

    def _to_codes(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        codes.copy_(scaled.round_())

    def _from_codes(self, codes: npt.NDArray[np.int8], scaled: torch.Tensor) -> None:
        np.copyto(scaled.numpy(), codes)


class Fp8(ScaledCodec):
    """float8_e4m3fn: an error of at most 1/16 of each element, down to 1/28672 of the head's largest one."""

    number: ClassVar[int] = 2
    name: ClassVar[WireDtype] = "fp8"
    largest_code: ClassVar[float] = 448.0
    _code_unit: ClassVar[float] = 2.0**-8

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self._halves = np.empty((self._rows, shape.elements), np.int16)

    def _to_codes(self, scaled: torch.Tensor, codes: torch.Tensor) -> None:
        codes.view(torch.float8_e4m3fn).copy_(scaled)

    def _from_codes(self, codes: npt.NDArray[np.int8], scaled: torch.Tensor) -> None:
        # PyTorch widens this format element by element. Shifted left by 7 bits, exponent and fraction are those of a
        # float16 smaller by 2 ** (15 - 7), the difference of the exponent biases; that is ten times as fast.
        halves = self._halves[: len(codes)]
        np.copyto(halves, codes)
        np.left_shift(halves, 7, out=halves)
        np.bitwise_and(halves, ~0x4000, out=halves)  # clear the bit that the sign was extended into
        scaled.copy_(torch.from_numpy(halves).view(torch.float16))


_SCALED: Final[dict[str, type[ScaledCodec]]] = {codec.name: codec for codec in (Int8, Fp8)}


def make_codec(wire_dtype: str, layout: KvLayout, part_bytes: int) -> Codec:
    """Return the codec for streams that carry `part_bytes`, a number of whole heads, of every block of this layout.

    Raises ValueError for a name that does not exist, and for blocks that cannot be divided into heads of a known
    float format.
    """
    if wire_dtype == Raw.name:
        return Raw(part_bytes)
    codec = _SCALED.get(wire_dtype)
    if codec is None:
        raise ValueError(f"unknown wire_dtype {wire_dtype!r}; there are {', '.join(WIRE_DTYPES)}")
    return codec(_head_shape(wire_dtype, layout, part_bytes))


def _head_shape(wire_dtype: str, layout: KvLayout, part_bytes: int) -> HeadShape:
    kind = ELEMENT_TYPES.get(layout.kv_dtype)
    if kind is None:
        raise ValueError(
            f"KV of type {layout.kv_dtype!r} cannot be sent as {wire_dtype}, only {', '.join(ELEMENT_TYPES)}: set "
            "transfer.wire_dtype to none"
        )
    heads_per_rank = max(1, layout.num_kv_heads // layout.tensor_parallel_size)  # one each if there are fewer
    head_bytes, rest = divmod(layout.block_bytes, heads_per_rank)
    if rest or head_bytes == 0 or head_bytes % kind.num_bytes:
        raise ValueError(f"a block of {layout.block_bytes} bytes is not {heads_per_rank} heads of {layout.kv_dtype}")
    heads, rest = divmod(part_bytes, head_bytes)
    if rest or heads < 1:
        raise ValueError(f"{part_bytes} bytes of a block are not whole heads of {head_bytes} bytes")
    return HeadShape(heads, head_bytes // kind.num_bytes, kind)


def _scales(peaks: Floats, largest_code: float) -> Floats:
    """Return peak / largest_code, rounded so that no decoded value exceeds its head's peak, which could overflow."""
    largest = np.float32(largest_code)
    scales: Floats = peaks / largest
    with np.errstate(over="ignore"):  # the next line corrects that
        return np.where(scales * largest > peaks, np.nextafter(scales, np.float32(0)), scales)


def _make_finite(bits: npt.NDArray[Any], kind: ElementType) -> int:
    """Set NaN to 0 and infinities to the largest finite magnitude, in place; return that magnitude's bit pattern."""
    magnitudes = bits & kind.magnitude_mask
    finite = magnitudes < kind.infinity_bits
    peak = int(magnitudes[finite].max(initial=0))
    infinite = magnitudes == kind.infinity_bits
    bits[~finite & ~infinite] = 0
    bits[infinite] = (bits[infinite] & ~np.array(kind.magnitude_mask, bits.dtype)) | peak
    return peak
