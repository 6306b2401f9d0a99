"""The memory behind a `BlockPool`: the interface for storing and moving bytes, and its version for host memory.

`device` has the version for GPUs. A memory may assume that ids and sizes were checked: only `BlockPool` calls it.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ByteMatrix: TypeAlias = npt.NDArray[np.uint8]
"""One layer's blocks: uint8 [num_blocks, block_bytes]."""
MADV_POPULATE_WRITE = 23
"""Of madvise(2); Python's `mmap` does not name it."""


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


class BlockMemory(ABC):
    """Layers of blocks; each layer is [num_blocks, block_bytes]. Its methods may be called from any thread."""

    shapes: tuple[tuple[int, ...], ...]
    """The shape of each layer."""
    device: torch.device

    @abstractmethod
    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the blocks' bytes; see `BlockPool.read`."""

    @abstractmethod
    def write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        """Copy row i of `source` to block `block_ids[i]`; return when the bytes are there."""

    @abstractmethod
    def gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a copy of the blocks; see `BlockPool.gather`."""

    @abstractmethod
    def scatter(self, layers: range, block_ids: Sequence[int], source: torch.Tensor) -> None:
        """Copy row i of each layer of `source`, on this device, to block `block_ids[i]`; return when it is there."""

    @abstractmethod
    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        """Return room for this many blocks; see `BlockPool.staging`."""

    @abstractmethod
    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the blocks' checksum; see `BlockPool.checksum`."""

    @abstractmethod
    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        """Return checksums as numbers; see `BlockPool.on_host`."""

    @abstractmethod
    def part(self, start: int, num_bytes: int) -> BlockMemory:
        """Return views of bytes [start, start + num_bytes) of every block."""

    @abstractmethod
    def spans(self) -> list[Span]:
        """Return where each layer lies."""

    @abstractmethod
    def commit(self) -> None:
        """Touch every page; see `BlockPool.commit`."""


class HostMemory(BlockMemory):
    """Blocks in this process's address space, so that reading makes no copy. The rows are views into the cache."""

    def __init__(self, layers: Sequence[ByteMatrix]) -> None:
        self._layers = tuple(layers)
        self.shapes = tuple(layer.shape for layer in layers)
        self.device = torch.device("cpu")
        self._stacks = _stacks(self._layers)

    @property
    def layers(self) -> tuple[ByteMatrix, ...]:
        """Each layer's blocks."""
        return self._layers

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        rows = self._layers[layer]
        return [memoryview(rows[block_id]) for block_id in block_ids]

    def write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        self._layers[layer][list(block_ids)] = source

    def gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        blocks, ids = self.staging(len(layers), len(block_ids)), list(block_ids)
        for layer, rows in zip(layers, blocks.numpy(), strict=True):
            rows[:] = self._layers[layer][ids]
        return blocks

    def scatter(self, layers: range, block_ids: Sequence[int], source: torch.Tensor) -> None:
        for layer, rows in zip(layers, source.numpy(), strict=True):
            self.write(layer, block_ids, rows)

    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        return torch.empty((num_layers, num_blocks, self.shapes[0][1]), dtype=torch.uint8)

    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        import xxhash  # here, because `tools.gpu.check` runs this package where there is torch and numpy alone

        digest = xxhash.xxh3_64_digest(blocks.numpy().data)
        return torch.tensor(int.from_bytes(digest, "big", signed=True))

    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        return [int(checksum) for checksum in checksums]

    def part(self, start: int, num_bytes: int) -> HostMemory:
        return HostMemory([layer[:, start : start + num_bytes] for layer in self._layers])

    def spans(self) -> list[Span]:
        return [Span.of(rows.__array_interface__["data"][0], rows.strides[0], rows.shape) for rows in self._layers]

    def copy_from(self, source: HostMemory, source_first: int, first: int, count: int, layers: slice) -> None:
        """Copy `count` adjacent blocks of these layers, in one call if it can be, and let other threads run."""
        if len(self._stacks) == len(source._stacks) == 1:
            pairs = zip([self._stacks[0][layers]], [source._stacks[0][layers]], strict=True)
        else:
            pairs = zip(
                [layer[np.newaxis] for layer in self._layers[layers]],
                [layer[np.newaxis] for layer in source._layers[layers]],
                strict=True,
            )
        for target, from_ in pairs:
            target[:, first : first + count] = from_[:, source_first : source_first + count]

    def commit(self) -> None:
        """Have the kernel enter every page, or rewrite one byte of each with itself: the content stays as it is."""
        if _populated(self._layers):
            return
        for layer in self._layers:
            for touched in (layer[:, :: mmap.PAGESIZE], layer[:, -1:]):
                np.bitwise_or(touched, 0, out=touched)


def _populated(layers: Sequence[ByteMatrix]) -> bool:
    """Enter all pages at once, for half the CPU time of one fault for each.

    Returns False if the layers do not fill one region, or if the kernel is older than 5.14.
    """
    starts = [layer.__array_interface__["data"][0] for layer in layers]
    spans = [(len(layer) - 1) * layer.strides[0] + layer.shape[1] for layer in layers]
    first, end = min(starts), max(start + span for start, span in zip(starts, spans, strict=True))
    if sum(layer.size for layer in layers) != end - first:
        return False
    first -= first % mmap.PAGESIZE
    advised: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_POPULATE_WRITE)
    return advised == 0


def _stacks(layers: Sequence[ByteMatrix]) -> list[npt.NDArray[np.uint8]]:
    """View equally spaced layers as one uint8 [layers, num_blocks, block_bytes]; otherwise return them one by one."""
    starts = [layer.__array_interface__["data"][0] for layer in layers]
    distances = {after - before for before, after in pairwise(starts)}
    alike = len({(layer.shape, layer.strides) for layer in layers}) == 1
    if len(distances) != 1 or not alike:
        return [layer[np.newaxis] for layer in layers]
    shape, strides = (len(layers), *layers[0].shape), (*distances, *layers[0].strides)
    return [np.lib.stride_tricks.as_strided(layers[0], shape, strides)]


def runs(source_ids: Sequence[int], target_ids: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first source, first target, count) of runs, at most `most` long, that ascend by one on both sides."""
    start = 0
    for index in range(1, len(source_ids) + 1):
        steps = index - start
        if (
            index == len(source_ids)
            or steps == most
            or source_ids[index] != source_ids[start] + steps
            or target_ids[index] != target_ids[start] + steps
        ):
            yield source_ids[start], target_ids[start], steps
            start = index
