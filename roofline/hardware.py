"""Peak compute and peak memory bandwidth of accelerators, which are the two lines of a roofline.

Peaks are dense (no structured sparsity) and per device; `-fp8` names use the FP8 peak. Public tables disagree (some
print H100 bf16 as 494 TFLOP/s or 3,072 GB/s), so every entry names its figures and their source. Hosts without an entry
are measured by `ridgeline.roofline.calibration`.

Two GPUs of one name may differ: an A100 with 40 GB has three quarters of the bandwidth of one with 80 GB, an H100 NVL
is no H100 SXM. So a driver's name finds an entry only if all of its words are known and the memory is the entry's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ridgeline.roofline.errors import UnknownNameError


@dataclass(frozen=True)
class Hardware:
    """One device, or several treated as one. `memory_bytes` is None if the capacity is unknown."""

    name: str
    peak_flops: float
    peak_bytes_per_s: float
    source: str
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.peak_flops <= 0 or self.peak_bytes_per_s <= 0:
            raise ValueError(f"{self.name}: peaks must be positive")

    @property
    def ridge(self) -> float:
        """FLOP per byte at which both limits meet (Williams et al., 2009): peak FLOP/s / peak byte/s."""
        return self.peak_flops / self.peak_bytes_per_s

    def times(self, count: int) -> "Hardware":
        """Return `count` such devices as one, as in tensor parallelism; the links between them are not modelled."""
        return Hardware(
            f"{count}x {self.name}",
            self.peak_flops * count,
            self.peak_bytes_per_s * count,
            self.source,
            None if self.memory_bytes is None else self.memory_bytes * count,
        )


@dataclass(frozen=True)
class _Gpu:
    name: str
    bf16_tflops: float
    fp8_tflops: float | None
    memory_gb: float
    memory_gb_per_s: float
    datasheet: str
    driver_names: tuple[str, ...] = ()
    """What is left of the names that NVIDIA's driver gives it without maker, form factor and size; see `_words`."""


_GPUS = (
    _Gpu(
        "a100-sxm",
        312,
        None,
        80,
        2039,
        "NVIDIA A100 80GB SXM data sheet (HBM2e; often rounded to 2.0 TB/s)",
        ("A100", "A800"),
    ),
    _Gpu("a100-pcie", 312, None, 80, 1935, "NVIDIA A100 80GB PCIe data sheet (HBM2e)", ("A100 PCIE", "A800 PCIE")),
    _Gpu("a100-40gb", 312, None, 40, 1555, "NVIDIA A100 40GB data sheet, SXM and PCIe (HBM2)", ("A100", "A100 PCIE")),
    _Gpu("h100-sxm", 989, 1979, 80, 3350, "NVIDIA H100 SXM data sheet (HBM3)", ("H100", "H800")),
    _Gpu(
        "h100-pcie",
        756,
        1513,
        80,
        2000,
        "NVIDIA H100 PCIe data sheet (HBM2e)",
        ("H100 PCIE", "H100 HBM2E", "H800 PCIE"),
    ),
    _Gpu("h100-nvl", 835, 1671, 94, 3900, "NVIDIA H100 NVL data sheet, per GPU (HBM3)", ("H100 NVL",)),
    _Gpu("h20", 148, 296, 96, 4000, "NVIDIA H20 figures as published by server makers (HBM3)", ("H20",)),
    _Gpu("h200-sxm", 989, 1979, 141, 4800, "NVIDIA H200 SXM data sheet (HBM3e)", ("H200",)),
    _Gpu("h200-nvl", 835, 1671, 141, 4800, "NVIDIA H200 NVL data sheet, per GPU (HBM3e)", ("H200 NVL",)),
    _Gpu("gh200-96gb", 990, 1979, 96, 4000, "NVIDIA GH200 data sheet, the GPU with HBM3", ("GH200",)),
    _Gpu("gh200-144gb", 990, 1979, 144, 4900, "NVIDIA GH200 data sheet, the GPU with HBM3e", ("GH200",)),
    _Gpu("b200-sxm", 2250, 4500, 180, 8000, "NVIDIA HGX B200 data sheet (HBM3e; some systems 7.7 TB/s)", ("B200",)),
    _Gpu("b300-sxm", 2250, 4500, 288, 8000, "NVIDIA HGX B300 data sheet (HBM3e; 270 GB usable)", ("B300",)),
    _Gpu("gb200", 2500, 5000, 186, 8000, "NVIDIA GB200 NVL72 data sheet, per GPU (HBM3e)", ("GB200",)),
    _Gpu("gb300", 2500, 5000, 288, 8000, "NVIDIA GB300 NVL72 data sheet, per GPU (HBM3e)", ("GB300",)),
    _Gpu("mi300x", 1307, 2615, 192, 5300, "AMD Instinct MI300X data sheet (HBM3)"),
    _Gpu("mi355x", 2516, 5033, 288, 8000, "AMD Instinct MI355X data sheet (HBM3e)"),
    _Gpu("l40s", 362, 733, 48, 864, "NVIDIA L40S data sheet (GDDR6)", ("L40S",)),
    _Gpu("l40", 181, 362, 48, 864, "NVIDIA L40 data sheet (GDDR6)", ("L40",)),
    _Gpu("l4", 121, 242, 24, 300, "NVIDIA L4 data sheet (GDDR6)", ("L4",)),
    _Gpu("a10g", 70, None, 24, 600, "AWS G5 / NVIDIA A10G figures (GDDR6)", ("A10G",)),
    _Gpu("a10", 125, None, 24, 600, "NVIDIA A10 data sheet (GDDR6)", ("A10",)),
    _Gpu("a30", 165, None, 24, 933, "NVIDIA A30 data sheet (HBM2)", ("A30",)),
    _Gpu("a40", 150, None, 48, 696, "NVIDIA A40 data sheet (GDDR6)", ("A40",)),
    _Gpu("rtx-a6000", 155, None, 48, 768, "NVIDIA RTX A6000 data sheet (GDDR6)", ("RTX A6000",)),
    _Gpu("rtx-6000-ada", 364, 728, 48, 960, "NVIDIA RTX 6000 Ada data sheet (GDDR6)", ("RTX 6000 ADA",)),
    _Gpu("rtx-4090", 165, 330, 24, 1008, "NVIDIA Ada architecture paper, FP32 accumulate (GDDR6X)", ("RTX 4090",)),
    _Gpu(
        "rtx-5090",
        210,
        419,
        32,
        1792,
        "NVIDIA RTX Blackwell architecture paper, FP32 accumulate (GDDR7)",
        ("RTX 5090",),
    ),
    _Gpu("tpu-v5e", 197, None, 16, 819, "Google Cloud TPU v5e documentation (HBM2)"),
    _Gpu("tpu-v6e", 918, None, 32, 1638, "Google Cloud TPU v6e documentation (HBM)"),
    _Gpu("gaudi3", 1835, 1835, 128, 3670, "Intel Gaudi 3 white paper (HBM2e)"),
)

