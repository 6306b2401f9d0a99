"""Tests how a running server handles more load than it can serve, and whether one client can crowd out another.

    python -m tools.bench.overload http://127.0.0.1:8000 --rate-multiple 3 --seconds 120
    python -m tools.bench.overload http://127.0.0.1:8000 --fairness --seconds 60

The first command sends open-loop Poisson traffic at a multiple of the rate that the server sustains (measured first, or
`--rate`). Accepted requests must have their first token within the bound, the others must get 429 at once with
Retry-After, and the memory of the server's processes must stay flat. The second floods with 2,000-token prompts from
one client while another sends short ones, which must start within the stated bound. Clients are told apart by source
address, or by `--api-keys A,B`. Prints a table, writes JSON with `--json`, and exits with 1 on a violation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from rich.console import Console
from rich.table import Table

WARMUP_S = 15.0
CONCURRENT = 8
LONG_TOKENS, SHORT_TOKENS = 2000, 40
FLOOD_OUTSTANDING = 12
QUANTUM_TOKENS = 512
REFUSAL_BOUND_S = 0.05
RSS_GROWTH, RSS_SLACK_BYTES = 1.1, 64 << 20
MIB = 1 << 20


@dataclass(frozen=True)
class Answer:
    """One request as its client saw it."""

    status: int
    first_s: float
    """Seconds to the first token, or to the whole refusal."""
    retry_after: str | None = None
    finished: bool = False
    problem: str = ""


@dataclass
class Findings:
    """The rows of the table, and the violations."""

    rows: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def require(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.violations.append(sentence)


class Sender:
    """One client of the server, with its address or key; its prompts are in no cache."""

    def __init__(self, http: httpx.AsyncClient, model: str, seed: int) -> None:
        self._http = http
        self._model = model
        self._random = random.Random(seed)

    async def send(self, prompt_tokens: int, output_tokens: int) -> Answer:
        """Send one streamed completion; every failure becomes an Answer."""
        body = {
            "model": self._model,
            "prompt": [self._random.randrange(1000, 40000) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        began_s, first_s, finished = time.perf_counter(), None, False
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                retry_after = response.headers.get("retry-after")
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    return Answer(response.status_code, time.perf_counter() - began_s, retry_after, problem=text[:200])
                async for line in response.aiter_lines():
                    if line.startswith('data: {"error'):
                        return Answer(200, time.perf_counter() - began_s, problem=line[:200])
                    if first_s is None and line.startswith("data: {"):
                        first_s = time.perf_counter() - began_s
                    finished = finished or line == "data: [DONE]"
        except httpx.HTTPError as error:
            return Answer(0, time.perf_counter() - began_s, problem=f"{type(error).__name__}: {error}")
        return Answer(200, first_s or 0.0, finished=finished, problem="" if finished else "the stream was cut")


@asynccontextmanager
async def sender(args: argparse.Namespace, model: str, number: int) -> AsyncIterator[Sender]:
    """Open client 0 or 1 with its own API key, or else its own source address."""
    keys: list[str] = args.api_keys.split(",") if args.api_keys else []
    transport = httpx.AsyncHTTPTransport(
        local_address=None if keys or not args.fairness else f"127.0.0.{2 + number}",
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )
    headers = {"authorization": f"Bearer {keys[min(number, len(keys) - 1)]}"} if keys else {}
    async with httpx.AsyncClient(
        base_url=args.url, transport=transport, timeout=900, headers=headers, trust_env=False
    ) as http:
        yield Sender(http, model, seed=time.time_ns() + number)


async def held_rate(client: Sender, args: argparse.Namespace, seconds: float) -> float:
    """Return the requests per second that the server answers with a few always in progress."""
    end_s, finished = time.perf_counter() + seconds, 0

    async def one_after_the_other() -> None:
        nonlocal finished
        while time.perf_counter() < end_s:
            answer = await client.send(args.prompt_tokens, args.output_tokens)
            finished += answer.finished

    began_s = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENT)))
    if not finished:
        sys.exit("the server answered nothing: is it running, and does it accept prompts of --prompt-tokens?")
    return finished / (time.perf_counter() - began_s)


async def poisson(client: Sender, args: argparse.Namespace, rate: float) -> list[Answer]:
    """Send in an open loop: the time of each request does not depend on answers."""
    chance, sent = random.Random(args.seed), []
    began_s = next_s = time.perf_counter()
    while (next_s := next_s + chance.expovariate(rate)) < began_s + args.seconds:
        await asyncio.sleep(next_s - time.perf_counter())
        sent.append(asyncio.create_task(client.send(args.prompt_tokens, args.output_tokens)))
    return list(await asyncio.gather(*sent))


def server_processes(args: argparse.Namespace) -> list[psutil.Process]:
    """Return those of `--pids`, or else the process on the port and all that its parent, a raylet, started."""
    if args.pids:
        return [psutil.Process(int(pid)) for pid in args.pids.split(",")]
    port = urlsplit(args.url).port
    pids = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port and c.pid}
    found: list[psutil.Process] = []
    for pid in pids:
        parent = psutil.Process(pid).parent()
        found += parent.children(recursive=True) if parent is not None and parent.pid != 1 else [psutil.Process(pid)]
    return found


def rss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return the memory of those that are still alive."""
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


