"""One engine's paged KV cache as bytes: layers, each of numbered blocks, each block one contiguous run of bytes.

The transports' only view of the engine's memory. It copies nothing until asked and never looks inside a block: on CPUs
the bytes inside are packed for the instruction set, so only whole blocks mean anything. Reads and writes may come from
any thread; that nobody uses a block at the same time is what leases (source) and reserved blocks (target) ensure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ByteMatrix: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [num_blocks, block_bytes], a view into the cache."""


class BlockPool:
    """The blocks of one engine. `layers[i]` is uint8 [num_blocks, block_bytes], sharing the engine's memory."""

    def __init__(self, layers: Sequence[ByteMatrix]) -> None:
        if not layers:
            raise ValueError("a block pool needs at least one layer")
        if len({layer.shape for layer in layers}) != 1:
            raise ValueError(f"all layers must have the same shape, not {sorted({layer.shape for layer in layers})}")
        self._layers = tuple(layers)
        self.num_layers = len(self._layers)
        self.num_blocks, self.block_bytes = self._layers[0].shape

    @classmethod
    def from_layer_tensors(cls, layers: Sequence[torch.Tensor]) -> BlockPool:
        """View each layer's tensor [num_blocks, ...] as bytes, without copying.

        A layer may be a strided view into storage shared by all layers, as long as each of its blocks is one run of
        bytes; which of the inner dimensions comes first in memory does not matter.
        """
        return cls([_byte_matrix(index, tensor) for index, tensor in enumerate(layers)])

    def check_block_ids(self, block_ids: Sequence[int]) -> None:
        """Raise ValueError unless every id names a block; negative ids do not count from the end."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            bad = [block_id for block_id in block_ids if not 0 <= block_id < self.num_blocks]
            raise ValueError(f"block ids {bad[:5]} are outside the pool's {self.num_blocks} blocks")

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The blocks' bytes in the order asked for, as views: valid only while the blocks are pinned."""
        self.check_block_ids(block_ids)
        rows = self._layers[layer]
        return [memoryview(rows[block_id]) for block_id in block_ids]

    def write(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """Copy `payload`, the bytes of these blocks in order, into the pool; touches nothing else."""
        self.check_block_ids(block_ids)
        if payload.nbytes != len(block_ids) * self.block_bytes:
            raise ValueError(f"{payload.nbytes} bytes do not fill {len(block_ids)} blocks of {self.block_bytes}")
        source = np.frombuffer(payload, dtype=np.uint8).reshape(len(block_ids), self.block_bytes)
        self._layers[layer][list(block_ids)] = source


def _byte_matrix(index: int, tensor: torch.Tensor) -> ByteMatrix:
    if tensor.device.type != "cpu":
        raise ValueError(f"layer {index} is on {tensor.device}: this pool reads blocks in host memory only")
    if tensor.dim() < 2:
        raise ValueError(f"layer {index} has shape {tuple(tensor.shape)}: expected [num_blocks, ...]")
    _require_contiguous_blocks(index, tensor)
    item_bytes = tensor.element_size()
    num_blocks = tensor.shape[0]
    block_bytes = tensor[0].numel() * item_bytes
    view = torch.empty(0, dtype=torch.uint8)
    view.set_(
        tensor.untyped_storage(),
        tensor.storage_offset() * item_bytes,
        (num_blocks, block_bytes),
        (tensor.stride(0) * item_bytes, 1),
    )
    matrix: ByteMatrix = view.numpy()
    return matrix


def _require_contiguous_blocks(index: int, tensor: torch.Tensor) -> None:
    """The inner dimensions, ordered by stride, must tile a block without holes or overlap."""
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
