"""The differences of the server's own counters over a run.

Values are kept as scraped, keyed by sample name and labels, so that rounds can be added up before any ratio is
computed.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.loadtest.errors import RestartedError, ServerError
from ridgeline.loadtest.run.server import Servers, as_servers, key_headers

PREFIX = "ridgeline_"
METRICS_KEY_VARIABLE = "RIDGELINE_METRICS_KEY"
"""The environment variable with the key that /metrics asks for, if it does."""
SETTLE_TRIES = 10
WHOLE_WITHIN_S, LOOK_EVERY_S = 180.0, 1.0
SampleKey = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics: counters, which only grow, and gauges."""

    counters: Mapping[SampleKey, float]
    gauges: Mapping[SampleKey, float]


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """The growth of the counters during a run of `wall_s` seconds, and the gauges at its end."""

    counters: Mapping[SampleKey, float]
    gauges: Mapping[SampleKey, float]
    wall_s: float

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a counter over all labels not given."""
        return _total(self.counters, name, labels)

    def level(self, name: str, **labels: str) -> float | None:
        """Return the mean of a gauge over the samples that match; None if there is none."""
        values = self._levels(name, labels)
        return sum(values) / len(values) if values else None

    def level_sum(self, name: str, **labels: str) -> float | None:
        """Return the sum of a gauge over the samples that match; None if there is none."""
        values = self._levels(name, labels)
        return sum(values) if values else None

    def _levels(self, name: str, labels: Mapping[str, str]) -> list[float]:
        wanted = set(labels.items())
        return [value for (sample, found), value in self.gauges.items() if sample == name and wanted <= found]

    def gauge_label(self, name: str, label: str, **labels: str) -> str | None:
        """Return the value of `label` in a gauge's first sample that matches; None if there is none."""
        wanted = set(labels.items())
        matching = (dict(found) for sample, found in self.gauges if sample == name and wanted <= found)
        return next((found[label] for found in matching if label in found), None)

    def label_values(self, name: str, label: str) -> list[str]:
        """Return the values of `label` in samples called `name`, sorted."""
        return sorted(
            {value for sample, found in self.counters for key, value in found if sample == name and key == label}
        )


def parse_metrics(text: str) -> Scrape:
    """Parse the Prometheus text format, leaving out samples that are not Ridgeline's."""
    counters: dict[SampleKey, float] = {}
    gauges: dict[SampleKey, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        target = gauges if family.type == "gauge" else counters
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                target[sample.name, frozenset(sample.labels.items())] = sample.value
    return Scrape(counters, gauges)


async def scrape(client: httpx.AsyncClient) -> Scrape | None:
    """Read /metrics; None if the server has no such page or no metric of Ridgeline's. Raises ServerError."""
    try:
        headers = key_headers(METRICS_KEY_VARIABLE)
        response = await client.get("/metrics", timeout=30.0, follow_redirects=True, headers=headers)
    except httpx.HTTPError as error:
        raise ServerError(f"the server at {client.base_url} no longer answers on /metrics: {error!r}") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ServerError(
            f"the server at {client.base_url} asks for a key on /metrics: set {METRICS_KEY_VARIABLE} to one of its "
            "security.metrics_keys_file"
        )
    if response.status_code != httpx.codes.OK:
        return None
    try:
        read = parse_metrics(response.text)
    except ValueError:  # a page for people, which some servers answer to every path
        return None
    return read if read.counters or read.gauges else None


async def scrape_settled(client: httpx.AsyncClient, settle_s: float) -> Scrape | None:
    """Scrape until two readings agree: workers report late, and the last request must be counted."""
    last = await scrape(client)
    for _ in range(SETTLE_TRIES if last else 0):
        await asyncio.sleep(settle_s)
        previous, last = last, await scrape(client)
        if last is None or (previous is not None and previous.counters == last.counters):
            break
    return last


async def until_whole(server: str | Servers) -> None:
    """Wait until each worker can be given work: one that was lost in a round is started again meanwhile.

    Raises ServerError if one still cannot after three minutes.
    """
    unusable = "ridgeline_unusable_workers"
    servers = as_servers(server)
    if servers.counted is None:
        return
    async with servers.open_first() as http:
        give_up_s = time.monotonic() + WHOLE_WITHIN_S
        while (found := await scrape(http)) and any(
            name == unusable and value for (name, _), value in found.gauges.items()
        ):
            if time.monotonic() > give_up_s:
                raise ServerError(f"a worker of {servers.counted} has not come back within {WHOLE_WITHIN_S:.0f} s")
            await asyncio.sleep(LOOK_EVERY_S)


def workers_of(read: Scrape) -> frozenset[tuple[str, str]]:
    """Return the workers that report, as (pool, worker).

    Gauges name the pool that a worker is in; its counters also name those that it was in before.
    """
    return _workers_named(read.gauges) or _workers_named(read.counters)


def _workers_named(series: Iterable[SampleKey]) -> frozenset[tuple[str, str]]:
    labels = (dict(found) for _, found in series)
    return frozenset((found["pool"], found["worker"]) for found in labels if {"pool", "worker"} <= found.keys())


def steps_by_worker(read: Scrape) -> dict[tuple[str, str], float]:
    """Return the engine steps of each worker that reports."""
    steps = dict.fromkeys(workers_of(read), 0.0)
    for (name, found), value in read.counters.items():
        labels = dict(found)
        if name == "ridgeline_steps_total" and (worker := (labels["pool"], labels["worker"])) in steps:
            steps[worker] += value
    return steps


def fleet_change(before: Scrape, after: Scrape) -> str | None:
    """Say which workers came, went or were restarted between two scrapes; None if all stayed.

    A worker that is gone takes its counters along, so figures of the run would be of another fleet than its start's.
    """
    had, has = workers_of(before), workers_of(after)
    gone = ", ".join(f"{worker} ({pool})" for pool, worker in sorted(had - has))
    if gone:
        return f"{gone} left during the round"
    for (name, found), value in after.counters.items():
        if name == "ridgeline_worker_restarts_total" and value > before.counters.get((name, found), 0.0):
            return f"{dict(found).get('worker', 'a worker')} was restarted during the round"
    for (name, found), value in before.gauges.items():
        if name == "ridgeline_workers" and after.gauges.get((name, found)) != value:
            return f"the pool {dict(found).get('pool')} changed its size during the round"
    return None


def difference(before: Scrape, after: Scrape, wall_s: float) -> MetricsDelta:
    """Return the growth between two scrapes. Raises RestartedError if a counter fell: the server restarted."""
    gained: dict[SampleKey, float] = {}
    for key, value in after.counters.items():
        gained[key] = value - before.counters.get(key, 0.0)
        if gained[key] < 0:
            raise RestartedError(f"the counter {key[0]} fell during the run, so the server restarted: repeat the run")
    return MetricsDelta(gained, after.gauges, wall_s)


def add_up(deltas: Iterable[MetricsDelta]) -> MetricsDelta:
    """Add up several rounds: counters and wall time are summed, gauges are the last ones."""
    counters: dict[SampleKey, float] = {}
    gauges: dict[SampleKey, float] = {}
    wall_s = 0.0
    for delta in deltas:
        for key, value in delta.counters.items():
            counters[key] = counters.get(key, 0.0) + value
        gauges.update(delta.gauges)
        wall_s += delta.wall_s
    return MetricsDelta(counters, gauges, wall_s)


def _total(counters: Mapping[SampleKey, float], name: str, labels: Mapping[str, str]) -> float:
    wanted = set(labels.items())
    return sum(value for (sample, found), value in counters.items() if sample == name and wanted <= found)
