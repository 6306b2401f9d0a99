"""Measures TPOT with and without speculation, the acceptance, and the intensity of decode steps beside its formula.

Servers with and without n-gram drafts start in turn, on one core each, so that a drift of the machine meets both. Each
answers batches of streams whose prompts repeat a phrase, and batches of prose. Run it where nothing else runs:

    python -m tools.bench.speculation --rounds 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median

import httpx
from rich.console import Console

from ridgeline.roofline.cost import StepCostModel
from ridgeline.roofline.model_shape import load_model_shape
from tests.engines.harness import Increase, Metrics
from tests.engines.served import deployed_by_serve

BATCHES = (1, 4, 16)
NUM_TOKENS = 64
PROMPT_TOKENS = 96
DRAFTED_TOKENS = 3
BUSY_LOAD = 1.0
TEXT = Path(__file__).parents[2] / "loadtest" / "data" / "opticks.txt"
TEXTS = ("repeats", "prose")
HEADINGS = (
    *("prompts", "batch", "TPOT without, ms", "with", "acceptance", "tokens a step"),
    *("FLOP/B without", "formula", "with", "formula"),
)
OUT = Console(soft_wrap=True, highlight=False)
SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTED_TOKENS,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
SETTINGS = {
    "model.dtype": "float32",
    "model.max_model_len": "1024",
    "pools.colocated.workers": "1",
    "pools.colocated.kv_cache_memory_bytes": "512 MiB",
    "pools.colocated.max_num_seqs": "32",  # a client alone gets seven eighths of them
    "pools.colocated.max_num_batched_tokens": "512",
    "router.prefix_routing": "false",
}


@dataclass(frozen=True)
class Point:
    """What one batch of streams took."""

    tpot_s: float
    acceptance: float
    tokens_per_step: float
    intensity: float


def prompts(text: str, batch: int, seed: int) -> list[str]:
    """Return so many prompts of about `PROMPT_TOKENS` words, no two of which begin alike."""
    words = TEXT.read_text(encoding="utf-8").split()
    step = 1000
    found = []
    for number in range(batch):
        start = (seed * 7919 + number * step) % (len(words) - PROMPT_TOKENS)
        cut = words[start : start + PROMPT_TOKENS]
        found.append(" ".join(cut if text == "prose" else (cut[:12] * 20)[:PROMPT_TOKENS]))
    return found


async def stream(http: httpx.AsyncClient, prompt: str) -> float:
    """Return the TPOT of one answer."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    clock = asyncio.get_running_loop().time
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        times_s = [clock() async for line in response.aiter_lines() if line.startswith("data: {")]
    return (times_s[-1] - times_s[0]) / (NUM_TOKENS - 1)


async def measure(url: str, text: str, batch: int, seed: int) -> Point:
    """Answer one batch."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:

        async def counted() -> Metrics:
            await asyncio.sleep(1.0)  # for the workers' last status, and a page that is rendered anew
            return Metrics((await http.get("/metrics")).text)

        before = await counted()
        tpots_s = await asyncio.gather(*(stream(http, prompt) for prompt in prompts(text, batch, seed)))
        grown = Increase(before, await counted())
    drafted, accepted, steps = (
        grown.sum(f"ridgeline_{name}_total") for name in ("drafted_tokens", "accepted_tokens", "sequence_steps")
    )
    moved = grown.sum("ridgeline_bytes_total", step="decode")
    return Point(
        mean(tpots_s),
        accepted / drafted if drafted else 0.0,
        1.0 + (accepted / steps if steps else 0.0),
        grown.sum("ridgeline_flops_total", step="decode") / moved if moved else 0.0,
    )


Points = dict[tuple[str, int, bool], list[Point]]


def measured(rounds: int) -> Points:
    """Run servers in turn; of each batch there is one point a round."""
    points: Points = defaultdict(list)
    for number in range(rounds):
        for speculates in (False, True) if number % 2 == 0 else (True, False):
            own = {"engine_args.speculative_config": json.dumps(SPECULATION)} if speculates else {}
            with deployed_by_serve("--mode", "colocated", settings={**SETTINGS, **own}) as server:
                asyncio.run(measure(server.url, "prose", 4, 1000))  # compiles n-gram lookup, and warms up
                for text in TEXTS:
                    for batch in BATCHES:
                        point = asyncio.run(measure(server.url, text, batch, seed=100 * number + batch))
                        points[text, batch, speculates].append(point)
                        OUT.print(f"round {number}, {text}, batch {batch}, speculates: {speculates}: {point}")
    return points


def table(points: Points) -> Iterator[str]:
    """Yield a table in Markdown: medians over rounds, and the formula's intensity with all drafts verified."""
    model = StepCostModel(load_model_shape("smollm2-135m", weight_bytes_per_param=4, kv_bytes_per_element=4))
    context = PROMPT_TOKENS + NUM_TOKENS // 2
    yield f"| {' | '.join(HEADINGS)} |"
    yield "|---" * len(HEADINGS) + "|"
    for text in TEXTS:
        for batch in BATCHES:
            plain, drafts = (points[text, batch, speculates] for speculates in (False, True))
            figures = [
                f"{1e3 * median(one.tpot_s for one in plain):.1f}",
                f"{1e3 * median(one.tpot_s for one in drafts):.1f}",
                f"{median(one.acceptance for one in drafts):.2f}",
                f"{median(one.tokens_per_step for one in drafts):.2f}",
            ]
            for some, drafted in ((plain, 0), (drafts, DRAFTED_TOKENS)):
                figures.append(f"{median(one.intensity for one in some):.2f}")
                figures.append(f"{model.decode(batch, context, drafted).arithmetic_intensity:.2f}")
            yield f"| {text} | {batch} | " + " | ".join(figures) + " |"


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=next(islice(str(__doc__).splitlines(), 1)))
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    if (load := os.getloadavg()[0]) > BUSY_LOAD:
        OUT.print(f"something else runs here (load {load:.1f}): these times will not be those of a quiet machine")
    for line in table(measured(rounds)):
        OUT.print(line)


if __name__ == "__main__":
    main()
