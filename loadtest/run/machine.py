"""Describes the machine of a run for summary.json.

Called by `loadtest.compare` and `loadtest.report.replay_output`.
"""

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and software of the machine that sends the load (locally also the server's)."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
