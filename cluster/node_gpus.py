"""This node's GPUs as NVIDIA's driver describes them.

Read with `nvidia-smi`, which comes with the driver: torch would make a context of hundreds of megabytes on each GPU.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

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
