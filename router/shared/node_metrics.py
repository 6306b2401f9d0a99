"""The request series of all routers, which run on one node, so that a scrape of any of them shows the sum.

This is prometheus-client's mode for several processes: each process counts in files, which all of them can read.
Prometheus takes a fall for a restart, and would add all that is left once more. So the files of a router that has died
stay until the deployment ends.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

from ridgeline.router.settings import RouterStart


class NodeMetrics(Collector):
    """The series that this process and the other routers of its node count, as of the last `refresh`."""

    def __init__(self, router: RouterStart) -> None:
        """Have the series that this process makes from now on count in files. There is one of it per process."""
        self._folder = Path(tempfile.gettempdir(), f"ridgeline-routers-{router.deployment}")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(1, router.number):  # what they were serving, nobody serves any more
            mark_process_dead(_process(router.name, number), self._folder)  # type: ignore[no-untyped-call]
        self._own = f"*_{router.name}.*.db"
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._folder)
        own = _process(router.name, router.number)
        values.ValueClass = values.MultiProcessValue(lambda: own)  # type: ignore[no-untyped-call]
        self._shown: Collection[str] = ()
        self._families: list[Metric] = []

    def show(self, own: CollectorRegistry) -> None:
        """Sum up the series of this registry, and none that a library makes in this process."""
        self._shown = {family.name for family in own.collect()}

    async def refresh(self) -> None:
        """Read the files, in a thread: four routers have some 3,000 samples."""
        self._families = [family for family in await asyncio.to_thread(self._read) if family.name in self._shown]

    def _read(self) -> list[Metric]:
        files = [str(file) for file in self._folder.glob("*.db")]
        return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]

    def collect(self) -> Iterator[Metric]:
        """Yield every family with the sums; called by prometheus-client at each scrape."""
        yield from self._families

    def close(self) -> None:
        """Remove the files of this router and of its former processes, since the deployment ends."""
        for file in self._folder.glob(self._own):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # the last one removes the folder
            self._folder.rmdir()


def _process(name: str, number: int) -> str:
    return f"{name}.{number}"
