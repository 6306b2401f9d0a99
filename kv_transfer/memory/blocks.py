"""One engine's paged KV cache as bytes: layers of numbered blocks, each block one contiguous run of bytes.

This is the transports' only view of the engine's memory, on a CPU (`host`) or a GPU (`device`). It copies nothing until
asked and never looks inside a block: on CPUs the bytes inside are packed for the instruction set, so only whole blocks
are meaningful. Reads and writes may come from any thread. Leases (source) and reserved blocks (target) ensure that
nothing else uses a block at the same time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

import numpy as np
import torch

from ridgeline.kv_transfer.memory.device import DeviceMemory, OnLost
from ridgeline.kv_transfer.memory.host import BlockMemory, ByteMatrix, HostMemory, Span, runs

COPY_STEP_BYTES: Final = 8 << 20


class CannotOpen(Exception):
    """Another process's pool cannot be reached from this one; the message says why."""


class BlockPool:
    """The blocks of one engine, with checked access to them."""

    def __init__(self, layers: BlockMemory | Sequence[ByteMatrix]) -> None:
        """Wrap the cache's layers. Byte matrices are views into host memory: uint8 [num_blocks, block_bytes] each.

        Raises ValueError if there is no layer, or if the layers differ in shape.
        """
        self._memory = layers if isinstance(layers, BlockMemory) else HostMemory(layers)
        shapes = self._memory.shapes
        if not shapes:
            raise ValueError("a block pool needs at least one layer")
        if len(set(shapes)) != 1:
            raise ValueError(f"all layers must have the same shape, not {sorted(set(shapes))}")
        self.num_layers = len(shapes)
        self.num_blocks, self.block_bytes = shapes[0]

    @classmethod
    def from_layer_tensors(cls, layers: Sequence[torch.Tensor], on_lost: OnLost = lambda _error: None) -> BlockPool:
        """View each layer's tensor [num_blocks, ...] as bytes where it lies, without copying.

        A layer may be a strided view into storage shared by all layers, as long as each of its blocks is one run of
        bytes; the order of the inner dimensions in memory does not matter. For `on_lost` see `DeviceMemory`. Raises
        ValueError if a block is not one run of bytes, or if a layer is neither in host memory nor on a CUDA device.
        """
        rows = [byte_rows(index, tensor) for index, tensor in enumerate(layers)]
        kinds = {tensor.device.type for tensor in rows}
        if kinds <= {"cpu"}:
            return cls([tensor.numpy() for tensor in rows])
        if kinds == {"cuda"}:
            return cls(DeviceMemory(rows, on_lost=on_lost))
        raise ValueError(f"layers are on {sorted(kinds)}: blocks must all be in host memory or all on a CUDA device")

    def part(self, start: int, num_bytes: int) -> BlockPool:
        """Return the same blocks narrowed to `num_bytes` of each, from `start` on: the heads of one rank. No copy.

        Raises ValueError if a block has no such bytes.
        """
        if (start, num_bytes) == (0, self.block_bytes):
            return self
        if start < 0 or num_bytes <= 0 or start + num_bytes > self.block_bytes:
            raise ValueError(f"bytes {start} to {start + num_bytes} are not inside a block of {self.block_bytes}")
        return BlockPool(self._memory.part(start, num_bytes))

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

    def commit(self) -> None:
        """Touch every page of the cache, so that no transfer pays for page faults. The content does not change.

        Call it only while nothing else writes to the cache.
        """
        self._memory.commit()

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """Return the blocks' bytes in the order asked for.

        In host memory they are views of the blocks; from a GPU, a copy in a buffer that each thread reuses. They are
        valid while the blocks are pinned, until this thread's next call. Raises ValueError for ids that name no block.
        """
        self.check_block_ids(block_ids)
        return self._memory.read(layer, block_ids)

    def write(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """Copy `payload`, the bytes of these distinct blocks in order, into the pool; change nothing else.

        Returns when the bytes are there, on a GPU too. Raises ValueError if size or ids do not fit.
        """
        self.check_block_ids(block_ids)
        if payload.nbytes != len(block_ids) * self.block_bytes:
            raise ValueError(f"{payload.nbytes} bytes do not fill {len(block_ids)} blocks of {self.block_bytes}")
        source = np.frombuffer(payload, dtype=np.uint8).reshape(len(block_ids), self.block_bytes)
        self._memory.write(layer, block_ids, source)

    def spans(self) -> list[Span]:
        """Return where each layer lies, for those that read it without this process's help."""
        return self._memory.spans()

    @property
    def device(self) -> torch.device:
        """The device on which the blocks lie."""
        return self._memory.device

    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        """Return an uninitialised uint8 [num_layers, num_blocks, block_bytes] on the pool's device, contiguous."""
        return self._memory.staging(num_layers, num_blocks)

    def gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        """Return a finished copy of these layers' blocks, on the pool's device.

        It is uint8 [len(layers), len(block_ids), block_bytes], contiguous. Raises ValueError for ids that name no
        block, and for layers that are not there.
        """
        self._check_layers(layers)
        self.check_block_ids(block_ids)
        return self._memory.gather(layers, block_ids)

    def scatter(self, layers: range, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """Copy what `gather` makes into distinct blocks of these layers; change nothing else.

        Returns when the bytes are there. Raises ValueError if shape, ids or layers do not fit.
        """
        self._check_layers(layers)
        self.check_block_ids(block_ids)
        if tuple(blocks.shape) != (len(layers), len(block_ids), self.block_bytes):
            room = f"{len(layers)} layers of {len(block_ids)} blocks of {self.block_bytes} bytes"
            raise ValueError(f"{tuple(blocks.shape)} does not fill {room}")
        self._memory.scatter(layers, block_ids, blocks)

    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the checksum of a contiguous tensor, a number on the pool's device: `on_host` waits for it.

        Equal bytes in the same kind of memory give the same sum. It detects any changed byte and any two 32-bit words
        that changed places. The tensor must not change before the sum is on the host.
        """
        return self._memory.checksum(blocks)

    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        """Return the checksums as numbers, after one copy from the device."""
        return self._memory.on_host(checksums)

    def copies_from(
        self, source: BlockPool, source_ids: Sequence[int], block_ids: Sequence[int], layers: range | None = None
    ) -> Generator[int, None, None]:
        """Copy blocks from another pool that this process maps, or that this pool's device can read.

        The copying happens during iteration, which yields the number of bytes after each step of a few milliseconds.
        Only these `layers` are copied, if given. In host memory each byte is copied once, unless one of the pools is
        indexed. Raises ValueError if the pools, the ids or the layers do not match.
        """
        wanted = self.layers if layers is None else layers
        self._check_layers(wanted)
        source.check_block_ids(source_ids)
        self.check_block_ids(block_ids)
        if (source.num_layers, source.block_bytes) != (self.num_layers, self.block_bytes):
            raise ValueError("the pools do not match")
        if len(source_ids) != len(block_ids):
            raise ValueError(f"{len(source_ids)} blocks for {len(block_ids)} places")
        if not (isinstance(self._memory, HostMemory) and isinstance(source._memory, HostMemory)):
            from_, to = DeviceMemory.over(source._memory), DeviceMemory.over(self._memory)
            yield from to.copies_from(from_, source_ids, block_ids, wanted)
            return
        most = max(1, COPY_STEP_BYTES // (len(wanted) * self.block_bytes))
        for source_first, first, count in runs(source_ids, block_ids, most):
            self._memory.copy_from(source._memory, source_first, first, count, slice(wanted.start, wanted.stop))
            yield count * len(wanted) * self.block_bytes


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
