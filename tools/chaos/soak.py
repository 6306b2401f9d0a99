"""Does memory grow with requests? Sends 2,000 small mixed ones after a warm-up, a tenth of whose clients leave.

usage: python -m tools.chaos.soak --requests 2000 --out runs/soak

There are one prefill and one decode worker. USS and RSS of driver, router, actors and engines are read every 50
requests. Memory counts as flat if the mean of the last quarter of samples is at most 2 % above that of the first
quarter. Prints a table; exits with 1 if a part has grown.

The warm-up must use the whole KV cache once, since pages become resident when first written; so the cache is small
here. It must also cover as many step lengths as vLLM keeps kernels for, 32 a layer: 40 MB in the first few hundred
prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from tools.chaos import verify
from tools.chaos.drive import Load
from tools.chaos.memory import Footprint, footprint, parts
from tools.chaos.running import Running, pool_settings, running, stop
from tools.chaos.wishes import SMALL, Mix

MIB: Final = 2**20
GROWTH_LIMIT: Final = 0.02
SEED: Final = 2000


class Samples:
    """Footprints of all parts, in the order they were taken."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.taken: dict[str, list[Footprint]] = {name: [] for name in processes}

    def take(self) -> None:
        """Take a sample. Raises psutil.NoSuchProcess when a part has ended."""
        for name, process in self._processes.items():
            self.taken[name].append(footprint(process))


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Return the means of the first and of the last quarter."""
    size = max(1, len(values) // 4)
    return statistics.fmean(values[:size]), statistics.fmean(values[-size:])


def growth(values: Sequence[float]) -> float:
    """Return the growth from the first quarter to the last; 0.02 is 2 %."""
    first, last = quarters(values)
    return last / first - 1.0


async def soak(setup: Running, options: argparse.Namespace, console: Console) -> tuple[Samples, list[str]]:
    """Warm up, then load and sample; return the samples and the violations."""
    mix = Mix(SEED, SMALL, setup.model, setup.text_tokens, setup.tokenizer)
    load = Load(setup.http, mix, SEED)
    samples = Samples(await parts(setup.deployment))
    total = options.warm_up + options.requests
    began_s = time.monotonic()

    async def after_each(done: int) -> None:
        if done >= options.warm_up and (done - options.warm_up) % options.every == 0:
            samples.take()
        if done % 200 == 0:
            router = footprint(psutil.Process(setup.deployment.router().pid))
            console.print(
                f"{time.monotonic() - began_s:6.0f} s  {done} of {total} done, router {router.uss_bytes / MIB:.1f} MiB"
            )

    await load.exactly(total, options.concurrency, after_each)
    found = [
        f"request {record.wish.number}: {sentence}"
        for record in load.records
        for sentence in verify.violations(record, setup.decode)
    ]
    ends = verify.endings(load.records)
    console.print(f"ended: {dict(ends)}; errors: {dict(verify.errors_by_reason(load.records))}")
    if ends["error"] or ends["refused"]:
        found.append(f"{ends['error']} errors and {ends['refused']} refusals in a run without any fault")
    async with setup.deployment.past_the_router(setup.model, setup.model_path, setup.tokenizer) as pairs:
        (pair,) = pairs
        if left := await pair.becomes_idle():
            found.append(f"still held: {left}")
    return samples, found


def tell(samples: Samples, console: Console) -> list[str]:
    """Print a table and return a sentence for each part that has grown."""
    table = Table("process", "USS, first quarter", "last quarter", "growth", "RSS, first quarter", "last", "growth")
    grown = []
    for name, taken in samples.taken.items():
        cells = [name]
        for kind, values in (("USS", [f.uss_bytes for f in taken]), ("RSS", [f.rss_bytes for f in taken])):
            first, last = quarters(values)
            cells += [f"{first / MIB:.1f} MiB", f"{last / MIB:.1f} MiB", f"{100 * growth(values):+.2f} %"]
            if growth(values) > GROWTH_LIMIT:
                grown.append(f"{kind} of {name} has grown by {100 * growth(values):.1f} %")
        table.add_row(*cells)
    console.print(table)
    return grown


async def run(options: argparse.Namespace, console: Console) -> list[str]:
    """Run everything and return the violations."""
    settings = [*pool_settings(1, 1, 2, options.kv_cache, 512), *options.set]
    async with running(settings) as setup:
        samples, found = await soak(setup, options, console)
        if wrong := await stop(setup):
            found.append(wrong)
    found += tell(samples, console)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {name: [[f.rss_bytes, f.uss_bytes] for f in taken] for name, taken in samples.taken.items()}
    (options.out / "memory.json").write_text(json.dumps({"rss_and_uss_bytes": rows, "violations": found}) + "\n")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run; exit with 1 on a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=800)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--every", type=int, default=50, help="requests between samples")
    parser.add_argument("--kv-cache", default="256 MiB")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings for ridgeline serve")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    console = Console(width=140)
    found = asyncio.run(run(parser.parse_args(arguments), console))
    for sentence in found[:40]:
        console.print(f"VIOLATION {sentence}", markup=False, highlight=False)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
