"""What this device reaches, against what roofline/hardware.py says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ridgeline.roofline.hardware import Hardware, hardware_of_gpu
from tools.gpu.machine import Machine
from tools.gpu.result import Row

SECTION = "peaks"
ABOVE_THE_TABLE = 1.02
"""More than this part of a published peak means that the table is wrong."""
FP8_CAPABILITY = (8, 9)


def table_entry(machine: Machine, *, fp8: bool = False) -> Hardware | None:
    """Return the device's entry in the table, if it has one."""
    return None if machine.dry else hardware_of_gpu(machine.name, machine.memory_bytes, fp8=fp8)


def copy_bytes_per_s(machine: Machine) -> float:
    """Return what a copy within the device moves, reads and writes added up."""
    size = machine.size(1 << 30, 1 << 22)
    source = torch.empty(size, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * size / machine.seconds(lambda: target.copy_(source))


def read_bytes_per_s(machine: Machine) -> float:
    """Return what a sum over a large vector reads, as a decode step reads weights."""
    count = machine.size(1 << 29, 1 << 20)
    values = torch.ones(count, dtype=torch.bfloat16, device=machine.device)
    return 2 * count / machine.seconds(lambda: values.sum())


def flops(machine: Machine, multiply: Callable[[int], Callable[[], object]]) -> float:
    """Return the best FLOP/s of square products of several sizes."""
    sizes = (4096, 8192, 12288) if not machine.dry else (128,)
    return max(2 * size**3 / machine.seconds(multiply(size), 10) for size in sizes)


def dense(machine: Machine, dtype: torch.dtype) -> Callable[[int], Callable[[], object]]:
    """Return what makes a product of two square matrices of this type."""

    def of_size(size: int) -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=machine.device).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype, device=machine.device)
        return lambda: torch.mm(left, right, out=out)

    return of_size


def scaled(machine: Machine) -> Callable[[int], Callable[[], object]]:
    """Return what makes a product in FP8, as FP8 checkpoints are multiplied, with one scale for each matrix."""

    def of_size(size: int) -> Callable[[], object]:
        left, right = (torch.randn(size, size, device=machine.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=machine.device)
        return lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return of_size


def measure(machine: Machine) -> tuple[list[Row], float]:
    """Return the rows, and the bytes/s that the device's own copies and reads reach."""
    known, known_fp8 = table_entry(machine), table_entry(machine, fp8=True)
    note = f"table: {known.source}" if known else "not in roofline/hardware.py: metrics would have no peaks"
    rows = [Row(SECTION, f"{machine.name}, {machine.memory_bytes / 2**30:.0f} GiB", note=note)]
    reached = flops(machine, dense(machine, torch.bfloat16))
    rows += _against("bfloat16 FLOP/s", reached, known.peak_flops if known else None)
    rows += _against("float16 FLOP/s", flops(machine, dense(machine, torch.float16)), None)
    rows += _against("float32 FLOP/s, TF32 off", flops(machine, dense(machine, torch.float32)), None)
    if machine.capability >= FP8_CAPABILITY:
        rows += _against("FP8 FLOP/s", flops(machine, scaled(machine)), known_fp8.peak_flops if known_fp8 else None)
    copied, read = copy_bytes_per_s(machine), read_bytes_per_s(machine)
    peak_bytes = known.peak_bytes_per_s if known else None
    rows += _against("bytes/s of copies, both ways", copied, peak_bytes)
    rows += _against("bytes/s of reads", read, peak_bytes)
    return rows, max(copied, read)


def _against(what: str, reached: float, peak: float | None) -> Iterator[Row]:
    scale, unit = (1e12, "TFLOP/s") if "FLOP" in what else (1e9, "GB/s")
    if peak is None:
        yield Row(SECTION, what, reached / scale, unit)
        return
    part = reached / peak
    note = f"{100 * part:.0f} % of {peak / scale:,.0f}" + (" : the table is wrong" if part > ABOVE_THE_TABLE else "")
    yield Row(SECTION, what, reached / scale, unit, note, ok=part <= ABOVE_THE_TABLE)
