"""The peaks of the node this runs on: measured on a CPU, from the table for a known GPU.

Called in processes of the workers' actors, since the node that runs the command may be another kind of machine; and by
`ridgeline roofline --hardware host`.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from roofline.calibration import load_or_calibrate_host
from roofline.hardware import Hardware, hardware_by_name
from router.settings import PoolHardware

_GPU_NAMES = (
    ("H200", "h200-sxm"),
    ("H100 PCIE", "h100-pcie"),
    ("H100", "h100-sxm"),
    ("A100 PCIE", "a100-pcie"),
    ("A100", "a100-sxm"),
    ("B200", "b200-sxm"),
    ("L40S", "l40s"),
    ("L4", "l4"),
    ("A10G", "a10g"),
)


class UnknownHardware(RuntimeError):
    """This node's GPU is not in the table, or the node has none."""


def cache_dir() -> Path:
    """Return where measured facts about this machine are kept, outside the repository."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ridgeline"


def worker_hardware(dtype: str, cores: int, gpus: int) -> PoolHardware:
    """Return the peaks of one worker on this node; measuring a CPU takes about 4 s the first time.

    Raises UnknownHardware.
    """
    hardware = local_gpu().times(gpus) if gpus else load_or_calibrate_host(cache_dir(), cores, dtype)
    return PoolHardware(hardware.name, hardware.peak_flops, hardware.peak_bytes_per_s, hardware.source)


def local_gpu() -> Hardware:
    """Return the published peaks of this node's first GPU. Raises UnknownHardware."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        name = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise UnknownHardware(f"nvidia-smi does not name a GPU on this node ({error}): install the driver") from error
    words = name.upper().replace("-", " ").split()
    for known_words, known in _GPU_NAMES:
        if set(known_words.split()) <= set(words):
            return hardware_by_name(known)
    raise UnknownHardware(f"no peak FLOP/s and bandwidth are known for {name!r}: add it to roofline/hardware.py")
