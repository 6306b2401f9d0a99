"""Adds up the request series of all routers, so that a scrape of any of them shows the whole deployment."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from router.shared.link import Link, NoDispatcher
from router.shared.messages import CountOthers, OthersCounted, Samples

Series = tuple[str, frozenset[tuple[str, str]]]
"""A sample's name and labels."""
CUMULATIVE = ("_total", "_bucket", "_sum", "_count")
"""How the names of samples end that only grow."""
CREATED = "_created"
"""How the name ends of the time at which a series began; prometheus-client adds one to every counter and histogram."""
COUNT_DEADLINE_S = 3.0
logger = logging.getLogger(__name__)


def sums_of(samples: Samples) -> dict[Series, float]:
    """Return the samples by series, without the times at which they began."""
    return {(name, frozenset(labels.items())): value for name, labels, value in samples if not name.endswith(CREATED)}


def cumulative(sums: Mapping[Series, float]) -> dict[Series, float]:
    """Return what stays counted when its router has gone: gauges do not."""
    return {series: value for series, value in sums.items() if series[0].endswith(CUMULATIVE)}


class SharedMetrics(Collector):
    """The request series of this router and, after `refresh`, of all others."""

    def __init__(self, own: CollectorRegistry, link: Link) -> None:
        self._own = own
        self._link = link
        self._others: dict[Series, float] = {}

    def samples(self) -> Samples:
        """Return this router's own series, for the others."""
        return [
            (sample.name, sample.labels, sample.value)
            for family in self._own.collect()
            for sample in family.samples
            if not sample.name.endswith(CREATED)
        ]

    async def refresh(self) -> None:
        """Ask the dispatcher for the series of the others; without an answer, the last ones stay."""
        try:
            counted = await self._link.call(
                "CountOthers", CountOthers(self._link.router_id), OthersCounted, COUNT_DEADLINE_S
            )
        except NoDispatcher as error:
            logger.warning("/metrics shows what the other routers had counted before: %s", error)
        else:
            self._others = sums_of(counted.samples)

    def collect(self) -> Iterator[Metric]:
        """Yield every family with the sums; called by prometheus-client at each scrape."""
        families = list(self._own.collect())
        elsewhere: dict[str, dict[Series, float]] = {family.name: {} for family in families}
        for series, value in self._others.items():
            name = _family_of(series[0])
            if name in elsewhere:
                elsewhere[name][series] = value
        for family in families:
            yield _sum(family, elsewhere[family.name])


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
