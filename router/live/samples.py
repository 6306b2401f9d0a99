"""Samples of what workers and requests have counted, and what grew between two of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.metrics import MetricWrapperBase

from ridgeline.contracts.vocabulary import Pool
from ridgeline.roofline.bottleneck import EVENTS_PER_S
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.live.state import Quantiles, Steps
from ridgeline.router.observe.metrics import RequestMetrics

STEP_KINDS: Final = ("prefill", "mixed", "decode")


@dataclass(frozen=True)
class WorkerSample:
    """A worker at a moment."""

    pool: Pool
    incarnation: str
    counted: Mapping[Pool, Mapping[str, float]]
    """Its counters, by the pool in which they grew: it may have been in others, and come back."""
    running: int
    waiting: int
    """Without those that wait for KV to come."""
    kv_used: float
    """Share of its KV blocks."""


@dataclass(frozen=True)
class Sample:
    """What is counted and how full all is, at a moment."""

    at_s: float
    workers: Mapping[str, WorkerSample]
    waiting_prompts: Mapping[Pool, int]
    cpu_s: float
    tokens: int
    events: int
    requests: Mapping[str, float]
    """Counters of `RequestMetrics`: `series{label values}`."""


@dataclass(frozen=True)
class Text:
    """What a router has sent: tokens, and the events they were in."""

    tokens: int
    events: int


@dataclass(frozen=True)
class Window:
    """Samples of a while, oldest first."""

    samples: Sequence[Sample]
    _known: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """The growth of workers' counters that was asked for before."""

    @property
    def first(self) -> Sample:
        return self.samples[0]

    @property
    def last(self) -> Sample:
        return self.samples[-1]

    @property
    def seconds(self) -> float:
        return max(self.last.at_s - self.first.at_s, 1e-3)

    def grown_of(self, workers: Iterable[str]) -> dict[str, float]:
        """Return the growth of these workers' counters, added up."""
        total: dict[str, float] = defaultdict(float)
        for worker_id in workers:
            for name, value in self.grown_by(worker_id).items():
                total[name] += value
        return total

    def grown_by(self, worker_id: str) -> Mapping[str, float]:
        """Return the growth of one worker's counters; one that was not there before has none."""
        if worker_id not in self._known:
            self._known[worker_id] = self._grown(worker_id)
        return self._known[worker_id]

    def _grown(self, worker_id: str) -> Mapping[str, float]:
        """Return the growth in its present pool since it was first seen, extended to the whole window."""
        now = self.last.workers.get(worker_id)
        if now is None:
            return {}
        for sample in self.samples[:-1]:
            then = sample.workers.get(worker_id)
            if then is not None and then.incarnation == now.incarnation:
                before = then.counted.get(now.pool, {})
                longer = self.seconds / max(self.last.at_s - sample.at_s, 1e-3)
                counters = now.counted.get(now.pool, {})
                return {name: (value - before.get(name, 0.0)) * longer for name, value in counters.items()}
        return {}

    def steps(self, worker_id: str) -> list[Steps]:
        return steps_of(self.grown_by(worker_id), self.seconds)

    def grown(self, series: str, labels: str = "") -> float:
        key = f"{series}{{{labels}}}"
        return self.last.requests.get(key, 0.0) - self.first.requests.get(key, 0.0)

    def per_s(self, series: str, label: str) -> float:
        """Return how many a second, of all whose last label this is."""
        return sum(rate for labels, rate in self.rates(series).items() if labels.rpartition(",")[2] == label)

    def rates(self, series: str) -> dict[str, float]:
        """Return how many a second, by label values."""
        begin = f"{series}{{"
        return {
            key[len(begin) : -1]: (value - self.first.requests.get(key, 0.0)) / self.seconds
            for key, value in self.last.requests.items()
            if key.startswith(begin)
        }

    def ratio(self, part: str, every: str, label: str) -> float | None:
        """Return the growth of one series for each of another; None if that has not grown."""
        asked = self.grown(every, label)
        return self.grown(part, label) / asked if asked else None

    def mean_of(self, series: str, label: str) -> float | None:
        return self.ratio(f"{series}_sum", f"{series}_count", label)

    @property
    def tokens_per_event(self) -> float | None:
        events = self.last.events - self.first.events
        return (self.last.tokens - self.first.tokens) / events if events >= EVENTS_PER_S * self.seconds else None

    def level(self, pool: Pool, figure: Callable[[WorkerSample], float]) -> float | None:
        """Return the mean over the samples of the mean over the pool's workers; None without any."""
        return mean(mean(figure(one) for one in sample.workers.values() if one.pool == pool) for sample in self.samples)


