"""Compares a client's clock with /metrics: TTFT and ITL of the same streams, by the server's histogram buckets."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

import httpx

from ridgeline.loadtest.errors import ServerError
from ridgeline.loadtest.run.client.stream import Completion, LoadClient, encode_body
from ridgeline.loadtest.run.server import first_model, open_http
from ridgeline.loadtest.run.server_metrics import MetricsDelta, Scrape, difference, scrape

ROUNDS = {1: 4, 20: 1}
"""Rounds by number of streams; one stream at a time gives fewer gaps to compare."""
DEADLINE_S = 300.0
SMALLEST_TOKEN, LARGEST_TOKEN = 10, 190


@dataclass(frozen=True)
class Latencies:
    """One latency, as measured by the client and by the server."""

    name: str
    client_s: Sequence[float]
    bounds_s: Sequence[float]
    """Upper bounds of the server's buckets; the last one is infinite."""
    server: Sequence[float]
    """Number of observations in each bucket."""

    @property
    def share_within_a_bucket(self) -> float:
        """Fraction of observations, both sides sorted, that are in the same bucket or in adjacent ones."""
        theirs = [index for index, count in enumerate(self.server) for _ in range(round(count))]
        ours = sorted(bisect_left(self.bounds_s, seconds) for seconds in self.client_s)
        near = sum(abs(a - b) <= 1 for a, b in zip(ours, theirs, strict=False))
        return near / max(len(ours), len(theirs))

    def __str__(self) -> str:
        cuts = quantiles(self.client_s, n=100, method="inclusive")
        told = ", ".join(f"p{p} {cuts[p - 1] * 1e3:.1f} ms, the server's in {self._bucket_of(p)}" for p in (50, 90, 99))
        return (
            f"{self.name}: {len(self.client_s)} by the client, {sum(self.server):.0f} by the server; {told}; "
            f"{self.share_within_a_bucket:.1%} within a bucket"
        )

    def _bucket_of(self, percent: int) -> str:
        left = percent / 100 * sum(self.server)
        for index, count in enumerate(self.server):
            left -= count
            if left <= 0:
                below_s = self.bounds_s[index - 1] if index else 0.0
                return f"{below_s * 1e3:g} to {self.bounds_s[index] * 1e3:g} ms"
        return "none"


async def measure(url: str, streams: int, prompt_tokens: int, output_tokens: int) -> dict[str, Latencies]:
    """Run this many streams at a time, timed by both clocks. Raises ServerError."""
    async with open_http(url) as http, LoadClient([url], {}) as client:
        model = (await first_model(http)).id
        before = await _scraped(http)
        began_s = time.perf_counter()
        ttfts_s: list[float] = []
        itls_s: list[float] = []
        for _ in range(ROUNDS.get(streams, 1)):
            bodies = [encode_body(model, _prompt(prompt_tokens), output_tokens) for _ in range(streams)]
            wanted = [Completion(index, 0.0, prompt_tokens, output_tokens, body) for index, body in enumerate(bodies)]
            records = await asyncio.gather(*(client.complete(one, began_s, DEADLINE_S) for one in wanted))
            for record in records:
                if record.ttft_s is None or not record.ok:
                    raise ServerError(f"a stream failed: {record.error}")
                ttfts_s.append(record.ttft_s)
                itls_s += record.itls_s
        gained = difference(before, await _scraped(http), time.perf_counter() - began_s)
    return {
        name: Latencies(name, seconds, *_buckets(gained, f"ridgeline_{name}_seconds_bucket"))
        for name, seconds in (("ttft", ttfts_s), ("itl", itls_s))
    }


async def _scraped(http: httpx.AsyncClient) -> Scrape:
    seen = await scrape(http)
    if seen is None:
        raise ServerError(f"{http.base_url} publishes no ridgeline_ metrics")
    return seen


def _prompt(tokens: int) -> list[int]:
    """Return a random prompt, which no cache has."""
    return [random.randint(SMALLEST_TOKEN, LARGEST_TOKEN) for _ in range(tokens)]


def _buckets(gained: MetricsDelta, name: str) -> tuple[list[float], list[float]]:
    bounds_s = sorted(float(value) for value in gained.label_values(name, "le"))
    texts = {float(value): value for value in gained.label_values(name, "le")}
    sums = [gained.total(name, le=texts[bound_s]) for bound_s in bounds_s]
    return bounds_s, [total - before for before, total in zip([0.0, *sums], sums, strict=False)]
