"""The CPU cores that this process may use: those of its affinity, as many as the quota of its cgroup pays for."""

import math
import os
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> list[int]:
    """Return the cores that this process may run on; of those, as many as its CPU quota pays for whole."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return cores[: int(min(len(cores), cpu_quota()))]


def cpu_quota(groups: Path = _GROUPS, mine: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU quota of this process in cores, or infinity: the smallest of any parent cgroup (cgroups(7))."""
    quotas = [math.inf]
    with suppress(OSError):  # not Linux, or hidden
        for line in mine.read_text(encoding="utf-8").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = groups / "cpu" if controllers else groups
            inmost = top / group.lstrip("/")  # not there where a container sees itself as the top
            quotas += [_quota(folder) for folder in (inmost, *inmost.parents) if folder.is_relative_to(top)]
    return min(quotas)


def _quota(group: Path) -> float:
    """Read version 2, "50000 100000" or "max 100000", or version 1, whose -1 is no limit."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota_us, period_us = map(int, " ".join((group / file).read_text("utf-8") for file in files).split())
            return quota_us / period_us if quota_us > 0 else math.inf
    return math.inf
