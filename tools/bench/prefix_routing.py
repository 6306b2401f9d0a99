"""What it brings that mode adaptive knows who has the beginning of a prompt, on conversations with one system prompt.

Two deployments in mode adaptive are up at once, one with `router.prefix_routing` and one without; the idle one's
engines sleep. In a round, every conversation sends its turns one after the other, each with all that was said before,
and all conversations run at the same time. Both deployments get the same rounds in alternation, and every round begins
with empty prefix caches and texts of its own.

usage: python -m tools.bench.prefix_routing [--conversations 10] [--turns 4] [--system 1000] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import httpx
from rich.console import Console
from rich.table import Table

from cluster.commands.serve import started
from cluster.config.loader import load_config
from cluster.runtime.ray_start import ray_runtime
from loadtest.run.server_metrics import difference, parse_metrics

SAID_TOKENS = 60
ANSWER_TOKENS = 32
THINK_S = 0.5
WAYS = {"blind": "false", "aware": "true"}
"""The value of `router.prefix_routing`."""


@dataclass
class Seen:
    """What rounds of one way came to."""

    first_ttft_s: list[float] = field(default_factory=list)
    later_ttft_s: list[float] = field(default_factory=list)
    computed_tokens: float = 0.0
    moved_bytes: float = 0.0
    took_s: float = 0.0

    def row(self) -> list[str]:
        """Return the cells of a table: medians and 90th percentiles, and sums over all rounds."""
        return [
            _percentiles(self.first_ttft_s),
            _percentiles(self.later_ttft_s),
            f"{self.computed_tokens:.0f}",
            f"{self.moved_bytes / 1e6:.0f}",
            f"{self.took_s:.0f}",
        ]


def _percentiles(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} / {statistics.quantiles(seconds, n=10, method='inclusive')[-1]:.2f}"


async def turn(http: httpx.AsyncClient, url: str, prompt: list[int]) -> tuple[float, list[int]]:
    """Send one turn; return its TTFT in seconds, and the tokens of the answer."""
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    began_s, ttft_s, answer = time.perf_counter(), 0.0, list[int]()
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    ttft_s = ttft_s or time.perf_counter() - began_s
                    answer += choice["token_ids"]
    return ttft_s, answer


async def converse(http: httpx.AsyncClient, url: str, system: list[int], turns: int, seed: int, seen: Seen) -> None:
    """Hold one conversation."""
    draw, said = random.Random(seed), [*system]
    await asyncio.sleep(draw.uniform(0.0, THINK_S))
    for number in range(turns):
        said += _text(draw, SAID_TOKENS)
        ttft_s, answer = await turn(http, url, said)
        (seen.later_ttft_s if number else seen.first_ttft_s).append(ttft_s)
        said += answer
        await asyncio.sleep(draw.expovariate(1 / THINK_S))


def _text(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(1_000, 40_000) for _ in range(tokens)]


async def one_round(http: httpx.AsyncClient, url: str, given: argparse.Namespace, number: int, seen: Seen) -> None:
    """Hold all conversations of a round at the same time."""
    (await http.post(f"{url}/ridgeline/forget_prefixes")).raise_for_status()
    system = _text(random.Random(number), given.system)
    before, began_s = parse_metrics((await http.get(f"{url}/metrics")).text), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for conversation in range(given.conversations):
            group.create_task(converse(http, url, system, given.turns, 1000 * number + conversation, seen))
    seen.took_s += time.perf_counter() - began_s
    told = difference(before, parse_metrics((await http.get(f"{url}/metrics")).text), wall_s=1.0)
    seen.computed_tokens += told.total("ridgeline_tokens_total", phase="prefill")
    seen.moved_bytes += told.total("ridgeline_kv_transfer_bytes_total", direction="received")


async def measure(given: argparse.Namespace, console: Console) -> Mapping[str, Seen]:
    """Start both deployments and alternate between them."""
    configs = {
        way: load_config(
            "deploy/local.yaml",
            {"mode": "adaptive", "server.port": "0", "ray.share_cores": "true", "name": way}
            | {"router.prefix_routing": value},
        ).config
        for way, value in WAYS.items()
    }
    seen = {way: Seen() for way in WAYS}
    async with (
        ray_runtime(configs["blind"]),
        httpx.AsyncClient(timeout=300, trust_env=False) as http,
        started(configs["blind"], console) as blind,
        started(configs["aware"], console) as aware,
    ):
        urls = {"blind": blind.url, "aware": aware.url}
        for way, url in urls.items():
            console.print(f"{way}: warming up")
            warm = argparse.Namespace(conversations=4, turns=6, system=100)
            await one_round(http, url, warm, 99, Seen())
        for number in range(given.rounds):
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                here = Seen()
                await one_round(http, urls[way], given, number, here)
                console.print(f"round {number + 1}, {way}: {' | '.join(here.row())}")
                for one in fields(Seen):
                    setattr(seen[way], one.name, getattr(seen[way], one.name) + getattr(here, one.name))
    return seen


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation")
    parser.add_argument("--system", type=int, default=1000, help="tokens of the system prompt that all share")
    parser.add_argument("--rounds", type=int, default=2, help="alternations of both deployments")
    given = parser.parse_args()
    console = Console(width=160)
    seen = asyncio.run(measure(given, console))
    table = Table(
        "prefix routing",
        "TTFT of first turns p50 / p90 s",
        "of later turns p50 / p90 s",
        "prompt tokens computed",
        "KV MB moved",
        "s",
    )
    for way, each in seen.items():
        table.add_row(WAYS[way], *each.row())
    console.print(table)


if __name__ == "__main__":
    main()
