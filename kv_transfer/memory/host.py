"""Blocks in host memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.kv_transfer.memory.blocks import BlockPool, ByteMatrix, Span

COPY_STEP_BYTES: Final = 8 << 20
MADV_POPULATE_WRITE = 23
"""Of madvise(2); Python's `mmap` does not name it."""


class HostMemory(BlockPool):
    """Blocks in this process's address space, so that reading makes no copy. The rows are views into the cache."""

    def __init__(self, layers: Sequence[ByteMatrix]) -> None:
        super().__init__([layer.shape for layer in layers], torch.device("cpu"))
        self.matrices = tuple(layers)
        """Each layer's blocks."""
        self._stacks = _stacks(self.matrices)

    def _read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        rows = self.matrices[layer]
        return [memoryview(rows[block_id]) for block_id in block_ids]

    def _write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        self.matrices[layer][list(block_ids)] = source

    def _gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        blocks, ids = self.staging(len(layers), len(block_ids)), list(block_ids)
        for layer, rows in zip(layers, blocks.numpy(), strict=True):
            rows[:] = self.matrices[layer][ids]
        return blocks

    def _scatter(self, layers: range, block_ids: Sequence[int], source: torch.Tensor) -> None:
        for layer, rows in zip(layers, source.numpy(), strict=True):
            self._write(layer, block_ids, rows)

    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        return torch.empty((num_layers, num_blocks, self.block_bytes), dtype=torch.uint8)

    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        import xxhash  # here, because `tools.gpu.check` runs this package where there is torch and numpy alone

        digest = xxhash.xxh3_64_digest(blocks.numpy().data)
        return torch.tensor(int.from_bytes(digest, "big", signed=True))

    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        return [int(checksum) for checksum in checksums]

    def _part(self, start: int, num_bytes: int) -> HostMemory:
        return HostMemory([layer[:, start : start + num_bytes] for layer in self.matrices])

    def spans(self) -> list[Span]:
        return [Span.of(rows.__array_interface__["data"][0], rows.strides[0], rows.shape) for rows in self.matrices]

    def _copies_from(
        self, source: Any, source_ids: Sequence[int], block_ids: Sequence[int], layers: range
    ) -> Generator[int, None, None]:
        if not isinstance(source, HostMemory):
            raise ValueError(f"blocks on {source.device} were not opened in host memory")
        most = max(1, COPY_STEP_BYTES // (len(layers) * self.block_bytes))
        for source_first, first, count in runs(source_ids, block_ids, most):
            self._copy_run(source, source_first, first, count, slice(layers.start, layers.stop))
            yield count * len(layers) * self.block_bytes

    def _copy_run(self, source: HostMemory, source_first: int, first: int, count: int, layers: slice) -> None:
        """Copy `count` adjacent blocks of these layers, in one call if it can be, and let other threads run."""
        if len(self._stacks) == len(source._stacks) == 1:
            pairs = zip([self._stacks[0][layers]], [source._stacks[0][layers]], strict=True)
        else:
            pairs = zip(
                [layer[np.newaxis] for layer in self.matrices[layers]],
                [layer[np.newaxis] for layer in source.matrices[layers]],
                strict=True,
            )
        for target, from_ in pairs:
            target[:, first : first + count] = from_[:, source_first : source_first + count]

    def commit(self) -> None:
        """Have the kernel enter every page, or rewrite one byte of each with itself: the content stays as it is."""
        if _populated(self.matrices):
            return
        for layer in self.matrices:
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
