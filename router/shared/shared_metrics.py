"""Adds up the request series of all routers, so that a scrape of any of them shows the whole deployment."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ridgeline.router.observe.paced import paced
from ridgeline.router.shared.counts import CUMULATIVE, Series
from ridgeline.router.shared.link import Link, NoDispatcher
from ridgeline.router.shared.messages import CountOthers, OthersCounted, Samples

COUNT_DEADLINE_S = 5.0
"""More than the dispatcher waits for routers that have still to join and for those that count."""
logger = logging.getLogger(__name__)


class SharedMetrics(Collector):
    """The request series of this router and, after `refresh`, of all others."""

    def __init__(self, own: CollectorRegistry, link: Link) -> None:
        self._own = own
        self._link = link
        self._shown: list[Metric] | None = None
        """This router's own, as the dispatcher was told: if it shows more and dies, the sums of the others fall."""
        self._others: dict[str, dict[Series, float]] = {}
        """By family."""

    def samples_at_once(self) -> Samples:
        """Return this router's own series, for the others."""
        return _samples_of(self._own.collect())

    async def samples(self) -> Samples:
        """Return the same, between two slices of which streams are served."""
        return _samples_of([family async for family in paced(self._own.collect())])

    async def refresh(self) -> None:
        """Ask the dispatcher for the series of the others; without an answer, the last ones stay."""
        shown = [family async for family in paced(self._own.collect())]
        asked = CountOthers(self._link.router, _samples_of(shown))
        try:
            counted = await self._link.call("CountOthers", asked, OthersCounted, COUNT_DEADLINE_S)
        except NoDispatcher as error:
            logger.warning("/metrics shows what the other routers had counted before: %s", error)
        else:
            await self._take(counted.samples)
        self._shown = shown

    async def _take(self, samples: Samples) -> None:
        """Take the others' counts. What only grows has not fallen: a new dispatcher may not know all routers yet."""
        now: dict[str, dict[Series, float]] = {}
        async for name, labels, value in paced(samples):
            series, family = (name, frozenset(labels.items())), _family_of(name)
            grown = name.endswith(CUMULATIVE)
            before = self._others.get(family, {}).get(series, value) if grown else value
            now.setdefault(family, {})[series] = max(before, value)
        for family, known in self._others.items():
            grown_before = {series: value for series, value in known.items() if series[0].endswith(CUMULATIVE)}
            now[family] = grown_before | now.get(family, {})
        self._others = now

    def collect(self) -> Iterator[Metric]:
        """Yield every family with the sums; called by prometheus-client at each scrape."""
        families = list(self._own.collect()) if self._shown is None else self._shown
        for family in families:
            yield _sum(family, self._others.get(family.name, {}))


def _samples_of(families: Iterable[Metric]) -> Samples:
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def _family_of(sample_name: str) -> str:
    for ending in CUMULATIVE:
        if sample_name.endswith(ending):
            return sample_name.removesuffix(ending)
    return sample_name


def _sum(own: Metric, others: dict[Series, float]) -> Metric:
    """Return a family with the others' samples added; label sets that only they have come last."""
    summed = Metric(own.name, own.documentation, own.type)
    rest = dict(others)
    for sample in own.samples:
        more = rest.pop((sample.name, frozenset(sample.labels.items())), 0.0)
        summed.add_sample(sample.name, sample.labels, sample.value + more)
    for (name, labels), value in rest.items():
        summed.add_sample(name, dict(labels), value)
    return summed
