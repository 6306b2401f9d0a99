"""Where the bytes of a `BlockPool` lie and how they move: the interface, and the one for host memory.

`device_memory` has the one for GPUs. A memory may assume that ids and sizes were checked: only `BlockPool` calls it.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

ByteMatrix: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [num_blocks, block_bytes]."""


class BlockMemory(ABC):
    """Layers of blocks; each layer is [num_blocks, block_bytes]. Called from any thread."""

    shapes: tuple[tuple[int, ...], ...]
    """One for each layer."""

    @abstractmethod
    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """As `BlockPool.read`."""

    @abstractmethod
    def write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        """Copy row i of `source` to block `block_ids[i]`; returns when the bytes are there."""

    @abstractmethod
    def commit(self) -> None:
        """As `BlockPool.commit`."""


class HostMemory(BlockMemory):
    """Blocks that this process addresses directly: reading them makes no copy. The rows are views into the cache."""

    def __init__(self, layers: Sequence[ByteMatrix]) -> None:
        self._layers = tuple(layers)
        self.shapes = tuple(layer.shape for layer in layers)

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        rows = self._layers[layer]
        return [memoryview(rows[block_id]) for block_id in block_ids]

    def write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        self._layers[layer][list(block_ids)] = source

    def commit(self) -> None:
        """Rewrite one byte of every page with itself: what the cache holds stays, whatever it is."""
        for layer in self._layers:
            for touched in (layer[:, :: mmap.PAGESIZE], layer[:, -1:]):
                np.bitwise_or(touched, 0, out=touched)
