"""Blocks in a GPU's memory: gathered or scattered there (`rows`), then moved to or from the host in one copy.

Each transferring thread has its own lane: reusable buffers, page-locked on the host, and one of a few CUDA streams. The
streams have high priority, because torch hands out 32 of each priority in turn: a stream for each of our threads would
soon be one that the engine has too, and then copies queue behind its kernels, or its kernels behind a copy. A thread
waits for its own copies only, with an event, and soon sleeps meanwhile: the engine may need the core.

- A read need not wait for the engine. Blocks are offered after their request has finished, which the engine learns from
  a sampled token that is already on the host; the kernels that wrote the blocks ran before it on the same stream.
- A write has reached the GPU's memory when `write` returns; the step that uses the blocks is launched later.
- Blocks of another pool that this device reaches, its own or a peer's, are copied in one pass, all layers at once. The
  next piece is queued before the last one is waited for, so that the device does not wait for this thread.

On tensors in host memory the same code runs without streams, for tests.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch

from ridgeline.kv_transfer.memory import rows
from ridgeline.kv_transfer.memory.blocks import BlockPool, ByteMatrix, Span, byte_rows
from ridgeline.kv_transfer.memory.host import HostMemory
from ridgeline.kv_transfer.memory.rows import Layers, Rows, dense

STREAMS: Final = 4
"""Enough to keep both copy engines and a kernel busy; more threads than that share them."""
TRANSFER_PRIORITY: Final = -1
LOOK_S: Final = 50e-6
"""How long a thread looks at an event again and again before it sleeps: a GPU copies a frame of 2 MiB in less, and
to be woken takes about as long."""


OnLost = Callable[[BaseException], object]


def pool_of(layers: Sequence[torch.Tensor], on_lost: OnLost = lambda _error: None) -> BlockPool:
    """View each layer's tensor [num_blocks, ...] as bytes where it lies, without copying.

    A layer may be a strided view into storage shared by all layers, as long as each of its blocks is one run of bytes;
    the order of the inner dimensions in memory does not matter. For `on_lost` see `DeviceMemory`. Raises ValueError if
    a block is not one run of bytes, or if a layer is neither in host memory nor on a CUDA device.
    """
    rows = [byte_rows(index, tensor) for index, tensor in enumerate(layers)]
    kinds = {tensor.device.type for tensor in rows}
    if kinds <= {"cpu"}:
        return HostMemory([tensor.numpy() for tensor in rows])
    if kinds == {"cuda"}:
        return DeviceMemory(rows, on_lost=on_lost)
    raise ValueError(f"layers are on {sorted(kinds)}: blocks must all be in host memory or all on a CUDA device")


def works(device: torch.device) -> bool:
    """Return whether CUDA still does what this process asks: after an illegal access, for instance, it never does."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


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


