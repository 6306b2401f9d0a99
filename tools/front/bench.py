"""Measures what a router can carry and what a token costs it: CPU time, tokens/s, gaps. No model and no engine runs.

Streams go over one router, then over two with their dispatcher, and again. Each router is pinned to a core of its own;
workers, clients and dispatcher use whatever cores there are. Two are enough for one router.

usage: python -m tools.front.bench --model PATH [--routers 1,2] [--streams 64,512,2048] [--out runs/bench-front]
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from ridgeline.loadtest.run.machine import describe_machine
from tools.front.streams import lanes

REPOSITORY: Final = Path(__file__).parents[2]
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 128
LEAST_STREAMS: Final = 64
"""Fewer at a time are sent again until there were so many."""
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One run of streams over some routers."""

    routers: int
    streams: int
    tokens_per_s: float
    us_per_token: float
    """CPU time of all routers, and of their dispatcher, over tokens."""
    tokens_per_event: float
    """Above 1 when the router was so late that it sent several tokens at once."""
    router_cpu: float
    """Cores that they used."""
    ttft_p50_ms: float
    gap_p50_ms: float
    gap_max_ms: float
    rss_mib: float
    """Memory of the largest router at the end."""
    failed: int

    def __str__(self) -> str:
        return (
            f"{self.routers} routers, {self.streams} streams: {self.tokens_per_s:,.0f} tokens/s, "
            f"{self.us_per_token:.0f} us a token, {self.router_cpu:.2f} cores, {self.tokens_per_event:.2f} tokens an "
            f"event, TTFT p50 {self.ttft_p50_ms:.0f} ms, largest gap p50 {self.gap_p50_ms:.0f} max "
            f"{self.gap_max_ms:.0f} ms, {self.rss_mib:.0f} MiB, {self.failed} failed"
        )


@contextmanager
def process(module: str, *arguments: str, core: int | None = None) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run a module on one core or all; yield it and the words of the one line that it prints once it serves."""
    pinned = [] if core is None else ["taskset", "-c", str(core)]
    command = [*pinned, sys.executable, "-W", "ignore", "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            words = running.stdout.readline().split()
            if not words:
                raise SystemExit(f"{running.args!r} ended before it served")
            yield running, words
        finally:
            running.stdin.close()


@contextmanager
def serving(model: str, routers: int, step_s: float) -> Iterator[tuple[str, list[psutil.Process]]]:
    """Run workers, and routers with a dispatcher if there are several; yield the URL and these processes."""
    with ExitStack() as stack:
        _, addresses = stack.enter_context(process("tools.front.workers", str(step_s)))

        def started(*words: str, core: int | None = None) -> tuple[psutil.Process, str]:
            router = process("tools.front.router", model, *words, *addresses, core=core)
            running, told = stack.enter_context(router)
            return psutil.Process(running.pid), told[0]

        if routers == 1:
            router, url = started(core=0)
            yield url, [router]
            return
        dispatcher, at = started("--dispatcher")
        processes, port = [dispatcher], "0"
        for core in range(routers):
            router, url = started("--shares", at, port, core=core)
            processes.append(router)
            port = url.rpartition(":")[2]
        yield url, processes


def measure(url: str, processes: Sequence[psutil.Process], streams: int) -> Figures:
    """Send the streams and return what they cost."""
    routers = max(1, len(processes) - 1)
    asyncio.run(lanes(url, 2 * routers, 1, PROMPT_TOKENS, OUTPUT_TOKENS))  # what a first request loads
    before_s, began_s = _cpu_s(processes), time.monotonic()
    records = asyncio.run(lanes(url, streams, max(1, LEAST_STREAMS // streams), PROMPT_TOKENS, OUTPUT_TOKENS))
    took_s, cpu_s = time.monotonic() - began_s, _cpu_s(processes) - before_s
    good = [record for record in records if record.complete]
    tokens = OUTPUT_TOKENS * len(good)
    gaps_ms = [record.largest_gap_s * 1e3 for record in good]
    return Figures(
        routers=routers,
        streams=streams,
        tokens_per_s=tokens / took_s,
        us_per_token=1e6 * cpu_s / max(1, tokens),
        tokens_per_event=tokens / max(1, sum(record.events for record in good)),
        router_cpu=cpu_s / took_s,
        ttft_p50_ms=_median([record.ttft_s * 1e3 for record in good]),
        gap_p50_ms=_median(gaps_ms),
        gap_max_ms=max(gaps_ms, default=0.0),
        rss_mib=max(one.memory_info().rss for one in processes) / MIB,
        failed=len(records) - len(good),
    )


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds that they have used, kernel included."""
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def _median(values: Sequence[float]) -> float:
    """Return the upper median; 0 without values."""
    return sorted(values)[len(values) // 2] if values else 0.0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    """Measure each number of routers in turn, and write summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a model with its tokenizer; no weights are read")
    parser.add_argument("--routers", type=_numbers, default=[1, 2], help="numbers of routers, in turn")
    parser.add_argument("--streams", type=_numbers, default=[64, 512, 2048], help="numbers of streams at a time")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=2, help="how often each number of routers has its turn")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-front"))
    asked = parser.parse_args()
    found: list[Figures] = []
    for routers in asked.routers * asked.rounds:
        with serving(asked.model, routers, asked.step_s) as (url, processes):
            for streams in asked.streams:
                found.append(measure(url, processes, streams))
                sys.stdout.write(f"{found[-1]}\n")
                sys.stdout.flush()
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "summary.json"
    summary = {"machine": describe_machine(), "runs": found}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
