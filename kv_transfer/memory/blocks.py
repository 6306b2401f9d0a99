"""One engine's paged KV cache as bytes: layers of numbered blocks, each block one contiguous run of bytes.

This is the transports' only view of the engine's memory, on a CPU (`host`) or a GPU (`device`). It copies nothing until
asked and never looks inside a block: on CPUs the bytes inside are packed for the instruction set, so only whole blocks
are meaningful. Reads and writes may come from any thread. Leases (source) and reserved blocks (target) ensure that
nothing else uses a block at the same time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ByteMatrix: TypeAlias = npt.NDArray[np.uint8]
"""One layer's blocks: uint8 [num_blocks, block_bytes]."""


class CannotOpen(Exception):
    """Another process's pool cannot be reached from this one; the message says why."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where the blocks of one layer lie: an address in this process, on the memory's device."""

    address: int
    stride_bytes: int
    """From one block to the next."""
    num_bytes: int
    """From the first block's begin to the last one's end."""

    @classmethod
    def of(cls, address: int, stride_bytes: int, shape: Sequence[int]) -> Span:
        """Return the span of [num_blocks, block_bytes] from `address` on."""
        num_blocks, block_bytes = shape
        return cls(address, stride_bytes, stride_bytes * (num_blocks - 1) + block_bytes)


class BlockPool(ABC):
    """The blocks of one engine. It checks what is asked for; what a kind of memory implements gets valid ids and sizes.

    `pool_of` in `device` makes one of an engine's layers.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        """`shapes` are [num_blocks, block_bytes] of each layer.

        Raises ValueError if there is no layer, or if the layers differ in shape.
        """
        if not shapes:
            raise ValueError("a block pool needs at least one layer")
        if len(set(shapes)) != 1:
            raise ValueError(f"all layers must have the same shape, not {sorted(set(shapes))}")
        self.num_layers = len(shapes)
        self.num_blocks, self.block_bytes = shapes[0]
        self.device = device
        """The device on which the blocks lie."""

    def part(self, start: int, num_bytes: int) -> BlockPool:
        """Return the same blocks narrowed to `num_bytes` of each, from `start` on: the heads of one rank. No copy.

        Raises ValueError if a block has no such bytes.
        """
        if (start, num_bytes) == (0, self.block_bytes):
            return self
        if start < 0 or num_bytes <= 0 or start + num_bytes > self.block_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} are not inside a block of {self.block_bytes}")
        return self._part(start, num_bytes)

    def check_block_ids(self, block_ids: Sequence[int]) -> None:
        """Raise ValueError unless every id names a block; negative ids do not count from the end."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            bad = [block_id for block_id in block_ids if not 0 <= block_id < self.num_blocks]
            raise ValueError(f"block ids {bad[:5]} are outside the pool's {self.num_blocks} blocks")

    @property
    def layers(self) -> range:
        """All layers."""
        return range(self.num_layers)

    def _check_layers(self, layers: range) -> None:
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.num_layers:
            raise ValueError(f"{layers} of {self.num_layers} layers")

    @abstractmethod
    def commit(self) -> None:
        """Touch every page of the cache, so that no transfer pays for page faults. The content does not change.

        Call it only while nothing else writes to the cache.
        """

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the blocks' bytes in the order asked for.

        In host memory they are views of the blocks; from a GPU, a copy in a buffer that each thread reuses. They are
        valid while the blocks are pinned, until this thread's next call. Raises ValueError for ids that name no block.
        """
        self.check_block_ids(block_ids)
        return self._read(layer, block_ids)

    def write(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """Copy `payload`, the bytes of these distinct blocks in order, into the pool; change nothing else.

        Returns when the bytes are there, on a GPU too. Raises ValueError if size or ids do not fit.
        """
        self.check_block_ids(block_ids)
        if payload.nbytes != len(block_ids) * self.block_bytes:
            raise ValueError(f"{payload.nbytes} bytes do not fill {len(block_ids)} blocks of {self.block_bytes}")
        self._write(layer, block_ids, np.frombuffer(payload, dtype=np.uint8).reshape(len(block_ids), self.block_bytes))

    @abstractmethod
    def spans(self) -> list[Span]:
        """Return where each layer lies, for those that read it without this process's help."""

    @abstractmethod
    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        """Return an uninitialised uint8 [num_layers, num_blocks, block_bytes] on the pool's device, contiguous."""

    def gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a finished copy of these layers' blocks, on the pool's device.

        It is uint8 [len(layers), len(block_ids), block_bytes], contiguous. Raises ValueError for ids that name no
        block, and for layers that are not there.
        """
        self._check_layers(layers)
        self.check_block_ids(block_ids)
        return self._gather(layers, block_ids)

    def scatter(self, layers: range, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """Copy what `gather` makes into distinct blocks of these layers; change nothing else.

        Returns when the bytes are there. Raises ValueError if shape, ids or layers do not fit.
        """
        self._check_layers(layers)
        self.check_block_ids(block_ids)
        if tuple(blocks.shape) != (len(layers), len(block_ids), self.block_bytes):
            room = f"{len(layers)} layers of {len(block_ids)} blocks of {self.block_bytes} bytes"
            raise ValueError(f"{tuple(blocks.shape)} does not fill {room}")
        self._scatter(layers, block_ids, blocks)

    @abstractmethod
    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the checksum of a contiguous tensor, a number on the pool's device: `on_host` waits for it.

        Equal bytes in the same kind of memory give the same sum. It detects any changed byte and any two 32-bit words
        that changed places. The tensor must not change before the sum is on the host.
        """

    @abstractmethod
    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        """Return the checksums as numbers, after one copy from the device."""

    def copies_from(
        self, source: BlockPool, source_ids: Sequence[int], block_ids: Sequence[int], layers: range | None = None
    ) -> Generator[int, None, None]:
        """Copy blocks from another pool that this process maps, or that this pool's device can read.

        The copying happens during iteration, which yields the number of bytes after each step of a few milliseconds.
        Only these `layers` are copied, if given. In host memory each byte is copied once. Raises ValueError if the
        pools, the ids or the layers do not match.
        """
        wanted = self.layers if layers is None else layers
        self._check_layers(wanted)
        source.check_block_ids(source_ids)
        self.check_block_ids(block_ids)
        if (source.num_layers, source.block_bytes) != (self.num_layers, self.block_bytes):
            raise ValueError("the pools do not match")
        if len(source_ids) != len(block_ids):
            raise ValueError(f"{len(source_ids)} blocks for {len(block_ids)} places")
        yield from self._copies_from(source, source_ids, block_ids, wanted)

    # --- what a kind of memory implements

    @abstractmethod
    def _part(self, start: int, num_bytes: int) -> BlockPool: ...

    @abstractmethod
    def _read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]: ...

    @abstractmethod
    def _write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None: ...

    @abstractmethod
    def _gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor: ...

    @abstractmethod
    def _scatter(self, layers: range, block_ids: Sequence[int], source: torch.Tensor) -> None: ...

    @abstractmethod
    def _copies_from(
        self, source: Any, source_ids: Sequence[int], block_ids: Sequence[int], layers: range
    ) -> Generator[int, None, None]: ...


