"""Rows of bytes, copied by lists of indices in all layers at once: by one kernel where Triton works, else by torch.

The kernel (`row_kernel`) reads and writes each byte once, in one launch. Torch's own functions need a launch or two for
each layer, and a buffer if both sides are indexed. They serve layers that are laid out in different ways, machines on
which Triton does not work, and host memory. Which way is taken is logged at its first use.

All that is called here is queued on the caller's present stream, on which tables and buffers are allocated too: torch
gives their memory to others only behind what was queued there, so nothing here waits or is kept for later.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.contracts import errors

log = logging.getLogger(__name__)

WORD_BYTES: Final = 8
WIDEST_BYTES: Final = 16
"""The widest access of a thread on a GPU."""
KERNEL_PIECE_BYTES: Final = 128 << 20
"""Bytes of one launch: some 0.1 ms on an H100, several times as long as this process needs to launch the next."""
INDEXED_PIECE_BYTES: Final = 32 << 20
"""The same for torch's functions: long beside a launch, and a buffer for which a GPU full of an engine has room."""

EVERY: Final = slice(None)
Addresses = npt.NDArray[np.int64]


class Layers:
    """Layers of rows on one device, uint8 [num_rows, row_bytes] each; the rows of a layer may be strided."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first, strides = tensors[0], {tensor.stride() for tensor in tensors}
        self.device, self.row_bytes = first.device, int(first.shape[1])
        self.addresses: Addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        self.stride_bytes = first.stride(0) if len(strides) == 1 and first.stride(1) == 1 else None
        """From one row to the next; None if it is not the same in all layers."""
        self.unit = gcd(WIDEST_BYTES, self.row_bytes, self.stride_bytes or 1, *map(int, self.addresses))
        """The widest access, in bytes, of which all addresses and sizes are multiples."""
        self._tensors: Sequence[torch.Tensor] | torch.Tensor = tensors

    @classmethod
    def dense(cls, blocks: torch.Tensor) -> Layers:
        """Return the layers of a contiguous tensor [layers, num_rows, row_bytes], without a view of each."""
        made = cls.__new__(cls)
        num_layers, num_rows, row_bytes = blocks.shape
        made.device, made.row_bytes, made.stride_bytes, made._tensors = blocks.device, row_bytes, row_bytes, blocks
        made.addresses = blocks.data_ptr() + np.arange(num_layers) * (num_rows * row_bytes)
        made.unit = gcd(WIDEST_BYTES, row_bytes, blocks.data_ptr())
        return made

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Each layer's rows."""
        return tuple(self._tensors)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of some layers, the same of each. There may be no row twice among those that are written."""

    layers: Layers
    which: slice
    """Of the layers."""
    ids: Sequence[int] | None
    """None: all rows, in order."""


def dense(blocks: torch.Tensor) -> Rows:
    """Return all rows of a tensor [layers, num_rows, row_bytes]."""
    return Rows(Layers.dense(blocks) if blocks.is_contiguous() else Layers(blocks.unbind()), EVERY, None)


class RowCopy(ABC):
    """A copy from rows to as many others of the same size and device, of which each piece is queued when asked for.

    No row may be written that is read under another index.
    """

    piece_bytes: int
    """How much is best queued at a time."""

    @abstractmethod
    def queue(self, piece: slice = EVERY) -> None:
        """Queue the copy of the rows at these places of the two lists."""


def prepare(source: Rows, target: Rows, *, may_use_kernel: bool = True) -> RowCopy:
    """Return the copy of rows, by the kernel if it works here for rows laid out like these; one side has ids."""
    from_, to = source.layers, target.layers
    if may_use_kernel and from_.stride_bytes is not None and to.stride_bytes is not None:
        unit = gcd(from_.unit, to.unit)
        if (launch := kernel_for(to.device, unit)) is not None:
            return _KernelCopy(source, target, from_.row_bytes // unit, launch)
    return _IndexedCopy(source, target)


# --- by the kernel

Launch = Callable[[torch.Tensor, tuple[int, int], int, int, int], None]
"""(table, rows x layers, first row, rows in the table, units in a row); see `row_kernel.copy_rows`."""


class _KernelCopy(RowCopy):
    piece_bytes = KERNEL_PIECE_BYTES

    def __init__(self, source: Rows, target: Rows, row_units: int, launch: Launch) -> None:
        ids = target.ids if source.ids is None else source.ids
        assert ids is not None
        self._num_layers = len(source.layers.addresses[source.which])
        self._num_rows = num_rows = len(ids)
        self._row_units = row_units
        self._launch = launch
        device = source.layers.device
        host = torch.empty(2 * (self._num_layers + num_rows), dtype=torch.int64, pin_memory=device.type == "cuda")
        table, start = host.numpy(), 2 * self._num_layers
        for side, rows in enumerate((source, target)):
            assert rows.layers.stride_bytes is not None
            table[side * self._num_layers :][: self._num_layers] = rows.layers.addresses[rows.which]
            numbers = np.arange(num_rows) if rows.ids is None else np.array(rows.ids, dtype=np.int64)
            np.multiply(numbers, rows.layers.stride_bytes, out=table[start + side * num_rows :][:num_rows])
        self._table = host.to(device, non_blocking=True)  # also selects the device's context, which Triton needs

    def queue(self, piece: slice = EVERY) -> None:
        rows = range(self._num_rows)[piece]
        if rows:
            self._launch(self._table, (len(rows), self._num_layers), rows.start, self._num_rows, self._row_units)


_kernels: Final[dict[tuple[torch.device, int], Launch | None]] = {}
_trying: Final = threading.Lock()
"""Triton compiles at the first launch, and is not said to do so in several threads at once."""


def kernel_for(device: torch.device, unit: int) -> Launch | None:
    """Return what launches the kernel for rows that are multiples of `unit` bytes; None if that does not work here.

    At first it is compiled and tried on a few rows, which takes a second.
    """
    if (device, unit) not in _kernels:
        with _trying:
            if (device, unit) not in _kernels:
                _kernels[device, unit] = _tried(device, unit)
    return _kernels[device, unit]


def _tried(device: torch.device, unit: int) -> Launch | None:
    try:
        from ridgeline.kv_transfer.memory import row_kernel

        if not row_kernel.serves(device):
            return None
        launch = row_kernel.launcher(unit)
        _require_right(device, unit, launch)
    except Exception as error:  # noqa: BLE001  Triton, its compiler or the driver: torch's functions do as well then
        log.warning("KV blocks on %s are copied by torch.index_select, since Triton does not work: %s", device,
                    errors.first_line(error))  # fmt: skip
        return None
    log.info("KV blocks on %s are copied by one Triton kernel, in units of %d bytes", device, unit)
    return launch


def _require_right(device: torch.device, unit: int, launch: Launch) -> None:
    """Raise RuntimeError unless three rows of two layers are copied as they should be."""
    source = torch.arange(2 * 4 * 3 * unit, dtype=torch.int32, device=device).to(torch.uint8).view(2, 4, 3 * unit)
    target = torch.zeros_like(source)
    expected = target.clone()
    expected[:, [2, 0, 3]] = source[:, [3, 1, 0]]
    from_, to = Rows(Layers.dense(source), EVERY, [3, 1, 0]), Rows(Layers.dense(target), EVERY, [2, 0, 3])
    _KernelCopy(from_, to, 3, launch).queue()
    if not torch.equal(target, expected):
        raise RuntimeError("its copy of a few rows is not equal to them")


# --- by torch


class _IndexedCopy(RowCopy):
    piece_bytes = INDEXED_PIECE_BYTES

    def __init__(self, source: Rows, target: Rows) -> None:
        device = source.layers.device
        layers = zip(source.layers.tensors[source.which], target.layers.tensors[target.which], strict=True)
        self._pairs = [_in_words(*pair) for pair in layers]
        self._from, self._to = (
            None if rows.ids is None else torch.tensor(rows.ids, dtype=torch.int64, device=device)
            for rows in (source, target)
        )

    def queue(self, piece: slice = EVERY) -> None:
        for from_, to in self._pairs:
            if self._to is None:
                assert self._from is not None
                torch.index_select(from_, 0, self._from[piece], out=to[piece])
            else:
                chosen = from_[piece] if self._from is None else from_.index_select(0, self._from[piece])
                to.index_copy_(0, self._to[piece], chosen)


def _in_words(*matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View rows of bytes as int64 if rows, strides and addresses of all are multiples of eight bytes."""
    for matrix in matrices:
        *outer, inner = matrix.stride()
        if matrix.shape[-1] % WORD_BYTES or inner != 1 or any(stride % WORD_BYTES for stride in outer):
            return matrices
        if matrix.storage_offset() % WORD_BYTES or matrix.data_ptr() % WORD_BYTES:
            return matrices
    return tuple(matrix.view(torch.int64) for matrix in matrices)
