"""The kernel that copies blocks on GPUs, run on host memory by Triton's interpreter."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ridgeline.kv_transfer.memory import rows

KERNEL = "ridgeline.kv_transfer.memory.row_kernel"


@contextmanager
def interpreted_kernel(piece: int | None = None) -> Iterator[None]:
    """Have host memory served by the kernel meanwhile, where it is a `DeviceMemory`; once at a time in a process.

    A larger `piece` for each program than on a GPU makes the interpreter faster.
    """
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")  # read when the kernel is decorated
        patched.delitem(sys.modules, KERNEL, raising=False)
        patched.setattr(rows, "_kernels", {})
        kernel = importlib.import_module(KERNEL)
        kernel.PIECE = piece or kernel.PIECE
        yield
        del sys.modules[KERNEL]
