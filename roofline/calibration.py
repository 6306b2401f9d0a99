"""Measures this host's roofline, for machines without a data sheet (CPUs, shared or unusual hosts).

The peaks are what torch reaches here with the threads and the element type that an engine will use, so MFU and MBU
relate to what is *attainable*. torch is imported only inside functions, to keep the rest of the package light.
"""

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ridgeline.roofline.hardware import Hardware
from ridgeline.roofline.quantisation import dtype_bytes

_CACHE_FORMAT = 2
_GEMM_BUDGET_S = 2.5
_STREAM_BUDGET_S = 0.4
_MIN_ARRAY_BYTES = 256 * 2**20
_MAX_ARRAY_BYTES = 1024 * 2**20
_CACHE_MULTIPLE = 4
_GEMM_SHAPES = ((256, 576, 1536), (512, 1024, 3072), (512, 4096, 4096), (2048, 4096, 4096))
"""(tokens, input width, output width) of transformer projections, from small to large."""


def calibrate_host(num_threads: int, dtype: str) -> Hardware:
    """Measure the best GEMM FLOP/s in `dtype` and the best streaming byte/s, in under 6 s.

    Run it on an otherwise idle machine, pinned like the engine: other load lowers both peaks.
    """
    dtype = dtype.removeprefix("torch.")
    with _torch_threads(num_threads) as torch:
        peak_flops, shape = _best_gemm_flops_per_s(torch, dtype)
        peak_bytes_per_s, pattern = _best_stream_bytes_per_s(torch)
    tokens, width_in, width_out = shape
    source = (
        f"measured on {datetime.now(UTC):%Y-%m-%d}: {dtype} GEMM {tokens}x{width_in}x{width_out} and {pattern}, "
        f"{num_threads} thread(s), torch {version('torch')}, {_cpu_model()}"
    )
    return Hardware(f"host-{dtype}-{num_threads}t", peak_flops, peak_bytes_per_s, source, _memory_bytes())


def load_or_calibrate_host(cache_dir: Path, num_threads: int, dtype: str, force: bool = False) -> Hardware:
    """Return `calibrate_host`, cached in `cache_dir` by CPU model, thread count, dtype and torch version.

    `force` measures again. An unreadable cache file is replaced.
    """
    key = {
        "format": _CACHE_FORMAT,
        "cpu": _cpu_model(),
        "num_threads": num_threads,
        "dtype": dtype.removeprefix("torch."),
        "torch": version("torch"),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir / f"roofline-host-{digest}.json"
    cached = None if force else _read_cache(path, key)
    if cached is not None:
        return cached
    hardware = calibrate_host(num_threads, dtype)
    _write_cache(path, key, hardware)
    return hardware


def _read_cache(path: Path, key: dict[str, Any]) -> Hardware | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return Hardware(**stored["hardware"]) if stored["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(path: Path, key: dict[str, Any], hardware: Hardware) -> None:
    """Write the file atomically, because several workers of one host may calibrate at the same time."""
    with suppress(OSError):  # then it is measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps({"key": key, "hardware": asdict(hardware)}, indent=2), encoding="utf-8")
        unfinished.replace(path)


@contextmanager
def _torch_threads(num_threads: int) -> Iterator[Any]:
    """Provide torch with its thread count set and gradients off; restore both afterwards."""
    import torch

    previous = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            yield torch
    finally:
        torch.set_num_threads(previous)


def _best_gemm_flops_per_s(torch: Any, dtype: str) -> tuple[float, tuple[int, int, int]]:
    """Measure from small to large shapes, and skip those that would exceed the budget at the rate seen so far."""
    dtype_bytes(dtype)  # rejects an invalid name before torch is asked for it
    deadline = time.perf_counter() + _GEMM_BUDGET_S
    best_rate, best_shape = 0.0, _GEMM_SHAPES[0]
    for tokens, width_in, width_out in _GEMM_SHAPES:
        flops = 2.0 * tokens * width_in * width_out
        remaining_s = deadline - time.perf_counter()
        if best_rate and 2 * flops / best_rate > remaining_s:
            break
        inputs = torch.ones(tokens, width_in, dtype=getattr(torch, dtype))
        weight = torch.ones(width_out, width_in, dtype=getattr(torch, dtype))
        run_s = _best_run_s(partial(torch.nn.functional.linear, inputs, weight), remaining_s / 2)
        if flops / run_s > best_rate:
            best_rate, best_shape = flops / run_s, (tokens, width_in, width_out)
    return best_rate, best_shape


def _best_stream_bytes_per_s(torch: Any) -> tuple[float, str]:
    """Return the best of three access patterns over arrays too large for any cache, in float32."""
    array_bytes = min(max(_MIN_ARRAY_BYTES, _CACHE_MULTIPLE * _last_level_cache_bytes()), _MAX_ARRAY_BYTES)
    width = 4096
    matrix = torch.ones(array_bytes // (4 * width), width)
    vector = torch.ones(width)
    copied = torch.empty_like(matrix)
    patterns: dict[str, tuple[Callable[[], object], int]] = {
        "matrix-vector read": (partial(torch.mv, matrix, vector), matrix.nbytes),
        "sum read": (partial(torch.sum, matrix), matrix.nbytes),
        "copy (read + write)": (partial(copied.copy_, matrix), 2 * matrix.nbytes),
    }
    rates = {name: moved_bytes / _best_run_s(run, _STREAM_BUDGET_S) for name, (run, moved_bytes) in patterns.items()}
    best = max(rates, key=lambda name: rates[name])
    return rates[best], best


def _best_run_s(run: Callable[[], object], budget_s: float) -> float:
    """Return the shortest of the runs that fit the budget, at least two, because the first one warms up."""
    deadline = time.perf_counter() + budget_s
    best_s = float("inf")
    runs = 0
    while runs < 2 or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best_s = min(best_s, time.perf_counter() - start)
        runs += 1
    return best_s


def _cpu_model() -> str:
    """Return a name for this kind of CPU, with its numeric identity, because hypervisors hide the marketing name."""
    wanted = ("model name", "cpu family", "model", "stepping")
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    known = [fields[name] for name in wanted if name in fields]
    return " ".join(known) or f"{platform.processor()} {platform.machine()}".strip()


def _last_level_cache_bytes() -> int:
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        unit = {"K": 2**10, "M": 2**20}.get(text[-1:], 1)
        digits = text.rstrip("KM")
        sizes.append(int(digits) * unit if digits.isdigit() else 0)
    return max(sizes)


def _memory_bytes() -> float | None:
    """Return physical memory, or the container's limit if that is lower; None if unknown."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
    except OSError:
        limit = "max"
    return float(min(physical, int(limit))) if limit.isdigit() else float(physical)
