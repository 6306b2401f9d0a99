"""First to second token with and without overlap, alone and under load, in alternation on the same cores.

Two disaggregated deployments are up at once, one with `transfer.overlap` and one without; the idle one's engines sleep,
but its router and workers ask each other how they are. `--ways after` leaves out the one without overlap.
The gaps after the second token are those of the same streams, so what the first gap is longer by is the hand-over's
price. Under load prompts arrive at random and keep prefill busy for a given share of the time.

usage: python -m tools.bench.hand_over [--alone 10] [--loaded 24] [--rounds 2] [--busy 0.6] [--ways WAY] [--set N=V]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count, pairwise

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.commands.serve import started
from cluster.config.loader import load_config
from cluster.runtime.ray_start import ray_runtime
from loadtest.report.pools import stage_seconds
from loadtest.run.server_metrics import MetricsDelta, difference, parse_metrics

PROMPT_TOKENS = 512
ALONE_TOKENS = 16
LOADED_TOKENS = 64
MOST_STEPS_LOADED = 0.6
MOST_MS_ALONE = 15.0
WAYS = {"before": "false", "after": "true"}
"""The value of `transfer.overlap`."""
_seeds = count(100)


@dataclass
class Gaps:
    """The gaps of some streams, in milliseconds."""

    first_ms: list[float] = field(default_factory=list)
    later_ms: list[float] = field(default_factory=list)

    def add(self, arrived_s: Sequence[float]) -> None:
        """Add one stream, by when its tokens arrived."""
        gaps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(arrived_s)]
        self.first_ms.append(gaps_ms[0])
        self.later_ms += gaps_ms[1:]

    @property
    def step_ms(self) -> float:
        """The median gap after the second token."""
        return statistics.median(self.later_ms)

    @property
    def tax_ms(self) -> float:
        """How much longer the first gap is than a later one, by their medians."""
        return statistics.median(self.first_ms) - self.step_ms

    def row(self) -> list[str]:
        """Return the cells of a table: medians, 90th percentiles, the difference of the medians."""
        first, later = (np.percentile(gaps, (50, 90)) for gaps in (self.first_ms, self.later_ms))
        return [
            str(len(self.first_ms)),
            f"{first[0]:.0f} / {first[1]:.0f}",
            f"{later[0]:.0f} / {later[1]:.0f}",
            f"{self.tax_ms:+.0f}",
            f"{self.tax_ms / self.step_ms:+.2f}",
        ]


async def stream(http: httpx.AsyncClient, url: str, output_tokens: int) -> list[float]:
    """Send one request with a prompt that no cache has; return when its tokens arrived, after when it was sent."""
    seed = next(_seeds)
    body = {
        "model": "smollm2-135m",
        "prompt": [1000 + (seed * 7919 + position * 104729) % 40000 for position in range(PROMPT_TOKENS)],
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    times_s = [time.perf_counter()]
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and any(each["token_ids"] for each in json.loads(line[6:])["choices"]):
                times_s.append(time.perf_counter())  # noqa: PERF401 - each line is timed as it comes
    return times_s


async def alone(http: httpx.AsyncClient, url: str, requests: int) -> tuple[Gaps, float]:
    """Send requests one after the other; return their gaps and the median TTFT in seconds."""
    gaps, ttfts_s = Gaps(), []
    for _ in range(requests):
        sent_s, *arrived_s = await stream(http, url, ALONE_TOKENS)
        gaps.add(arrived_s)
        ttfts_s.append(arrived_s[0] - sent_s)
    return gaps, statistics.median(ttfts_s)


async def loaded(http: httpx.AsyncClient, url: str, requests: int, rate: float, seed: int) -> Gaps:
    """Send Poisson arrivals and return their gaps."""
    source = random.Random(seed)
    running: list[asyncio.Task[list[float]]] = []
    for _ in range(requests):
        running.append(asyncio.create_task(stream(http, url, LOADED_TOKENS)))
        await asyncio.sleep(source.expovariate(rate))
    gaps = Gaps()
    for _, *arrived_s in await asyncio.gather(*running):
        gaps.add(arrived_s)
    return gaps


async def measure(given: argparse.Namespace, console: Console) -> dict[tuple[str, str], Gaps]:
    """Start the deployments and alternate between them; return the gaps by (load, way)."""
    settings = dict(each.split("=", 1) for each in given.set)
    loaded_configs = {
        way: load_config(
            "deploy/local.yaml",
            {"server.port": "0", "ray.share_cores": "true", "name": way, "transfer.overlap": overlap, **settings},
        ).config
        for way, overlap in WAYS.items()
        if way in given.ways
    }
    found = {(load, way): Gaps() for load in ("alone", "loaded") for way in loaded_configs}
    async with AsyncExitStack() as up:
        await up.enter_async_context(ray_runtime(next(iter(loaded_configs.values()))))
        http = await up.enter_async_context(httpx.AsyncClient(timeout=300, trust_env=False))
        urls = {
            way: (await up.enter_async_context(started(config, console))).url for way, config in loaded_configs.items()
        }
        ttft_s = statistics.median([(await alone(http, url, 2))[1] for url in urls.values()])
        rate = given.busy / ttft_s
        console.print(f"a prompt takes {ttft_s:.2f} s: {rate:.2f} requests/s keep prefill {given.busy:.0%} busy")
        for number in range(given.rounds):
            for way in list(urls)[:: -1 if number % 2 else 1]:
                found["alone", way].first_ms += (gaps := (await alone(http, urls[way], given.alone))[0]).first_ms
                found["alone", way].later_ms += gaps.later_ms
                scraped = parse_metrics((await http.get(f"{urls[way]}/metrics")).text)
                gaps = await loaded(http, urls[way], given.loaded, rate, seed=number)
                found["loaded", way].first_ms += gaps.first_ms
                found["loaded", way].later_ms += gaps.later_ms
                told = difference(scraped, parse_metrics((await http.get(f"{urls[way]}/metrics")).text), wall_s=1.0)
                console.print(f"round {number + 1}, {way}, loaded: {' | '.join(gaps.row())}; {stages(told)}")
    return found


def stages(told: MetricsDelta) -> str:
    """Name the mean of each stage of a hand-over."""
    means_s = stage_seconds(told)
    return ", ".join(
        f"{name} {1e3 * means_s.get(name, 0.0):.0f} ms" for name in ("handoff_wait", "wire", "decode_queue")
    )


def main() -> None:
    """Measure, print the table; exit with 1 if the hand-over costs more than its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", type=int, default=10, help="requests a round that run alone")
    parser.add_argument("--loaded", type=int, default=24, help="requests a round that arrive at random")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--busy", type=float, default=0.6, help="share of the time that prefill is to be busy")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="before: without overlap")
    parser.add_argument("--set", action="append", default=[], help="a setting of both deployments, as name=value")
    given = parser.parse_args()
    console = Console(width=160)
    found = asyncio.run(measure(given, console))
    table = Table(
        "load", "overlap", "streams", "1st to 2nd p50 / p90 ms", "later gaps p50 / p90 ms", "tax ms", "in steps"
    )
    for (load, way), gaps in found.items():
        table.add_row(load, WAYS[way], *gaps.row())
    console.print(table)
    if "after" not in given.ways:
        return
    alone_ms, under_load = found["alone", "after"].tax_ms, found["loaded", "after"]
    steps = under_load.tax_ms / under_load.step_ms
    console.print(
        f"alone {alone_ms:+.0f} ms (limit +{MOST_MS_ALONE:.0f}), loaded {steps:+.2f} steps (limit +{MOST_STEPS_LOADED})"
    )
    if alone_ms > MOST_MS_ALONE or steps > MOST_STEPS_LOADED:
        sys.exit(1)


if __name__ == "__main__":
    main()
