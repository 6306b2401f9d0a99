"""Blocks in a GPU's memory: gathered or scattered there by index, then moved to or from the host in one copy.

Each transferring thread has its own lane: reusable buffers, page-locked on the host, and one of a few CUDA streams. The
streams have high priority, because torch hands out 32 of each priority in turn: a stream for each of our threads would
soon be one that the engine has too, and then copies queue behind its kernels, or its kernels behind a copy. A thread
waits for its own copies only, with an event, and does not spin meanwhile: the engine may need the core.

- A read need not wait for the engine. Blocks are offered after their request has finished, which the engine learns from
  a sampled token that is already on the host; the kernels that wrote the blocks ran before it on the same stream.
- A write has reached the GPU's memory when `write` returns; the step that uses the blocks is launched later.
- Blocks of another pool that this device reaches, its own or a peer's, are copied by index, all layers at once. The
  next piece is queued before the last one is waited for, so that the device does not wait for this thread.

On tensors in host memory the same code runs without streams, for tests.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from kv_transfer.memory.host import BlockMemory, ByteMatrix, HostMemory, Span

STREAMS: Final = 4
"""Enough to keep both copy engines and a kernel busy; more threads than that share them."""
TRANSFER_PRIORITY: Final = -1
WORD_BYTES: Final = 8
COPY_PIECE_BYTES: Final = 32 << 20
"""Bytes copied between two pools at a time: long beside a launch, and room that a GPU has when an engine fills it."""


class Streams:
    """The streams of one device for transfers, made at their first use and shared by all threads."""

    def __init__(self, device: torch.device, make: Callable[..., Any] = torch.cuda.Stream) -> None:
        self._device = device
        self._make = make
        self._made: list[Any] = []
        self._turn = itertools.count()
        self._lock = threading.Lock()

    def take(self) -> Any:
        """Return the next stream in turn; None for a device that has none."""
        if self._device.type != "cuda":
            return None
        with self._lock:
            number = next(self._turn) % STREAMS
            if number == len(self._made):
                self._made.append(self._make(self._device, priority=TRANSFER_PRIORITY))
            return self._made[number]


class DeviceMemory(BlockMemory):
    """`layers[i]` is uint8 [num_blocks, block_bytes], a view into the cache on one device; blocks may be strided."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        devices = {layer.device for layer in layers}
        if len(devices) > 1:
            raise ValueError(f"all layers must be on one device, not on {sorted(map(str, devices))}")
        self._layers = tuple(layers)
        self.shapes = tuple(tuple(layer.shape) for layer in layers)
        self.device = layers[0].device if layers else torch.device("cpu")
        self._lanes = threading.local()
        self._streams = Streams(self.device)
        self._stack = _stacked(self._layers)

    @classmethod
    def over(cls, memory: BlockMemory) -> DeviceMemory:
        """Return this memory as one whose blocks are copied by index; of host memory, a view without a copy."""
        if isinstance(memory, HostMemory):
            return cls([torch.from_numpy(rows) for rows in memory.layers])
        assert isinstance(memory, DeviceMemory)
        return memory

    def copies_from(
        self, source: DeviceMemory, source_ids: Sequence[int], block_ids: Sequence[int], layers: range
    ) -> Generator[int, None, None]:
        """Copy these layers of blocks from memory that this device can read, see `BlockPool.copies_from`.

        What was yielded has arrived. However this ends, nothing that it began still writes then.
        """
        if source.device != self.device:
            raise ValueError(f"blocks on {source.device} were not opened on {self.device}")
        layer_bytes = len(layers) * self.shapes[0][1]
        most = max(1, COPY_PIECE_BYTES // layer_bytes)
        within = self._addresses() & source._addresses()  # torch refuses to copy from a tensor straight into itself
        lane = self._lane()
        with lane.selected():
            from_indices, to_indices = lane.indices(source_ids), lane.indices(block_ids)
        under_way: deque[tuple[Mark, int]] = deque()
        try:
            for start in range(0, len(block_ids), most):
                piece = slice(start, start + most)
                run = None if within else _run_of(source_ids[piece])
                with lane.selected():  # not during a yield: both are states of the thread, which is its caller's then
                    for target, blocks in self._pairs(source, layers):
                        chosen = blocks.index_select(1, from_indices[piece]) if run is None else blocks[:, run]
                        target.index_copy_(1, to_indices[piece], chosen)
                    under_way.append((lane.mark(), len(block_ids[piece]) * layer_bytes))
                if len(under_way) > 1:
                    yield _arrived(*under_way.popleft())
            while under_way:
                yield _arrived(*under_way.popleft())
        finally:
            lane.mark().wait()

    def _addresses(self) -> set[int]:
        return {layer.untyped_storage().data_ptr() for layer in self._layers}

    def _pairs(self, source: DeviceMemory, layers: range) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield (target, source) as [layers, num_blocks, block bytes or words]: one pair if both are evenly spaced."""
        if self._stack is not None and source._stack is not None:
            yield _in_words(self._stack[layers.start : layers.stop], source._stack[layers.start : layers.stop])
            return
        for layer in layers:
            yield _in_words(self._layers[layer][None], source._layers[layer][None])

    def read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        rows = self._layers[layer]
        lane = self._lane()
        with lane.running():
            on_device, on_host = lane.buffers(len(block_ids), rows.shape[1])
            gather_rows(rows, lane.indices(block_ids), on_device)
            on_host.copy_(on_device, non_blocking=True)
        blocks: ByteMatrix = on_host.numpy()
        return [memoryview(block) for block in blocks]

    def write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        rows = self._layers[layer]
        lane = self._lane()
        with lane.running():
            on_device, on_host = lane.buffers(len(block_ids), rows.shape[1])
            np.copyto(on_host.numpy(), source)
            on_device.copy_(on_host, non_blocking=True)
            scatter_rows(rows, lane.indices(block_ids), on_device)

    def gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        lane = self._lane()
        with lane.running():
            blocks, indices = lane.tensor(len(layers), len(block_ids), self.shapes[0][1]), lane.indices(block_ids)
            for places, rows in self._views(layers):
                gather_rows(rows, indices, blocks[places])
            return blocks

    def scatter(self, layers: range, block_ids: Sequence[int], source: torch.Tensor) -> None:
        lane = self._lane()
        with lane.running():
            indices = lane.indices(block_ids)
            for places, rows in self._views(layers):
                scatter_rows(rows, indices, source[places])

    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        lane = self._lane()
        with lane.running():
            return lane.tensor(num_layers, num_blocks, self.shapes[0][1])

    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        with self._lane().selected():
            return weighted_sum(blocks)

    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        with self._lane().selected():
            return torch.stack([*checksums]).tolist() if checksums else []

    def _views(self, layers: range) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (places among `layers`, [places, num_blocks, block_bytes]): all at once if they are evenly spaced."""
        if self._stack is not None:
            yield slice(0, len(layers)), self._stack[layers.start : layers.stop]
            return
        for place, layer in enumerate(layers):
            yield slice(place, place + 1), self._layers[layer][None]

    def part(self, start: int, num_bytes: int) -> DeviceMemory:
        narrowed = DeviceMemory([layer[:, start : start + num_bytes] for layer in self._layers])
        narrowed._lanes = self._lanes  # a thread's stream and page-locked buffers serve all parts
        narrowed._streams = self._streams
        return narrowed

    def spans(self) -> list[Span]:
        return [Span.of(rows.data_ptr(), rows.stride(0), rows.shape) for rows in self._layers]

    def commit(self) -> None:
        """Do nothing: a GPU's memory is resident once it is allocated."""

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _Lane(self._layers[0].device, self._streams.take())
        return lane


def gather_rows(rows: torch.Tensor, indices: torch.Tensor, into: torch.Tensor) -> None:
    """Copy these rows of bytes, of each layer if there are several, into `into`.

    In words of eight bytes where both allow it: fewer, wider accesses.
    """
    rows, into = _in_words(rows, into)
    torch.index_select(rows, -2, indices, out=into)


def scatter_rows(rows: torch.Tensor, indices: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the rows of `source` into these distinct rows, of each layer if there are several, in words if possible."""
    rows, source = _in_words(rows, source)
    rows.index_copy_(-2, indices, source)


def _in_words(*matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View rows of bytes as int64 if rows, strides and addresses of all are multiples of eight bytes."""
    for matrix in matrices:
        *outer, inner = matrix.stride()
        if matrix.shape[-1] % WORD_BYTES or inner != 1 or any(stride % WORD_BYTES for stride in outer):
            return matrices
        if matrix.storage_offset() % WORD_BYTES or matrix.data_ptr() % WORD_BYTES:
            return matrices
    return tuple(matrix.view(torch.int64) for matrix in matrices)


def _stacked(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """View layers that are alike and evenly spaced in one storage as [layers, num_blocks, block_bytes]; else None."""
    distances = {after.storage_offset() - before.storage_offset() for before, after in pairwise(layers)}
    alike = {(layer.untyped_storage().data_ptr(), layer.shape, layer.stride()) for layer in layers}
    if len(distances) != 1 or len(alike) != 1 or min(distances) <= 0:
        return None
    first = layers[0]
    return first.as_strided((len(layers), *first.shape), (*distances, *first.stride()))


def _run_of(block_ids: Sequence[int]) -> slice | None:
    """Return the slice of these blocks if each follows the one before, so that they need no gathering; else None."""
    first = block_ids[0]
    return (
        slice(first, first + len(block_ids)) if list(block_ids) == list(range(first, first + len(block_ids))) else None
    )


def _arrived(mark: Mark, num_bytes: int) -> int:
    mark.wait()
    return num_bytes


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a contiguous uint8 tensor, an int64 [] where the tensor lies.

    Words of 32 bits, each times an odd weight of its own. No change within one word and no exchange of two goes
    unnoticed in a tensor of up to 2^29 words: either changes the sum by a product that is not 0 and below 2^63.
    """
    flat = tensor.reshape(-1)
    whole = flat.numel() // 4 * 4
    values = torch.cat((flat[:whole].view(torch.int32).to(torch.int64), flat[whole:].to(torch.int64)))
    weights = torch.arange(values.numel(), device=tensor.device) * 2 + 1
    return (values * weights).sum()


class Mark:
    """A point on a stream. Where there are no streams, all that was asked for before it is done already."""

    def __init__(self, stream: Any) -> None:
        self._event: Any = None
        if stream is not None:
            self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(stream)

    def wait(self) -> None:
        """Wait, asleep, until all that was launched before this point has ended."""
        if self._event is not None:
            self._event.synchronize()


class _Lane:
    """One thread's buffers, and the stream it uses. The buffers grow to the largest frame and are kept."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self._device = device
        self._stream = stream
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Launch what the body asks for on this lane's stream, and do not wait for it.

        It runs in inference mode, because a cache allocated in inference mode can only be changed there.
        """
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):  # this also selects the device: a new thread starts on the first one
                yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the body as `selected`; wait at the end, after an error too, until all it started has ended."""
        with self.selected():
            try:
                yield
            finally:
                self.mark().wait()

    def mark(self) -> Mark:
        """Return the point that this lane's stream has reached."""
        return Mark(self._stream)

    def buffers(self, num_blocks: int, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return uint8 [num_blocks, block_bytes] on the device and on the host. Call it only while `selected`."""
        num_bytes = num_blocks * block_bytes
        if self._on_host.numel() < num_bytes:
            self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        shape = (num_blocks, block_bytes)
        return self._on_device[:num_bytes].view(shape), self._on_host[:num_bytes].view(shape)

    def tensor(self, *shape: int) -> torch.Tensor:
        """Return a new uint8 tensor of this shape on the device. Call it only while `selected`.

        Its memory comes from this stream's share, so no kernel of the engine can still be using it. It is an ordinary
        tensor, not an inference-mode one, so that it can be written outside of inference mode.
        """
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=torch.uint8, device=self._device)

    def indices(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return the ids as int64 on the device. Call it only while `selected`."""
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)
