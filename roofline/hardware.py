"""Peak compute and peak memory bandwidth of accelerators, which are the two lines of a roofline.

Peaks are dense (no structured sparsity) and per device; `-fp8` names use the FP8 peak. Public tables disagree (some
print H100 bf16 as 494 TFLOP/s or 3,072 GB/s), so every entry names its figures and their source. Called by
`cluster.commands.roofline` and `cluster.node_hardware`; hosts without an entry are measured by `roofline.calibration`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from roofline.errors import UnknownNameError


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


_GPUS = (
    _Gpu("a100-sxm", 312, None, 80, 2039, "NVIDIA A100 80GB SXM data sheet (HBM2e; often rounded to 2.0 TB/s)"),
    _Gpu("a100-pcie", 312, None, 80, 1935, "NVIDIA A100 80GB PCIe data sheet (HBM2e)"),
    _Gpu("h100-sxm", 989, 1979, 80, 3350, "NVIDIA H100 SXM data sheet (HBM3)"),
    _Gpu("h100-pcie", 756, 1513, 80, 2000, "NVIDIA H100 PCIe data sheet (HBM2e)"),
    _Gpu("h200-sxm", 989, 1979, 141, 4800, "NVIDIA H200 SXM data sheet (HBM3e)"),
    _Gpu("b200-sxm", 2250, 4500, 180, 8000, "NVIDIA HGX B200 data sheet (HBM3e; some systems 7.7 TB/s)"),
    _Gpu("gb200", 2500, 5000, 186, 8000, "NVIDIA GB200 NVL72 data sheet, per GPU (HBM3e)"),
    _Gpu("gb300", 2500, 5000, 288, 8000, "NVIDIA GB300 NVL72 data sheet, per GPU (HBM3e)"),
    _Gpu("mi300x", 1307, 2615, 192, 5300, "AMD Instinct MI300X data sheet (HBM3)"),
    _Gpu("mi355x", 2516, 5033, 288, 8000, "AMD Instinct MI355X data sheet (HBM3e)"),
    _Gpu("l40s", 362, 733, 48, 864, "NVIDIA L40S data sheet (GDDR6)"),
    _Gpu("l4", 121, 242, 24, 300, "NVIDIA L4 data sheet (GDDR6)"),
    _Gpu("a10g", 70, None, 24, 600, "AWS G5 / NVIDIA A10G figures (GDDR6)"),
    _Gpu("tpu-v5e", 197, None, 16, 819, "Google Cloud TPU v5e documentation (HBM2)"),
    _Gpu("tpu-v6e", 918, None, 32, 1638, "Google Cloud TPU v6e documentation (HBM)"),
    _Gpu("gaudi3", 1835, 1835, 128, 3670, "Intel Gaudi 3 white paper (HBM2e)"),
)


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
