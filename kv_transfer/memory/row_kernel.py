"""The kernel that copies rows by two lists of indices, in all layers at once: one launch, and each byte moves once.

It knows addresses only, so rows may lie in this process's memory or in a peer's that was opened here. It needs Triton,
which is there wherever vLLM for GPUs is; `rows` decides whether it is used.
"""

# ruff: noqa: ANN001, ANN201  the kernel's arguments are Triton's

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
PIECE = 2048
"""Elements that one program copies: 16 KiB in words of eight bytes, of which each of its 128 threads then has eight
accesses of 16 bytes under way; 2 MiB are as many programs as an H100 has multiprocessors."""


@triton.jit(do_not_specialize=["first", "num_rows", "row_units"])  # type: ignore[untyped-decorator]
def copy_rows(table, first, num_rows, row_units, UNIT: tl.constexpr, PIECE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy rows `first` and on, as many as the grid has times the pieces of a row, in as many layers as it has.

    `table` is int64: the addresses of the layers read and of those written, then for each of `num_rows` the offset of
    the row that is read and of the one that is written. A row has `row_units` units of UNIT bytes, of which every
    address and offset is a multiple. Everything that is added to an address has 64 bits: a cache is larger than 2 GiB.
    """
    num_layers = tl.num_programs(1)
    layer = tl.program_id(1)
    WORD: tl.constexpr = 8 if UNIT >= 8 else UNIT
    words = row_units * (UNIT // WORD)
    pieces = (words + PIECE - 1) // PIECE
    row = first + tl.program_id(0) // pieces
    rows = table + 2 * num_layers
    source = tl.load(table + layer) + tl.load(rows + row)
    target = tl.load(table + num_layers + layer) + tl.load(rows + num_rows + row)
    word_type: tl.constexpr = tl.int64 if WORD == 8 else tl.int32 if WORD == 4 else tl.int16 if WORD == 2 else tl.int8
    from_ = tl.multiple_of(source.to(tl.pointer_type(word_type)), UNIT)
    to = tl.multiple_of(target.to(tl.pointer_type(word_type)), UNIT)
    offsets = (tl.program_id(0) % pieces) * PIECE + tl.arange(0, PIECE)
    inside = offsets < words
    tl.store(to + offsets, tl.load(from_ + offsets, mask=inside), mask=inside)


def serves(device: torch.device) -> bool:
    """Return whether Triton has anything for this device; its interpreter (TRITON_INTERPRET=1) serves host memory."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def launcher(unit: int) -> Callable[[torch.Tensor, tuple[int, int], int, int, int], None]:
    """Return what launches the kernel for one unit on the present stream; see `rows.Launch`."""

    def launch(table: torch.Tensor, shape: tuple[int, int], first: int, num_rows: int, row_units: int) -> None:
        rows, layers = shape
        pieces = -(-row_units * unit // min(unit, WORD_BYTES) // PIECE)
        copy_rows[rows * pieces, layers](table, first, num_rows, row_units, UNIT=unit, PIECE=PIECE)

    return launch
