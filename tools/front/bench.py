"""Measures what a router can carry and what a token costs it: CPU time, tokens/s, gaps. No model and no engine runs.

Two parts, on as many cores as the machine has (two are enough for the first):

`one`      one router, pinned to a core of its own, with some numbers of streams at a time (16, 64, 512 and 2,048)
`two`      the same streams over one router and over two with their dispatcher, in alternation; workers, clients and
           dispatcher share the two cores with the routers

usage: python -m tools.front.bench [--parts one,two] [--model PATH] [--out runs/bench-front]
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
from typing import Any, Final

import msgspec
import psutil

from ridgeline.loadtest.run.machine import describe_machine
from tools.front.streams import StreamRecord, lanes

REPOSITORY: Final = Path(__file__).parents[2]
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 128
ROUNDS_OF_ONE: Final = 64
"""Few streams are sent again until there were so many."""
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Figures:
    """One run of streams over some routers."""

    routers: int
    streams: int
    tokens_per_s: float
    us_per_token: float
    """CPU time of all routers over tokens."""
    tokens_per_event: float
    """Above 1 when the router was so late that it sent several tokens at once."""
    router_cpu: float
    """Cores that the routers used."""
    ttft_p50_ms: float
    gap_p50_ms: float
    gap_max_ms: float
    rss_mib: float
    """Memory of the largest router at the end."""
    failed: int


@contextmanager
def process(module: str, *arguments: str, cores: Sequence[int] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run a module that prints one line when it serves and ends with its input, on some cores."""
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    command = [*pinned, sys.executable, "-W", "ignore", "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=REPOSITORY
    ) as running:
        try:
            yield running
        finally:
            assert running.stdin is not None
            running.stdin.close()


def told(running: subprocess.Popen[str]) -> list[str]:
    """Return the words of the line with which a process says that it serves."""
    assert running.stdout is not None
    words = running.stdout.readline().split()
    if not words:
        raise SystemExit(f"{running.args!r} ended before it served")
    return words


@dataclass(frozen=True)
class Fleet:
    """What `fleet` runs."""

    urls: list[str]
    routers: list[psutil.Process]
    """With the dispatcher, if there is one."""


@contextmanager
def fleet(
    model: str,
    *,
    workers: tuple[int, int],
    step_s: float,
    output_tokens: int,
    cores: list[list[int]],
) -> Iterator[Fleet]:
    """Run workers, and one router for each entry of `cores`; several share a dispatcher and a port."""
    sizes = (*map(str, workers), str(step_s), str(output_tokens))
    with ExitStack() as stack:
        hosts = stack.enter_context(process("tools.front.workers", *sizes))
        addresses = told(hosts)

        def router(*words: str, on: Sequence[int] = ()) -> tuple[subprocess.Popen[str], str]:
            running = stack.enter_context(process("tools.front.router", model, *words, *addresses, cores=on))
            return running, told(running)[0]

        if len(cores) == 1:
            running, url = router(on=cores[0])
            yield Fleet([url], [psutil.Process(running.pid)])
            return
        dispatcher, at = router("--dispatcher")
        started, url, port = [dispatcher], "", "0"
        for pinned in cores:
            running, url = router("--shares", at, port, on=pinned)
            port = url.rpartition(":")[2]
            started.append(running)
        yield Fleet([url], [psutil.Process(one.pid) for one in started])


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds that they have used, kernel included."""
    return sum(sum(one.cpu_times()[:2]) for one in processes)


def quantile(values: list[float], q: float) -> float:
    """Return the q-quantile; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def figures(
    records: list[StreamRecord], output_tokens: int, took_s: float, cpu: float, processes: Sequence[psutil.Process]
) -> Figures:
    """Summarise one run."""
    good = [record for record in records if record.complete]
    tokens = output_tokens * len(good)
    gaps_ms = [record.largest_gap_s * 1e3 for record in good]
    return Figures(
        routers=max(1, len(processes) - 1),
        streams=len(records),
        tokens_per_s=tokens / took_s,
        us_per_token=1e6 * cpu / max(1, tokens),
        tokens_per_event=tokens / max(1, sum(record.events for record in good)),
        router_cpu=cpu / took_s,
        ttft_p50_ms=quantile([record.ttft_s * 1e3 for record in good], 0.5),
        gap_p50_ms=quantile(gaps_ms, 0.5),
        gap_max_ms=max(gaps_ms, default=0.0),
        rss_mib=max(one.memory_info().rss for one in processes) / MIB,
        failed=len(records) - len(good),
    )


