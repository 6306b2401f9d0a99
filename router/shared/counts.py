"""What each router of a deployment has counted, each router once, also what its former processes had counted.

Sums must never fall and never count twice: Prometheus takes a fall for a restart, and adds all that is left once more.
So counts are kept by router and by the number of its process (`RouterStart`), which grows. Of former processes only the
sum is kept. Whatever reaches a dispatcher, in whichever order and how often, is put together by the highest value: a
router whose connection broke and came back, and what the other routers remember.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from ridgeline.router.observe.paced import paced
from ridgeline.router.settings import RouterStart
from ridgeline.router.shared.messages import EndedRouters, Samples, Told

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""
CUMULATIVE = ("_total", "_bucket", "_sum", "_count")
"""How the names of samples end that only grow."""


class _Known(msgspec.Struct, frozen=True):
    """What is known of one router: the same as in `Told`, of series that only grow."""

    number: int
    before: Mapping[Series, float] = {}
    counted: Mapping[Series, float] = {}

    @property
    def all(self) -> Counter[Series]:
        """The sum of all its processes."""
        sums = Counter(self.before)
        sums.update(self.counted)
        return sums


def by_series(samples: Samples) -> dict[Series, float]:
    """Return the samples by series."""
    return {(name, frozenset(labels.items())): value for name, labels, value in samples}


def as_samples(sums: Mapping[Series, float]) -> Samples:
    """Return series as samples."""
    return [(name, dict(labels), value) for (name, labels), value in sums.items()]


def highest(one: Mapping[Series, float], other: Mapping[Series, float]) -> Mapping[Series, float]:
    """Return the higher value of each series: of two that only grow, the later one."""
    if not one or not other:
        return one or other
    return {**one, **{series: max(value, one.get(series, value)) for series, value in other.items()}}


def _together(one: _Known, other: _Known) -> _Known:
    """Return all that is known of a router: what belongs to a former process counts among those before the newest."""
    if one.number == other.number:
        return _Known(one.number, highest(one.before, other.before), highest(one.counted, other.counted))
    former, newest = sorted((one, other), key=lambda known: known.number)
    return _Known(newest.number, highest(newest.before, former.all), newest.counted)


class Counts:
    """The counts of all routers."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        """By the router's name."""
        self._gauges: dict[RouterStart, dict[Series, float]] = {}
        """What each that is there has told that does not only grow."""

    def told(self, router: RouterStart, samples: Samples) -> None:
        """Take what a router has counted until now."""
        gauges = self._gauges[router] = by_series(samples)
        counted = {series: gauges.pop(series) for series in list(gauges) if series[0].endswith(CUMULATIVE)}
        self._take(router.name, _Known(router.number, counted=counted))

    def left(self, router: RouterStart) -> None:
        """Record that a router has gone, or has at least no connection: all that it has counted stays."""
        self._gauges.pop(router, None)

    def remember(self, ended: EndedRouters) -> None:
        """Take what a router knows, from a former dispatcher, of routers that had gone."""
        for name, told in ended.items():
            self._take(name, _Known(told.number, by_series(told.before), by_series(told.counted)))

    def ended(self) -> EndedRouters:
        """Return the counts of those that are gone, which routers keep for the next dispatcher."""
        ended = {}
        for name, known in self._known.items():
            here = RouterStart(name, known.number) in self._gauges
            if known.before or not here:
                counted = [] if here else as_samples(known.counted)
                ended[name] = Told(known.number, as_samples(known.before), counted)
        return ended

    async def without(self, router: RouterStart) -> Samples:
        """Return the sums of all routers but this one, whose former processes count among the others."""
        sums: Counter[Series] = Counter()
        async for one, gauges in paced([*self._gauges.items()]):
            if one != router:
                sums.update(gauges)
        async for name, known in paced([*self._known.items()]):
            sums.update(known.before)
            if router != RouterStart(name, known.number):
                sums.update(known.counted)
        return as_samples(sums)

    def _take(self, name: str, known: _Known) -> None:
        before = self._known.get(name)
        self._known[name] = known if before is None else _together(before, known)
