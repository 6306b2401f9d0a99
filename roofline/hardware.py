"""Peak compute and peak memory bandwidth of accelerators, which are the two lines of a roofline.

Peaks are dense (no structured sparsity) and per device; `-fp8` names use the FP8 peak. Public tables disagree (some
print H100 bf16 as 494 TFLOP/s or 3,072 GB/s), so every entry of `hardware.csv` has its source. Hosts without an entry
are measured by `ridgeline.roofline.calibration`.

Two GPUs of one name may differ: an A100 with 40 GB has three quarters of the bandwidth of one with 80 GB, an H100 NVL
is no H100 SXM. So a driver's name finds an entry only if all of its words are known and the memory is the entry's.
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
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


def _read_table() -> tuple[dict[str, Hardware], dict[str, list[frozenset[str]]]]:
    """Return the entries by name, and of each GPU what is left of the names that its driver gives it; see `_words`."""
    entries, driver_names = {}, {}
    with Path(__file__).with_name("hardware.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            gb, gb_per_s = float(row["memory_gb"]), float(row["memory_gb_per_s"])
            driver_names[row["name"]] = [frozenset(name.split()) for name in row["driver_names"].split("|") if name]
            for precision, suffix in (("bf16", ""), ("fp8", "-fp8")):
                if tflops := float(row[f"{precision}_tflops"] or 0):
                    peaks = f"dense {precision} peak {tflops:,.0f} TFLOP/s, memory {gb_per_s:,.0f} GB/s, per device"
                    name, source = row["name"] + suffix, f"{peaks}: {row['datasheet']}"
                    entries[name] = Hardware(name, tflops * 1e12, gb_per_s * 1e9, source, gb * 1e9)
    return entries, driver_names


KNOWN_HARDWARE, _DRIVER_NAMES = _read_table()
_SAYS_NOTHING: Final = re.compile(r"NVIDIA|TESLA|GEFORCE|GENERATION|AC|SXM\d*|HBM3E?|\d+GB?")
"""Words of a driver's name that the memory says better, or that all of a kind have."""
_LEAST_OF_MEMORY, _MOST_OF_MEMORY = 0.93, 1.12
"""What a driver reports, in parts of the gigabytes on the data sheet: some of those are 2^30 bytes, and some is kept
for error correction."""


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
    for gpu, names in _DRIVER_NAMES.items():
        share = memory_bytes / (KNOWN_HARDWARE[gpu].memory_bytes or memory_bytes)
        if words in names and _LEAST_OF_MEMORY <= share <= _MOST_OF_MEMORY:
            return KNOWN_HARDWARE.get(f"{gpu}-fp8" if fp8 else gpu)
    return None


def _words(driver_name: str) -> frozenset[str]:
    words = re.split(r"[\s-]+", driver_name.upper())
    return frozenset(word for word in words if word and not (_SAYS_NOTHING.fullmatch(word)))