def say(name: str, found: Figures) -> None:
    """Print one line."""
    sys.stdout.write(
        f"{name}: {found.tokens_per_s:,.0f} tokens/s, {found.us_per_token:.0f} us a token, {found.router_cpu:.2f} "
        f"cores, {found.tokens_per_event:.2f} tokens an event, TTFT p50 {found.ttft_p50_ms:.0f} ms, largest gap p50 "
        f"{found.gap_p50_ms:.0f} max {found.gap_max_ms:.0f} ms, {found.rss_mib:.0f} MiB, {found.failed} failed\n"
    )
    sys.stdout.flush()


def measure(urls: list[str], processes: Sequence[psutil.Process], streams: int, rounds: int) -> Figures:
    """Send the streams and return what they cost."""
    asyncio.run(lanes(urls, 2 * len(urls), 1, PROMPT_TOKENS, OUTPUT_TOKENS))  # what a first request loads
    before_s, began_s = cpu_s(processes), time.monotonic()
    records = asyncio.run(lanes(urls, streams, rounds, PROMPT_TOKENS, OUTPUT_TOKENS))
    return figures(records, OUTPUT_TOKENS, time.monotonic() - began_s, cpu_s(processes) - before_s, processes)


def one_router(model: str, step_s: float, numbers: Sequence[int]) -> list[Figures]:
    """Measure one router on a core of its own."""
    found = []
    with fleet(model, workers=(1, 1), step_s=step_s, output_tokens=OUTPUT_TOKENS, cores=[[0]]) as ran:
        for streams in numbers:
            rounds = max(1, ROUNDS_OF_ONE // streams)
            found.append(measure(ran.urls, ran.routers, streams, rounds))
            say(f"one router, {streams} streams", found[-1])
    return found


def two_routers(model: str, step_s: float, rounds: int) -> list[Figures]:
    """Measure one and two routers in alternation."""
    found = []
    for count in (1, 2) * rounds:
        pinned = [[core] for core in range(count)]
        with fleet(model, workers=(1, 1), step_s=step_s, output_tokens=OUTPUT_TOKENS, cores=pinned) as ran:
            found.append(measure(ran.urls, ran.routers, 512, 2))
            say(f"{count} routers, 512 streams", found[-1])
    return found


def main() -> None:
    """Run the parts and write summary.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="one,two")
    parser.add_argument("--model", required=True, help="directory of a model with its tokenizer; no weights are read")
    parser.add_argument("--streams", default="16,64,512,2048", help="numbers of streams for the part `one`")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=2, help="alternations of one router and two")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-front"))
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := {*parts} - {"one", "two"}:
        parser.error(f"there is no part {', '.join(unknown)}: choose from one, two")
    summary: dict[str, Any] = {"machine": describe_machine()}
    if "one" in parts:
        ran = one_router(asked.model, asked.step_s, [int(number) for number in asked.streams.split(",")])
        best = max(ran, key=lambda one: one.tokens_per_s)
        summary |= {"tokens_per_s": best.tokens_per_s, "us_per_token": best.us_per_token, "routers": 1, "one": ran}
    if "two" in parts:
        summary["two"] = two_routers(asked.model, asked.step_s, asked.rounds)
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "summary.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
