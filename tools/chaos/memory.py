"""Memory of each part of a deployment, in bytes: resident (RSS, with shared pages) and unique (USS)."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from tools.chaos.deployment import Deployment


@dataclass(frozen=True)
class Footprint:
    """The memory of one process."""

    rss_bytes: int
    uss_bytes: int


def footprint(process: psutil.Process) -> Footprint:
    """Measure a process. Raises psutil.NoSuchProcess."""
    info = process.memory_full_info()
    return Footprint(info.rss, info.uss)


async def parts(deployment: Deployment) -> dict[str, psutil.Process]:
    """Return the driver, the router, and each worker's actor and engine, by name."""
    found = {"driver": psutil.Process(deployment.serve.process.pid), "router": deployment.router()}
    for member in await deployment.members():
        found[f"{member.worker_id} actor"] = member.actor
        engine = member.engine()
        if engine is not None:
            found[f"{member.worker_id} engine"] = engine
    return found
