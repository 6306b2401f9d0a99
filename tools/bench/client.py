"""Measures our load generator against a server without a model: what it adds to every figure it reports.

The server's first token is due 20 ms after the request and each other one 10 ms after the one before, so what is
measured beyond that is the floor of the client, of both ends' sockets, and of the machine's scheduling.

usage: python -m tools.bench.client [--rate 50] [--seconds 20] [--rounds 3] [--cores 1] [--out runs/bench-client]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from loadtest.run.client.driver import client_process
from loadtest.run.client.process import ClientLoad, Job
from loadtest.run.client.stream import Completion, encode_body
from loadtest.run.machine import describe_machine, disturbance, parse_cores, read_cpu
from loadtest.run.records import RequestRecord
from tools.bench.null_server import MODEL, serving

INPUT_TOKENS, OUTPUT_TOKENS = 512, 64
TTFT_S, TPOT_S = 0.02, 0.01
DEADLINE_S = 60.0
MOST_P99_LAG_MS: Final = 5.0


def requests(rate: float, seconds: float, seed: int) -> list[Completion]:
    """Make Poisson arrivals of one size."""
    source = random.Random(seed)
    made: list[Completion] = []
    arrival_s = 0.0
    while arrival_s < seconds:
        prompt = [source.randrange(1000) for _ in range(INPUT_TOKENS)]
        body = encode_body(MODEL, prompt, OUTPUT_TOKENS)
        made.append(Completion(len(made), arrival_s, INPUT_TOKENS, OUTPUT_TOKENS, body))
        arrival_s += source.expovariate(rate)
    return made


async def measure(url: str, wanted: list[Completion], cores: tuple[int, ...]) -> dict[str, Any]:
    """Send the requests once and return the figures of the client."""
    records: list[RequestRecord] = []
    job = Job(url, {}, "completions", DEADLINE_S, len(wanted), cores)
    async with client_process(job, wanted) as client:
        before = read_cpu()
        load = await client.run(lambda _: None, records.append)
        others = disturbance(before, read_cpu())
    return figures(records, load) | {"stolen": others.stolen, "other_work": others.other}


def figures(records: list[RequestRecord], load: ClientLoad) -> dict[str, Any]:
    """Return what the client adds: lag, TTFT and gaps beyond the server's pace, CPU seconds a token."""
    lags_ms = [record.send_lag_s * 1e3 for record in records]
    ttfts_ms = [(record.ttft_s - TTFT_S) * 1e3 for record in records if record.ttft_s is not None]
    gaps_ms = [abs(gap_s - TPOT_S) * 1e3 for record in records for gap_s in record.itls_s]
    tokens = sum(record.output_tokens for record in records)
    return {
        "requests": len(records),
        "failed": sum(not record.ok for record in records),
        "p50_lag_ms": float(np.percentile(lags_ms, 50)),
        "p99_lag_ms": float(np.percentile(lags_ms, 99)),
        "max_lag_ms": max(lags_ms),
        "p50_ttft_floor_ms": float(np.percentile(ttfts_ms, 50)),
        "p99_ttft_floor_ms": float(np.percentile(ttfts_ms, 99)),
        "p50_itl_floor_ms": float(np.percentile(gaps_ms, 50)),
        "p99_itl_floor_ms": float(np.percentile(gaps_ms, 99)),
        "cpu_us_per_token": load.cpu_share * load.duration_s / tokens * 1e6,
        "client": msgspec.to_builtins(load),
    }


def _rounds(url: str, rate: float, seconds: float, rounds: int, cores: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for seed in range(rounds):
        found = asyncio.run(measure(url, requests(rate, seconds, seed), cores))
        sys.stdout.write(
            f"round {seed + 1}: send lag p50 {found['p50_lag_ms']:.2f}, p99 {found['p99_lag_ms']:.2f}, largest "
            f"{found['max_lag_ms']:.1f} ms; TTFT +{found['p50_ttft_floor_ms']:.2f} ms (p99 "
            f"+{found['p99_ttft_floor_ms']:.2f}); gaps off by {found['p50_itl_floor_ms']:.2f} ms (p99 "
            f"{found['p99_itl_floor_ms']:.2f}); {found['cpu_us_per_token']:.0f} us of CPU a token, "
            f"{found['client']['cpu_share']:.0%} of a core; {found['client']['events_per_s']:.0f} events/s; "
            f"{found['failed']} failed; other work {found['other_work']:.0%}, stolen {found['stolen']:.1%}\n"
        )
        sys.stdout.flush()
        yield found


def main() -> None:
    """Measure, print, write summary.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", help="cores of the client, such as 1; the server may use all")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-client"))
    given = parser.parse_args()
    with serving(TTFT_S, TPOT_S) as url:
        found = list(_rounds(url, given.rate, given.seconds, given.rounds, parse_cores(given.cores)))
    median_ms = statistics.median(each["p99_lag_ms"] for each in found)
    summary = {
        "rate": given.rate,
        "seconds": given.seconds,
        "input_tokens": INPUT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "server_ttft_ms": TTFT_S * 1e3,
        "server_tpot_ms": TPOT_S * 1e3,
        "median_p99_lag_ms": median_ms,
        "rounds": found,
        "machine": describe_machine(),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "summary.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    verdict = "within" if median_ms <= MOST_P99_LAG_MS else "beyond"
    sys.stdout.write(f"median p99 send lag {median_ms:.2f} ms, {verdict} {MOST_P99_LAG_MS:g} ms; wrote {path}\n")


if __name__ == "__main__":
    main()
