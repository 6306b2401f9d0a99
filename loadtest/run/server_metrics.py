"""The differences of the server's own counters over a run.

Values are kept as scraped, keyed by sample name and labels, so that rounds can be added up before any ratio is
computed.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.loadtest.errors import RestartedError, ServerError
from ridgeline.loadtest.run.server import METRICS_KEY_VARIABLE, Servers, as_servers

PREFIX = "ridgeline_"
PROCESS = ("process_cpu_seconds_total", "process_start_time_seconds")
"""What Python's Prometheus client says of the process that answers: with several routers, one of them."""
OWN_PROCESS = ("process_", "ridgeline_text_")
"""How series begin that a router counts for itself alone."""
FOREIGN = ("vllm:", "sglang:", "dynamo_", "llm_d_epp_", "llm_d_inference_scheduler_")
"""How the series of other servers begin. vLLM: `vllm/v1/metrics/loggers.py`; SGLang:
`sglang/srt/observability/metrics_collector.py`; Dynamo: its docs/observability/metrics.md; llm-d: the metrics of its
endpoint picker, `llm_d_epp_disagg_decision_total`, before 0.9 `llm_d_inference_scheduler_*`."""
SAMPLE_EVERY_S = 1.0
LEVELS = (
    *("ridgeline_running", "ridgeline_waiting", "ridgeline_waiting_prompts", "ridgeline_active_fetches"),
    *("ridgeline_kv_blocks_free", "vllm:num_requests_running", "vllm:num_requests_waiting_by_reason"),
    *("vllm:kv_cache_usage_perc", "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
)
"""Gauges whose level during a round matters; at its end all of them say that nothing runs."""
SETTLE_TRIES = 10
WHOLE_WITHIN_S, LOOK_EVERY_S = 180.0, 1.0
SampleKey = tuple[str, frozenset[tuple[str, str]]]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics: counters, which only grow, and gauges."""

    counters: Mapping[SampleKey, float]
    gauges: Mapping[SampleKey, float]


@dataclass(frozen=True, slots=True)
class Level:
    """A gauge over a run: its mean and highest reading, and the share of readings above 0."""

    mean: float
    most: float
    above_zero: float


@dataclass(frozen=True, slots=True)
class MetricsDelta:
    """The growth of the counters during a run of `wall_s` seconds, the gauges at its end and their levels meanwhile."""

    counters: Mapping[SampleKey, float]
    gauges: Mapping[SampleKey, float]
    wall_s: float
    levels: Mapping[SampleKey, Level] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a counter over all labels not given."""
        return sum(_matching(self.counters, name, labels))

    @property
    def is_ridgeline(self) -> bool:
        """Whether a Ridgeline server counted it."""
        return any(sample.startswith(PREFIX) for sample, _ in (*self.counters, *self.gauges))

    def has(self, name: str) -> bool:
        """Return whether the server publishes a counter of this name."""
        return any(sample == name for sample, _ in self.counters)

    def level(self, name: str, **labels: str) -> float | None:
        """Return the mean of a gauge over the samples that match; None if there is none."""
        values = _matching(self.gauges, name, labels)
        return sum(values) / len(values) if values else None

    def level_sum(self, name: str, **labels: str) -> float | None:
        """Return the sum of a gauge over the samples that match; None if there is none."""
        values = _matching(self.gauges, name, labels)
        return sum(values) if values else None

    def levels_of(self, name: str, **labels: str) -> list[Level]:
        """Return the levels of a gauge's samples that match; empty if they were not read."""
        return _matching(self.levels, name, labels)

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


def parse_metrics(text: str, *, foreign: bool = False) -> Scrape:
    """Parse the Prometheus text format: Ridgeline's samples, with `foreign` also those of other servers.

    Of a foreign histogram only the sum and the count are kept: its buckets are most of a page.
    """
    lines = _lines(text, (PREFIX, *PROCESS, *(FOREIGN if foreign else ())))
    return _parse(line for line in lines if not _is_bucket(line))


def _lines(text: str, prefixes: tuple[str, ...]) -> list[str]:
    """Return the lines of the series whose names begin so, and those with their types."""
    begins = (*prefixes, *(f"# TYPE {prefix}" for prefix in prefixes))
    return [line for line in text.splitlines(True) if line.startswith(begins)]


def _is_bucket(line: str) -> bool:
    return line.startswith(FOREIGN) and line.partition("{")[0].endswith("_bucket")


def _parse(lines: Iterable[str]) -> Scrape:
    counters: dict[SampleKey, float] = {}
    gauges: dict[SampleKey, float] = {}
    for family in text_string_to_metric_families("".join(lines)):
        target = gauges if family.type == "gauge" else counters
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                target[sample.name, frozenset(sample.labels.items())] = sample.value
    return Scrape(counters, gauges)


async def scrape(client: httpx.AsyncClient, *, foreign: bool = False) -> Scrape | None:
    """Read /metrics; None if the server has no such page, or on it no metric of Ridgeline's, or `foreign` ones.

    Raises ServerError.
    """
    text = await _page(client)
    try:
        read = None if text is None else parse_metrics(text, foreign=foreign)
    except ValueError:  # a page for people, which some servers answer to every path
        return None
    known = (PREFIX, *(FOREIGN if foreign else ()))
    return read if read and any(name.startswith(known) for name, _ in (*read.counters, *read.gauges)) else None


async def _page(client: httpx.AsyncClient) -> str | None:
    try:
        response = await client.get("/metrics", timeout=30.0, follow_redirects=True)
    except httpx.HTTPError as error:
        raise ServerError(f"the server at {client.base_url} does not answer on /metrics: {error!r}") from error
    if response.status_code == httpx.codes.UNAUTHORIZED and client.auth is not None:
        raise ServerError(
            f"the server at {client.base_url} asks for a key on /metrics: set {METRICS_KEY_VARIABLE} to one of its "
            "security.metrics_keys_file"
        )
    return response.text if response.status_code == httpx.codes.OK else None


async def scrape_settled(client: httpx.AsyncClient, settle_s: float, *, foreign: bool = False) -> Scrape | None:
    """Scrape until two readings agree: workers report late, and the last request must be counted."""
    last = await scrape(client, foreign=foreign)
    for _ in range(SETTLE_TRIES if last else 0):
        await asyncio.sleep(settle_s)
        previous, last = last, await scrape(client, foreign=foreign)
        if last is None or (previous is not None and _counted(previous) == _counted(last)):
            break
    return last


def _counted(read: Scrape) -> dict[SampleKey, float]:
    """Return the counters but those that grow by being read."""
    return {key: value for key, value in read.counters.items() if key[0] not in PROCESS}


class Watch:
    """What a server counted while `watch` watched it; the readings are complete when it has ended."""

    def __init__(self, before: Scrape | None) -> None:
        self.before = before
        self.after: Scrape | None = None
        self._readings: list[Mapping[SampleKey, float]] = []

    def read(self, gauges: Mapping[SampleKey, float]) -> None:
        """Take one reading of the gauges in `LEVELS`."""
        self._readings.append(gauges)

    @property
    def levels(self) -> dict[SampleKey, Level]:
        """The levels of all gauges that were read; one that was absent in a reading was 0 then."""
        number = len(self._readings)
        series: dict[SampleKey, list[float]] = {}
        for reading in self._readings:
            for key, value in reading.items():
                series.setdefault(key, []).append(value)
        return {
            key: Level(sum(values) / number, max(values), sum(value > 0 for value in values) / number)
            for key, values in series.items()
        }

    @property
    def fleet_change(self) -> str | None:
        """Which worker came, went or was restarted meanwhile; None if all stayed."""
        return fleet_change(self.before, self.after) if self.before and self.after else None

    def delta(self, wall_s: float) -> MetricsDelta | None:
        """Return what grew in `wall_s` seconds; None if the server counts nothing. Raises RestartedError."""
        if self.before is None or self.after is None:
            return None
        return replace(difference(self.before, self.after, wall_s), levels=self.levels)


@contextlib.asynccontextmanager
async def watch(
    client: httpx.AsyncClient, settle_s: float, *, foreign: bool = False, every_s: float = SAMPLE_EVERY_S
) -> AsyncIterator[Watch]:
    """Scrape before and after the body, and read the gauges in `LEVELS` meanwhile. Raises ServerError."""
    seen = Watch(await scrape_settled(client, settle_s, foreign=foreign))
    reading = asyncio.create_task(_read_levels(client, seen, every_s)) if seen.before else None
    try:
        yield seen
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    seen.after = await scrape_settled(client, settle_s, foreign=foreign) if seen.before else None


@contextlib.asynccontextmanager
async def watch_all(servers: Servers, settle_s: float) -> AsyncIterator[dict[str, Watch]]:
    """Watch the page of each server, or of each engine behind them if those are named. Raises ServerError."""
    async with contextlib.AsyncExitStack() as stack:
        clients = {url: await stack.enter_async_context(servers.open(url)) for url in servers.metrics_urls}
        yield {
            url: await stack.enter_async_context(watch(client, settle_s, foreign=True))
            for url, client in clients.items()
        }


async def _read_levels(client: httpx.AsyncClient, seen: Watch, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(ServerError, ValueError):  # a busy server may miss a reading, no round fails by it
            seen.read(_parse(_lines(await _page(client) or "", LEVELS)).gauges)


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
    """Return the growth between two scrapes. Raises RestartedError if a counter fell: the server restarted.

    What a router counts for itself is left out if another router answered the second time.
    """
    gained: dict[SampleKey, float] = {}
    same_process = _start_of(before) == _start_of(after)
    for key, value in after.counters.items():
        if not same_process and key[0].startswith(OWN_PROCESS):
            continue
        gained[key] = value - before.counters.get(key, 0.0)
        if gained[key] < 0 and not key[0].endswith("_sum"):  # a sum falls with each observation below zero
            raise RestartedError(f"the counter {key[0]} fell during the run, so the server restarted: repeat the run")
    return MetricsDelta(gained, after.gauges, wall_s)


def _start_of(read: Scrape) -> float | None:
    return read.gauges.get(("process_start_time_seconds", frozenset()))


def add_up(deltas: Iterable[MetricsDelta]) -> MetricsDelta:
    """Add up several rounds: counters and wall time are summed, gauges are the last ones, levels means over time."""
    counters: dict[SampleKey, float] = {}
    gauges: dict[SampleKey, float] = {}
    levels: dict[SampleKey, Level] = {}
    wall_s = 0.0
    for delta in deltas:
        for key, value in delta.counters.items():
            counters[key] = counters.get(key, 0.0) + value
        gauges.update(delta.gauges)
        levels = _mean_levels(levels, wall_s, delta.levels, delta.wall_s)
        wall_s += delta.wall_s
    return MetricsDelta(counters, gauges, wall_s, levels)


def _mean_levels(
    one: Mapping[SampleKey, Level], one_s: float, other: Mapping[SampleKey, Level], other_s: float
) -> dict[SampleKey, Level]:
    share, none = other_s / (one_s + other_s) if other_s else 0.0, Level(0.0, 0.0, 0.0)
    pairs = ((key, one.get(key, none), other.get(key, none)) for key in {**one, **other})
    return {
        key: Level(
            a.mean * (1 - share) + b.mean * share,
            max(a.most, b.most),
            a.above_zero * (1 - share) + b.above_zero * share,
        )
        for key, a, b in pairs
    }


def _matching(series: Mapping[SampleKey, Value], name: str, labels: Mapping[str, str]) -> list[Value]:
    """Return the values of the samples of this name that have these labels."""
    wanted = set(labels.items())
    return [value for (sample, found), value in series.items() if sample == name and wanted <= found]
