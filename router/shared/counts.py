"""What each router of a deployment has counted, each router once, also those that are gone.

Sums must never fall and never count twice: Prometheus takes a fall for a restart, and adds all that is left once more.
So counts are kept by router, whose id is new in each process. One whose connection breaks comes back with the same id
and replaces what was known of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from router.observe.paced import paced
from router.shared.messages import EndedRouters, Samples

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""
CUMULATIVE = ("_total", "_bucket", "_sum", "_count")
"""How the names of samples end that only grow."""
APART = 16
"""Routers that are gone whose counts are kept one by one, since they may come back. Of older ones only the sum is kept:
of a deployment's few routers so many do not end while one of them is cut off."""
SUM = ""
"""Stands for the id of those older ones together."""


def by_series(samples: Samples) -> dict[Series, float]:
    """Return the samples by series."""
    return {(name, frozenset(labels.items())): value for name, labels, value in samples}


def as_samples(sums: Mapping[Series, float]) -> Samples:
    """Return series as samples."""
    return [(name, dict(labels), value) for (name, labels), value in sums.items()]


def highest(one: Mapping[Series, float], other: Mapping[Series, float]) -> dict[Series, float]:
    """Return the higher value of each series: of two that only grow, the later one."""
    return {**one, **{series: max(value, one.get(series, value)) for series, value in other.items()}}


def cumulative(sums: Mapping[Series, float]) -> dict[Series, float]:
    """Return what stays counted when its router has gone: gauges do not."""
    return {series: value for series, value in sums.items() if series[0].endswith(CUMULATIVE)}


class Counts:
    """The counts of all routers."""

    def __init__(self) -> None:
        self._present: dict[str, dict[Series, float]] = {}
        self._gone: dict[str, dict[Series, float]] = {}
        """In the order in which they went."""

    def told(self, router_id: str, samples: Samples) -> None:
        """Take what a router has counted until now."""
        self._gone.pop(router_id, None)
        self._present[router_id] = by_series(samples)

    def left(self, router_id: str) -> None:
        """Record that a router has gone, or has at least no connection."""
        last = self._present.pop(router_id, None)
        if last is not None:
            self._gone[router_id] = cumulative(last)
            self._sum_up()

    def remember(self, ended: EndedRouters) -> None:
        """Take what a router knows, from a former dispatcher, of routers that had gone."""
        for router_id, samples in ended.items():
            if router_id not in self._present:
                self._gone[router_id] = highest(self._gone.get(router_id, {}), by_series(samples))
        self._sum_up()

    def ended(self) -> EndedRouters:
        """Return the counts of those that are gone, which routers keep for the next dispatcher."""
        return {router_id: as_samples(counts) for router_id, counts in self._gone.items()}

    async def without(self, router_id: str) -> Samples:
        """Return the sums of all routers but this one."""
        sums: Counter[Series] = Counter()
        async for one in paced([*self._present, *self._gone]):
            if one != router_id:
                sums.update(self._present.get(one) or self._gone.get(one, {}))
        return as_samples(sums)

    def _sum_up(self) -> None:
        apart: Collection[str] = [router_id for router_id in self._gone if router_id != SUM]
        for router_id in list(apart)[: max(0, len(apart) - APART)]:
            sums = Counter(self._gone.get(SUM, {}))
            sums.update(self._gone.pop(router_id))
            self._gone[SUM] = dict(sums)