async def overload(args: argparse.Namespace, model: str) -> Findings:
    """Send more than the server sustains, for a while."""
    findings, processes = Findings(), server_processes(args)
    async with sender(args, model, 0) as client:
        rate = args.rate or await held_rate(client, args, WARMUP_S)
        before = rss_bytes(processes)
        sending = asyncio.create_task(poisson(client, args, args.rate_multiple * rate))
        await asyncio.sleep(args.seconds / 4)
        early = rss_bytes(processes)
        answers = await sending
        after = rss_bytes(processes)
    accepted = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status == 429]
    failed = [answer for answer in answers if not answer.finished and answer.status != 429]
    waits = sorted({answer.retry_after for answer in refused}, key=lambda text: (len(text or ""), text or ""))
    ttfts_s = [answer.first_s for answer in accepted]
    refusals_s = [answer.first_s for answer in refused]
    findings.rows = {
        "held rate, requests/s": round(rate, 2),
        "sent": len(answers),
        "accepted": len(accepted),
        "refused with 429": len(refused),
        "failed": len(failed),
        **percentiles("TTFT of accepted, s", ttfts_s),
        "TTFT bound, s": args.ttft_bound_s,
        **percentiles("latency of 429, ms", [1e3 * seconds for seconds in refusals_s]),
        "Retry-After": waits,
        "reasons": dict(Counter(answer.problem for answer in failed).most_common(3)),
        "server RSS before / after a quarter / after, MiB": [round(rss / MIB) for rss in (before, early, after)],
    }
    findings.require(bool(accepted) and bool(refused), "nothing was accepted, or nothing was refused")
    findings.require(not failed, f"{len(failed)} requests were neither answered nor refused with 429")
    findings.require(max(ttfts_s, default=0.0) <= args.ttft_bound_s, "a first token came after the bound")
    findings.require(quantile(refusals_s, 0.99) <= REFUSAL_BOUND_S, "the 99th percentile of refusals is over 50 ms")
    findings.require(None not in waits, "a 429 had no Retry-After")
    findings.require(bool(processes), "the server's processes were not found: give --pids")
    findings.require(after <= RSS_GROWTH * early + RSS_SLACK_BYTES, "the memory of the server grew")
    return findings


