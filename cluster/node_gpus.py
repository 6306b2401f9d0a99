"""This node's GPUs as NVIDIA's driver describes them, and the peaks of its devices: measured on a CPU, else published.

GPUs are read with `nvidia-smi`, which comes with the driver: torch would make a context of hundreds of megabytes on
each. Peaks are asked for in processes of the workers' actors, since the node that runs the command may be another kind
of machine. They only feed metrics: a GPU that is not in the table is served all the same, and has no peak series.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ridgeline.cluster.folders import cache_folder
from ridgeline.roofline.calibration import load_or_calibrate_host
from ridgeline.roofline.hardware import Hardware, hardware_of_gpu
from ridgeline.router.settings import PoolHardware

MIB: Final = 1024**2
FIELDS: Final = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.free",
    "driver_version",
    "compute_cap",
    "mig.mode.current",
)
ANSWER_S: Final = 20.0
"""A driver that keeps no GPU initialised takes seconds for the first question on a machine with eight."""


class NoGpus(RuntimeError):
    """The driver names no GPU; the message says why."""


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    driver: tuple[int, ...]
    compute_capability: tuple[int, int]
    """(9, 0) for a Hopper; (0, 0) if the driver does not say."""
    partitioned: bool = False
    """Whether it is cut into MIG instances, of which a process gets one."""


def read_gpus(ask: Callable[[], str] | None = None, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in the driver's order. Raises NoGpus."""
    lines = [line for line in (ask or _nvidia_smi)().splitlines() if line.strip()]
    try:
        rows = [[part.strip() for part in line.split(",")] for line in lines]
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        gpus = tuple(_gpu(row) for row in rows if visible is None or _is_visible(row, visible.split(",")))
    except (ValueError, IndexError) as error:
        raise NoGpus(f"nvidia-smi answers what nobody expects ({lines[0][:80]!r})") from error
    if not gpus:
        raise NoGpus("nvidia-smi lists no GPU that CUDA_VISIBLE_DEVICES leaves" if lines else "nvidia-smi lists no GPU")
    return gpus


def _nvidia_smi() -> str:
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
    except FileNotFoundError as error:
        raise NoGpus("there is no nvidia-smi, which comes with NVIDIA's driver") from error
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr or "").strip().partition("\n")[0]
        raise NoGpus(f"nvidia-smi fails: {said or error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NoGpus(f"nvidia-smi does not answer ({error})") from error


def mps_problem() -> str:
    """Return why no daemon of NVIDIA's MPS answers on this node; empty if one does."""
    command = "nvidia-cuda-mps-control"
    try:
        answer = subprocess.run([command], input="get_server_list\n", capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        return f"there is no {command}, which comes with NVIDIA's driver"
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command} does not answer ({error})"
    if answer.returncode == 0:
        return ""
    return f"{command} says: {(answer.stdout + answer.stderr).strip().partition(chr(10))[0] or answer.returncode}"


def _gpu(row: Sequence[str]) -> Gpu:
    index, _, name, total_mib, free_mib, driver, capability, mig = row
    major, _, minor = capability.partition(".")
    return Gpu(
        index=int(index),
        name=name,
        memory_bytes=_number(total_mib) * MIB,
        free_bytes=_number(free_mib) * MIB,
        driver=tuple(int(part) for part in driver.split(".") if part.isdigit()),
        compute_capability=(_number(major), _number(minor)),
        partitioned=mig == "Enabled",
    )


def _number(text: str) -> int:
    """Return a whole number; 0 for `[N/A]`, which devices that share the host's memory answer."""
    return int(text) if text.isdigit() else 0


def _is_visible(row: Sequence[str], visible: Sequence[str]) -> bool:
    """Return whether one of these names means this GPU, or an instance of it: nvidia-smi does not list those here."""
    index, uuid, mig = row[0], row[1], row[-1]
    for name in filter(None, map(str.strip, visible)):
        if name == index or uuid.startswith(name) or (name.startswith("MIG-") and mig == "Enabled"):
            return True
    return False


class UnknownHardware(RuntimeError):
    """No peaks are known for this node's GPUs; the message says why."""


def worker_hardware(dtype: str, cores: int, gpus: int, *, fp8: bool = False) -> PoolHardware | str:
    """Return the peaks of one worker on this node, or a sentence that says why none are known.

    Measuring a CPU takes about 4 s the first time. `fp8` says that the model's matrices are multiplied in FP8.
    """
    try:
        if gpus:
            hardware = peaks_of(read_gpus(), dtype, fp8=fp8).times(gpus)
        else:
            hardware = load_or_calibrate_host(cache_folder(), cores, dtype)
    except NoGpus as error:
        return f"no peak FLOP/s and bandwidth are known, since {error}"
    except UnknownHardware as error:
        return str(error)
    return PoolHardware(hardware.name, hardware.peak_flops, hardware.peak_bytes_per_s, hardware.source)


def peaks_of(gpus: Sequence[Gpu], dtype: str, *, fp8: bool = False) -> Hardware:
    """Return the published peaks of one of these GPUs, which must be alike. Raises UnknownHardware."""
    names = sorted({gpu.name for gpu in gpus})
    if len(names) > 1:
        raise UnknownHardware(
            f"this node has GPUs of several kinds, {' and '.join(names)}, and one peak would be wrong"
        )
    if any(gpu.partitioned for gpu in gpus):
        raise UnknownHardware(f"{names[0]} is cut into MIG instances, for whose parts no peaks are published")
    if dtype == "float32":
        raise UnknownHardware("the table has bfloat16 and FP8 peaks of GPUs, and model.dtype is float32")
    memory_gib = gpus[0].memory_bytes / 2**30
    for in_fp8 in (fp8, False):  # an A100 multiplies FP8 weights in bfloat16
        known = hardware_of_gpu(gpus[0].name, gpus[0].memory_bytes, fp8=in_fp8)
        if known is not None:
            return known
    raise UnknownHardware(
        f"no peak FLOP/s and bandwidth are known for {names[0]!r} with {memory_gib:.0f} GiB: add it to "
        "roofline/hardware.csv"
    )