def byte_rows(index: int, tensor: torch.Tensor) -> torch.Tensor:
    """View the memory of layer `index` as uint8 [num_blocks, block_bytes]."""
    if tensor.dim() < 2:
        raise ValueError(f"layer {index} has shape {tuple(tensor.shape)}: expected [num_blocks, ...]")
    _require_contiguous_blocks(index, tensor)
    item_bytes = tensor.element_size()
    num_blocks = tensor.shape[0]
    block_bytes = tensor[0].numel() * item_bytes
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item_bytes,
        (num_blocks, block_bytes),
        (tensor.stride(0) * item_bytes, 1),
    )


def _require_contiguous_blocks(index: int, tensor: torch.Tensor) -> None:
    """Raise ValueError unless the inner dimensions, ordered by stride, tile a block without holes or overlap."""
    inner = sorted(
        (stride, size) for stride, size in zip(tensor.stride()[1:], tensor.shape[1:], strict=True) if size > 1
    )
    expected_stride = 1
    for stride, size in inner:
        if stride != expected_stride:
            raise ValueError(
                f"layer {index}: the bytes of one block are not contiguous "
                f"(shape {tuple(tensor.shape)}, strides {tensor.stride()})"
            )
        expected_stride *= size
    if tensor.shape[0] > 1 and tensor.stride(0) < expected_stride:
        raise ValueError(f"layer {index}: blocks overlap (strides {tensor.stride()})")