async def fairness(args: argparse.Namespace, model: str) -> Findings:
    """Flood with long prompts from one client while another sends short ones."""
    findings = Findings()
    async with AsyncExitStack() as stack:
        flood, other = [await stack.enter_async_context(sender(args, model, number)) for number in range(2)]
        await other.send(SHORT_TOKENS, 2)
        long_s = (await flood.send(LONG_TOKENS, 2)).first_s
        end_s = time.perf_counter() + args.seconds
        longs: list[Answer] = []
        shorts: list[Answer] = []

        async def keep_sending() -> None:
            while time.perf_counter() < end_s:
                longs.append(await flood.send(LONG_TOKENS, 2))
                if longs[-1].status == 429:
                    await asyncio.sleep(float(longs[-1].retry_after or 1))

        flooding = [asyncio.create_task(keep_sending()) for _ in range(FLOOD_OUTSTANDING)]
        await asyncio.sleep(min(5.0, args.seconds / 4))
        while time.perf_counter() < end_s:
            shorts.append(await other.send(SHORT_TOKENS, 2))
            await asyncio.sleep(0.5)
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
    ahead_tokens = args.window_tokens + LONG_TOKENS + QUANTUM_TOKENS + LONG_TOKENS
    bound_s = (ahead_tokens + SHORT_TOKENS) / LONG_TOKENS * long_s + args.slack_s
    ttfts_s = [answer.first_s for answer in shorts]
    findings.rows = {
        f"TTFT of one {LONG_TOKENS}-token prompt alone, s": round(long_s, 2),
        "long prompts answered / refused": [sum(a.finished for a in longs), sum(a.status == 429 for a in longs)],
        "short prompts answered / refused": [sum(a.finished for a in shorts), sum(a.status == 429 for a in shorts)],
        **percentiles("TTFT of short prompts, s", ttfts_s),
        f"bound, s ({ahead_tokens} tokens ahead)": round(bound_s, 2),
    }
    findings.require(bool(shorts) and all(answer.finished for answer in shorts), "a short prompt was not answered")
    findings.require(max(ttfts_s, default=0.0) <= bound_s, "a short prompt waited longer than the bound")
    findings.require(any(answer.finished for answer in longs), "no long prompt was answered")
    return findings


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile; 0 without values."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def percentiles(name: str, values: Sequence[float]) -> dict[str, Any]:
    quantiles = [quantile(values, q) for q in (0.5, 0.9, 0.99, 1.0)]
    return {f"{name}: p50 / p90 / p99 / max": [round(value, 3) for value in quantiles]}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.overload", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="the server, as http://127.0.0.1:8000")
    parser.add_argument("--rate-multiple", type=float, default=3.0, help="of the rate the server holds")
    parser.add_argument("--rate", type=float, help="requests per second the server holds; measured when left out")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to send")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument(
        "--ttft-bound-s", type=float, default=40.0, help="router.max_prompt_wait_s and a prompt's own time"
    )
    parser.add_argument("--pids", help="processes whose memory is watched; found by the port when left out")
    parser.add_argument("--fairness", action="store_true", help="one client floods, another sends short prompts")
    parser.add_argument("--window-tokens", type=int, default=1024, help="the server's router.prefill_window_tokens")
    parser.add_argument("--slack-s", type=float, default=2.0, help="allowed over the bound for the machine's noise")
    parser.add_argument("--api-keys", help="A,B: keys that tell the clients apart")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the findings there")
    return parser.parse_args()


async def run(args: argparse.Namespace) -> Findings:
    headers = {"authorization": f"Bearer {args.api_keys.split(',')[0]}"} if args.api_keys else {}
    async with httpx.AsyncClient(base_url=args.url, timeout=30, headers=headers, trust_env=False) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
    return await (fairness if args.fairness else overload)(args, model)


def main() -> None:
    """Run, print, and exit with 1 on a violation."""
    args = arguments()
    findings = asyncio.run(run(args))
    table = Table("what", "value", title="fairness" if args.fairness else f"{args.rate_multiple:g} x the held rate")
    for name, value in findings.rows.items():
        table.add_row(name, json.dumps(value))
    console = Console(width=140)
    console.print(table)
    for sentence in findings.violations:
        console.print(f"VIOLATION: {sentence}")
    if args.json:
        args.json.write_text(json.dumps({"rows": findings.rows, "violations": findings.violations}, indent=2))
    sys.exit(1 if findings.violations else 0)


if __name__ == "__main__":
    main()
