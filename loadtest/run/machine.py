"""Describes the machine of a run for summary.json, and notices other work on it.

Called by `loadtest.compare`, `loadtest.report.replay_output` and `cluster.commands.loadtest`.
"""

import os
import platform
from pathlib import Path
from typing import Any

import psutil

WATCH_S = 0.5
BUSY_PERCENT = 20.0


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and software of the machine that sends the load (locally also the server's)."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def busy_note() -> str | None:
    """Watch this machine for a moment and say so if other work takes a good part of its cores; blocks meanwhile."""
    busy_percent: float = psutil.cpu_percent(interval=WATCH_S)
    if busy_percent < BUSY_PERCENT:
        return None
    return (
        f"other work took {busy_percent:.0f} % of this machine's cores before the first start: what is measured holds "
        "for a machine that is so busy, and may differ from run to run"
    )


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