def worker_sample(worker: Worker) -> WorkerSample:
    status, blocks = worker.status, worker.description.num_kv_blocks
    assert status is not None
    fetching = int(status.counters.get("active_fetches", 0))
    return WorkerSample(
        worker.pool,
        worker.description.incarnation,
        {pool: dict(counters) for pool, counters in worker.counted.items()},
        status.running,
        max(0, status.waiting - fetching),
        1 - status.kv_blocks_free / blocks if blocks else 0.0,
    )


def counted(metrics: RequestMetrics) -> Iterator[tuple[str, float]]:
    """Yield the counters of requests that states are made of; those of the ITL by the bounds of its buckets."""
    series: dict[str, MetricWrapperBase] = {
        "requests": metrics.requests,
        "rejected": metrics.rejected,
        "in_flight": metrics.in_flight,
        "link_bytes": metrics.link_bytes,
        "link_seconds": metrics.link_seconds,
        "link_rate": metrics.link_rate,
        "link_fastest": metrics.link_fastest,
        "overlapped": metrics.overlapped,
        "prefix_hits": metrics.prefix_hits,
        "prefix_queries": metrics.prefix_queries,
        "stage": metrics.stage,
        "itl": metrics.itl,
    }
    for name, wrapper in series.items():
        for family in wrapper.collect():
            buckets: dict[str, float] = defaultdict(float)
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    buckets[sample.labels["le"]] += sample.value
                    continue
                end = next((end for end in ("_sum", "_count") if sample.name.endswith(end)), "")
                yield f"{name}{end}{{{','.join(sample.labels.values())}}}", sample.value
            if name == "itl":
                yield from ((f"itl{{{bound}}}", value) for bound, value in buckets.items())


def bucket_quantiles(rates: Mapping[str, float]) -> Quantiles | None:
    """Return quantiles from cumulative buckets; None if nothing was counted."""
    p50, p90, p99 = (bucket_quantile(rates, part) for part in (0.5, 0.9, 0.99))
    return None if p50 is None or p90 is None or p99 is None else Quantiles(p50, p90, p99)


def bucket_quantile(rates: Mapping[str, float], quantile: float) -> float | None:
    """Return a quantile from cumulative buckets, as `histogram_quantile` of Prometheus does."""
    bounds = sorted((float(bound), rate) for bound, rate in rates.items())
    if not bounds or not (every := bounds[-1][1]):
        return None
    below_s, below = 0.0, 0.0
    for bound_s, rate in bounds:
        if rate >= quantile * every:
            if bound_s == float("inf"):
                return below_s
            return below_s + (bound_s - below_s) * (quantile * every - below) / (rate - below)
        below_s, below = bound_s, rate
    return below_s


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def steps_of(grown: Mapping[str, float], seconds: float) -> list[Steps]:
    """Return the figures of each kind of step that ran, by the growth of counters in this time."""
    found = []
    for kind in STEP_KINDS:
        busy_s, number = grown.get(f"busy_seconds_total.{kind}", 0.0), grown.get(f"steps_total.{kind}", 0.0)
        flops = grown.get(f"flops_total.{kind}", 0.0)
        moved = sum(value for name, value in grown.items() if name.startswith(f"bytes_total.{kind}."))
        if busy_s > 0 and number > 0 and moved > 0:
            found.append(
                Steps(kind, busy_s / number, busy_s / seconds, flops / moved, flops / busy_s, moved / busy_s, [])
            )
    return found