_SAYS_NOTHING: Final = re.compile(r"NVIDIA|TESLA|GEFORCE|GENERATION|AC|SXM\d*|HBM3E?|\d+GB?")
"""Words of a driver's name that the memory says better, or that all of a kind have."""
_LEAST_OF_MEMORY, _MOST_OF_MEMORY = 0.93, 1.12
"""What a driver reports, in parts of the gigabytes on the data sheet: some of those are 2^30 bytes, and some is kept
for error correction."""


def _entry(gpu: _Gpu, name: str, precision: str, tflops: float) -> Hardware:
    source = (
        f"dense {precision} peak {tflops:,.0f} TFLOP/s, memory {gpu.memory_gb_per_s:,.0f} GB/s, per device: "
        f"{gpu.datasheet}"
    )
    return Hardware(name, tflops * 1e12, gpu.memory_gb_per_s * 1e9, source, gpu.memory_gb * 1e9)


def _table() -> dict[str, Hardware]:
    table = {gpu.name: _entry(gpu, gpu.name, "bf16", gpu.bf16_tflops) for gpu in _GPUS}
    for gpu in _GPUS:
        if gpu.fp8_tflops is not None:
            name = f"{gpu.name}-fp8"
            table[name] = _entry(gpu, name, "fp8", gpu.fp8_tflops)
    return table


KNOWN_HARDWARE: Mapping[str, Hardware] = _table()


def hardware_by_name(name: str) -> Hardware:
    """Return a table entry; case and a missing `-sxm` do not matter (`H100` is `h100-sxm`). Raises UnknownNameError."""
    wanted = name.strip().lower().replace("_", "-").replace(" ", "-")
    bare, precision = (wanted.removesuffix("-fp8"), "-fp8") if wanted.endswith("-fp8") else (wanted, "")
    for candidate in (wanted, f"{bare}-sxm{precision}"):
        if candidate in KNOWN_HARDWARE:
            return KNOWN_HARDWARE[candidate]
    raise UnknownNameError("hardware", name, KNOWN_HARDWARE)


def hardware_of_gpu(driver_name: str, memory_bytes: float, *, fp8: bool = False) -> Hardware | None:
    """Return the entry of the GPU that NVIDIA's driver calls so and that has so much memory; None if there is none.

    With `fp8`, the entry with the FP8 peak: for models whose matrices are multiplied in FP8.
    """
    words = _words(driver_name)
    for gpu in _GPUS:
        named = any(frozenset(name.split()) == words for name in gpu.driver_names)
        if named and _LEAST_OF_MEMORY <= memory_bytes / (gpu.memory_gb * 1e9) <= _MOST_OF_MEMORY:
            return KNOWN_HARDWARE.get(f"{gpu.name}-fp8" if fp8 else gpu.name)
    return None


def _words(driver_name: str) -> frozenset[str]:
    words = re.split(r"[\s-]+", driver_name.upper())
    return frozenset(word for word in words if word and not (_SAYS_NOTHING.fullmatch(word)))
