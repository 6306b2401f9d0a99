"""Measures what a router can carry and what a token costs it: CPU time, tokens/s, gaps. No model and no engine runs.

The router is pinned to a core; workers and clients use whatever cores there are, of which one more is enough.

usage: python -m tools.front.bench --model PATH [--streams 16,64,512,2048] [--out runs/bench-front]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from ridgeline.loadtest.run.machine import describe_machine
from tools.child import running
from tools.front.streams import lanes

PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 128
LEAST_STREAMS: Final = 64
"""Fewer at a time are sent again until there were so many."""
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One run of streams."""

    streams: int
    tokens_per_s: float
    us_per_token: float
    """The router's CPU time over tokens."""
    tokens_per_event: float
    """Above 1 when the router was so late that it sent several tokens at once."""
    router_cpu: float
    """Cores that it used."""
    ttft_p50_ms: float
    gap_p50_ms: float
    gap_max_ms: float
    rss_mib: float
    """Its memory at the end."""
    failed: int

    def __str__(self) -> str:
        return (
            f"{self.streams} streams: {self.tokens_per_s:,.0f} tokens/s, {self.us_per_token:.0f} us a token, "
            f"{self.router_cpu:.2f} cores, {self.tokens_per_event:.2f} tokens an event, TTFT p50 "
            f"{self.ttft_p50_ms:.0f} ms, largest gap p50 {self.gap_p50_ms:.0f} max {self.gap_max_ms:.0f} ms, "
            f"{self.rss_mib:.0f} MiB, {self.failed} failed"
        )


def measure(url: str, router: psutil.Process, streams: int) -> Figures:
    """Send the streams and return what they cost."""
    asyncio.run(lanes(url, 2, 1, PROMPT_TOKENS, OUTPUT_TOKENS))  # what a first request loads
    before_s, began_s = _cpu_s(router), time.monotonic()
    records = asyncio.run(lanes(url, streams, max(1, LEAST_STREAMS // streams), PROMPT_TOKENS, OUTPUT_TOKENS))
    took_s, cpu_s = time.monotonic() - began_s, _cpu_s(router) - before_s
    good = [record for record in records if record.complete]
    tokens = OUTPUT_TOKENS * len(good)
    gaps_ms = [record.largest_gap_s * 1e3 for record in good]
    return Figures(
        streams=streams,
        tokens_per_s=tokens / took_s,
        us_per_token=1e6 * cpu_s / max(1, tokens),
        tokens_per_event=tokens / max(1, sum(record.events for record in good)),
        router_cpu=cpu_s / took_s,
        ttft_p50_ms=_median([record.ttft_s * 1e3 for record in good]),
        gap_p50_ms=_median(gaps_ms),
        gap_max_ms=max(gaps_ms, default=0.0),
        rss_mib=router.memory_info().rss / MIB,
        failed=len(records) - len(good),
    )


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds that it has used, kernel included."""
    return sum(process.cpu_times()[:2])


def _median(values: Sequence[float]) -> float:
    """Return the upper median; 0 without values."""
    return sorted(values)[len(values) // 2] if values else 0.0


def main() -> None:
    """Measure each number of streams, and write summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a model with its tokenizer; no weights are read")
    parser.add_argument("--streams", default="16,64,512,2048", help="numbers of streams at a time")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds between two tokens of a stream")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-front"))
    asked = parser.parse_args()
    found: list[Figures] = []
    with (
        running("tools.front.servers", "workers", str(asked.step_s)) as workers,
        running("tools.front.servers", "router", asked.model, *workers.told.values(), core=0) as router,
    ):
        for streams in map(int, asked.streams.split(",")):
            found.append(measure(router.told["url"], psutil.Process(router.pid), streams))
            sys.stdout.write(f"{found[-1]}\n")
            sys.stdout.flush()
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "summary.json"
    summary = {"machine": describe_machine(), "runs": found}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
