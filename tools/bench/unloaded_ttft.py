"""Unloaded TTFT and first-to-second-token gap, disaggregated against colocated, alternating on the same cores.

Both deployments are up at once; the idle one's engines sleep. On a slow CPU computing the prompt takes seconds and
varies by more than the modes differ. So TTFT is also given without it: the engine reports how long it computed for the
first token, and the rest is all that a mode can add. Run it with `make bench-unloaded`.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import httpx
from rich.console import Console

from cluster.commands.serve import started
from cluster.config.loader import load_config
from cluster.runtime.ray_start import ray_runtime
from contracts.vocabulary import Mode
from loadtest.report.pools import stage_seconds
from loadtest.run.server_metrics import MetricsDelta, difference, parse_metrics

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 8
PAIRS = 20
MODES: tuple[Mode, Mode] = ("colocated", "disaggregated")


@dataclass(frozen=True)
class Timing:
    """One request as its client saw it, in milliseconds."""

    ttft_ms: float
    beside_compute_ms: float
    """TTFT minus the engine's own time for computing the first token."""
    second_token_ms: float
    itl_ms: float


async def measure(client: httpx.AsyncClient, url: str, seed: int) -> Timing:
    """Send one streamed request with a prompt that no cache has, and time it."""
    body = {
        "model": "smollm2-135m",
        "prompt": [1000 + (seed * 7919 + position * 104729) % 40000 for position in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "min_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    before = parse_metrics((await client.get(f"{url}/metrics")).text)
    began_s = time.perf_counter()
    arrived_s: list[float] = []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                arrived_s.append(time.perf_counter())  # noqa: PERF401 - each line is timed as it comes
    after = parse_metrics((await client.get(f"{url}/metrics")).text)
    compute_s = difference(before, after, wall_s=1.0).total("ridgeline_stage_seconds_sum", stage="prefill")
    assert compute_s > 0, "the server reported no time for computing the first token"
    ttft_ms = 1e3 * (arrived_s[0] - began_s)
    gaps_ms = [1e3 * (later - earlier) for earlier, later in pairwise(arrived_s)]
    return Timing(ttft_ms, ttft_ms - 1e3 * compute_s, gaps_ms[0], statistics.median(gaps_ms[1:]))


BOTH = {"server.port": "0", "ray.share_cores": "true"}
"""Both deployments have the same cores; only one of them ever has a request."""


async def run() -> None:
    """Start both modes, alternate between them, and print medians."""
    console = Console(width=140)
    loaded = {mode: load_config("deploy/local.yaml", {**BOTH, "mode": mode, "name": mode}).config for mode in MODES}
    timings: dict[Mode, list[Timing]] = {mode: [] for mode in MODES}
    async with (
        ray_runtime(loaded["colocated"]),
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
        started(loaded["colocated"], console) as one,
        started(loaded["disaggregated"], console) as other,
    ):
        urls = dict(zip(MODES, (one.url, other.url), strict=True))
        for pair in range(-2, PAIRS):  # two pairs warm up, since colocated has two replicas
            order = MODES if pair % 2 else MODES[::-1]
            for mode in order:
                timing = await measure(client, urls[mode], seed=pair + 100)
                if pair >= 0:
                    timings[mode].append(timing)
                    console.print(
                        f"{pair + 1:2d} {mode:14s} TTFT {timing.ttft_ms:7.1f} ms "
                        f"({timing.beside_compute_ms:5.1f} beside computing), t2 +{timing.second_token_ms:6.1f}, "
                        f"decode step {timing.itl_ms:5.1f} ms"
                    )
        scraped = parse_metrics((await client.get(f"{urls['disaggregated']}/metrics", follow_redirects=True)).text)
        stages = stage_seconds(MetricsDelta(scraped.counters, scraped.gauges, wall_s=1.0))
        console.print(
            "disaggregated, mean of each stage: " + ", ".join(f"{k} {1e3 * v:.1f} ms" for k, v in stages.items())
        )
    medians = {
        mode: Timing(*(statistics.median(getattr(t, name) for t in timings[mode]) for name in Timing.__annotations__))
        for mode in MODES
    }
    for mode, median in medians.items():
        console.print(
            f"{mode:14s} median of {PAIRS}: TTFT {median.ttft_ms:.1f} ms, of it beside computing "
            f"{median.beside_compute_ms:.1f}, first to second token {median.second_token_ms:.1f} ms, "
            f"decode step {median.itl_ms:.1f} ms"
        )
    split, whole = medians["disaggregated"], medians["colocated"]
    ttft_ms, added_ms = split.ttft_ms - whole.ttft_ms, split.beside_compute_ms - whole.beside_compute_ms
    console.print(f"TTFT disaggregated - colocated: {ttft_ms:+.1f} ms; beside computing {added_ms:+.1f} ms (limit +10)")
    console.print(f"first to second token - decode step: {split.second_token_ms - split.itl_ms:+.1f} ms (limit +40)")
    if max(ttft_ms, added_ms) > 10 or split.second_token_ms - split.itl_ms > 40:
        sys.exit(1)


if __name__ == "__main__":
    asyncio.run(run())
