"""Adds up the request series of all routers, so that a scrape of any of them shows the whole deployment."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.shared.counts import CUMULATIVE, Series, by_series, cumulative, highest
from router.shared.link import Link, NoDispatcher
from router.shared.messages import CountOthers, OthersCounted, Samples

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
        self._others: dict[Series, float] = {}

    def samples(self) -> Samples:
        """Return this router's own series, for the others."""
        return _samples_of(self._own.collect())

    async def refresh(self) -> None:
        """Ask the dispatcher for the series of the others; without an answer, the last ones stay."""
        shown = list(self._own.collect())
        asked = CountOthers(self._link.router_id, _samples_of(shown))
        try:
            counted = await self._link.call("CountOthers", asked, OthersCounted, COUNT_DEADLINE_S)
        except NoDispatcher as error:
            logger.warning("/metrics shows what the other routers had counted before: %s", error)
        else:  # a new dispatcher may not know all routers yet, but what they have counted can only have grown
            now = by_series(counted.samples)
            self._others = {**now, **highest(cumulative(self._others), cumulative(now))}
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        """Yield every family with the sums; called by prometheus-client at each scrape."""
        families = list(self._own.collect()) if self._shown is None else self._shown
        elsewhere: dict[str, dict[Series, float]] = {family.name: {} for family in families}
        for series, value in self._others.items():
            name = _family_of(series[0])
            if name in elsewhere:
                elsewhere[name][series] = value
        for family in families:
            yield _sum(family, elsewhere[family.name])


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