class DeviceMemory(BlockPool):
    """`layers[i]` is uint8 [num_blocks, block_bytes], a view into the cache on one device; blocks may be strided."""

    def __init__(
        self, layers: Sequence[torch.Tensor], *, may_use_kernel: bool = True, on_lost: OnLost = lambda _error: None
    ) -> None:
        """Unless it `may_use_kernel`, blocks are copied by torch's functions; `tools.gpu` compares the two.

        `on_lost` is called with an error after which CUDA does nothing more for this process, before it is raised.
        """
        devices = {layer.device for layer in layers}
        if len(devices) != 1:
            raise ValueError(f"all layers must be on one device, not on {sorted(map(str, devices))}")
        super().__init__([tuple(layer.shape) for layer in layers], layers[0].device)
        self._layers = Layers(layers)
        self._lanes = threading.local()
        self._streams = Streams(self.device)
        self._may_use_kernel = may_use_kernel
        self._on_lost = on_lost

    def _copies_from(
        self, source: Any, source_ids: Sequence[int], block_ids: Sequence[int], layers: range
    ) -> Generator[int, None, None]:
        """Copy from memory that this device can read.

        What was yielded has arrived. However this ends, nothing that it began still writes then.
        """
        if not isinstance(source, DeviceMemory) or source.device != self.device:
            raise ValueError(f"blocks on {source.device} were not opened on {self.device}")
        if not block_ids:
            return
        layer_bytes = len(layers) * self.block_bytes
        lane = self._lane()
        under_way: deque[tuple[Mark, int]] = deque()
        with lane.watched():
            try:
                with lane.selected():
                    copy = self._copy(source._rows(layers, source_ids), self._rows(layers, block_ids))
                most = max(1, copy.piece_bytes // layer_bytes)
                for start in range(0, len(block_ids), most):
                    piece = slice(start, start + most)
                    with lane.selected():  # not during a yield: it is a state of the thread, which is its caller's then
                        copy.queue(piece)
                        under_way.append((lane.mark(), len(block_ids[piece]) * layer_bytes))
                    if len(under_way) > 1:
                        yield _arrived(*under_way.popleft())
                while under_way:
                    yield _arrived(*under_way.popleft())
            finally:
                lane.mark().wait()

    def _rows(self, layers: range, block_ids: Sequence[int]) -> Rows:
        return Rows(self._layers, slice(layers.start, layers.stop), block_ids)

    def _copy(self, source: Rows, target: Rows) -> rows.RowCopy:
        return rows.prepare(source, target, may_use_kernel=self._may_use_kernel)

    def _read(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        lane = self._lane()
        with lane.running():
            on_device, on_host = lane.buffers(len(block_ids), self.block_bytes)
            self._copy(self._rows(range(layer, layer + 1), block_ids), dense(on_device[None])).queue()
            on_host.copy_(on_device, non_blocking=True)
        blocks: ByteMatrix = on_host.numpy()
        return [memoryview(block) for block in blocks]

    def _write(self, layer: int, block_ids: Sequence[int], source: ByteMatrix) -> None:
        lane = self._lane()
        with lane.running():
            on_device, on_host = lane.buffers(len(block_ids), self.block_bytes)
            np.copyto(on_host.numpy(), source)
            on_device.copy_(on_host, non_blocking=True)
            self._copy(dense(on_device[None]), self._rows(range(layer, layer + 1), block_ids)).queue()

    def _gather(self, layers: range, block_ids: Sequence[int]) -> torch.Tensor:
        lane = self._lane()
        with lane.running():
            blocks = lane.tensor(len(layers), len(block_ids), self.block_bytes)
            self._copy(self._rows(layers, block_ids), dense(blocks)).queue()
            return blocks

    def _scatter(self, layers: range, block_ids: Sequence[int], source: torch.Tensor) -> None:
        lane = self._lane()
        with lane.running():
            self._copy(dense(source), self._rows(layers, block_ids)).queue()

    def staging(self, num_layers: int, num_blocks: int) -> torch.Tensor:
        lane = self._lane()
        with lane.running():
            return lane.tensor(num_layers, num_blocks, self.block_bytes)

    def checksum(self, blocks: torch.Tensor) -> torch.Tensor:
        with self._lane().selected():
            return weighted_sum(blocks)

    def on_host(self, checksums: Sequence[torch.Tensor]) -> list[int]:
        with self._lane().selected():
            return torch.stack([*checksums]).tolist() if checksums else []

    def _part(self, start: int, num_bytes: int) -> DeviceMemory:
        narrowed = DeviceMemory(
            [layer[:, start : start + num_bytes] for layer in self._layers.tensors],
            may_use_kernel=self._may_use_kernel,
            on_lost=self._on_lost,
        )
        narrowed._lanes = self._lanes  # a thread's stream and page-locked buffers serve all parts
        narrowed._streams = self._streams
        return narrowed

    def spans(self) -> list[Span]:
        return [Span.of(layer.data_ptr(), layer.stride(0), layer.shape) for layer in self._layers.tensors]

    def commit(self) -> None:
        """Have the kernel compiled that copies blocks. A GPU's memory is resident once it is allocated."""
        self.gather(range(1), [0])

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _Lane(self.device, self._streams.take(), self._on_lost)
        return lane


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
        """Wait until all that was launched before this point has ended, asleep after the first moment."""
        if self._event is None:
            return
        sleep_s = time.perf_counter() + LOOK_S
        while not self._event.query():
            if time.perf_counter() > sleep_s:
                self._event.synchronize()
                return


class _Lane:
    """One thread's buffers, and the stream it uses. The buffers grow to the largest frame and are kept."""

    def __init__(self, device: torch.device, stream: Any, on_lost: OnLost) -> None:
        self._device = device
        self._stream = stream
        self._on_lost = on_lost
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(0, dtype=torch.uint8)

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Launch what the body asks for on this lane's stream, and do not wait for it.

        It runs in inference mode, because a cache allocated in inference mode can only be changed there.
        """
        with torch.inference_mode(), self.watched():
            if self._stream is None:
                yield
                return
            with torch.cuda.stream(self._stream):  # this also selects the device: a new thread starts on the first one
                yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Report an error of the body after which CUDA does not work any more."""
        try:
            yield
        except RuntimeError as error:
            if not works(self._device):
                self._on_lost(error)
            raise

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
