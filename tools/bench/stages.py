"""The timeline of one request alone, stage by stage: its first token, its hand-off, its second token.

Every process of a deployment marks the stages that a request passes (`contracts/stages.py`). Several servers, say of
two checkouts, are asked in alternation: start each with RIDGELINE_STAGES=FILE and give it as NAME=URL,FILE. Without
`--server` one deployment is started here. All processes must be on this machine, and it must be otherwise idle.

usage: python -m tools.bench.stages [--requests 20] [--prompt-tokens 512] [--set N=V ...] [--server NAME=URL,FILE ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Final

import httpx
from rich.console import Console
from rich.table import Table

from ridgeline.contracts.stages import FILE_VARIABLE

OUTPUT_TOKENS: Final = 12
WARM_UPS: Final = 3
SETTLE_S: Final = 0.2
"""Between two requests: the source is told to release, and engines fall asleep."""
CLIENT: Final = "token at client"
TO_FIRST: Final = (
    "router has prompt",
    "prefill worker has it",
    "prefill engine has it",
    "scheduled",
    "step ended",
    "token leaves worker",
    "token at router",
    CLIENT,
)
"""From the request to its first token."""
TO_FETCH: Final = (
    "announcement at router",
    "decode worker has it",
    "decode engine has it",
    "fetch issued",
    "fetch asked",
)
"""From the prompt's first step on, beside it."""
TO_SECOND: Final = (
    "published",
    "last bytes in place",
    "fetch ended",
    "decode engine knows",
    "scheduled",
    "step ended",
    "token leaves worker",
    "token at router",
    CLIENT,
)
"""From the end of the prompt's last step to the second token."""
_seeds = count(100)

Marks = Sequence[tuple[float, str]]
"""When each stage was passed, in seconds, in order."""


@dataclass
class Seen:
    """What the requests of one server took, in milliseconds."""

    stages_ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By part of the timeline and stage: since the stage before it."""
    ttft_ms: list[float] = field(default_factory=list)
    second_ms: list[float] = field(default_factory=list)
    steps_ms: list[float] = field(default_factory=list)
    incomplete: int = 0
    """Requests some of whose stages are missing: their hand-off did not overlap their prefill."""

    @property
    def beside_a_step_ms(self) -> list[float]:
        """Return for each request how much later its second token came than a decode step takes."""
        step_ms = statistics.median(self.steps_ms)
        return [second_ms - step_ms for second_ms in self.second_ms]

    def add(self, sent_s: float, tokens_s: Sequence[float], marks: Marks) -> None:
        """Add one request, by when it was sent and its tokens came."""
        self.ttft_ms.append(1e3 * (tokens_s[0] - sent_s))
        self.second_ms.append(1e3 * (tokens_s[1] - tokens_s[0]))
        self.steps_ms += [1e3 * (later - earlier) for earlier, later in pairwise(tokens_s[1:])]
        parts = timeline(sent_s, tokens_s, marks)
        self.incomplete += not parts
        for part, stages in parts.items():
            for stage, took_s in stages.items():
                self.stages_ms[part, stage].append(1e3 * took_s)


def timeline(sent_s: float, tokens_s: Sequence[float], marks: Marks) -> dict[str, dict[str, float]]:
    """Return by part and stage the seconds since the stage before; empty if a stage is missing."""
    published_s = next((at_s for at_s, stage in marks if stage == "published" and at_s > sent_s), None)
    if published_s is None:
        return {}
    # A long prompt has several steps, of which the last one counts.
    before = [(at_s, stage) for at_s, stage in marks if sent_s <= at_s < published_s]
    last_step = max((at_s for at_s, stage in before if stage == "step ended"), default=None)
    first_step = next((at_s for at_s, stage in before if stage == "scheduled"), None)
    if last_step is None or first_step is None:
        return {}
    first = [(at_s, stage) for at_s, stage in marks if stage != "step ended" or at_s >= last_step]
    parts = {
        "first token": passed(sent_s, TO_FIRST, [*first, (tokens_s[0], CLIENT)]),
        "fetch": passed(first_step, TO_FETCH, marks),
        "second token": passed(last_step, TO_SECOND, [*marks, (tokens_s[1], CLIENT)]),
    }
    return {} if None in parts.values() else {part: stages for part, stages in parts.items() if stages is not None}


def passed(from_s: float, stages: Sequence[str], marks: Marks) -> dict[str, float] | None:
    """Return the seconds from each stage to the next one after it; None if one is missing."""
    took_s: dict[str, float] = {}
    for stage in stages:
        at_s = min((at_s for at_s, marked in marks if marked == stage and at_s > from_s), default=None)
        if at_s is None:
            return None
        took_s[stage], from_s = at_s - from_s, at_s
    return took_s


@dataclass
class Server:
    """A deployment, and the file that its processes mark stages in."""

    url: str
    file: Path
    model: str = ""
    read_bytes: int = 0

    def new_marks(self) -> Marks:
        """Return what was marked since the last call."""
        with self.file.open() as lines:
            lines.seek(self.read_bytes)
            text = lines.read()
            self.read_bytes = lines.tell()
        marks = (line.split(" ", 1) for line in text.splitlines())
        return sorted((int(at_ns) / 1e9, stage) for at_ns, stage in marks)


async def ask(http: httpx.AsyncClient, server: Server, prompt_tokens: int, seen: Seen | None) -> None:
    """Send one request with a prompt that no cache has."""
    if not server.model:
        server.model = (await http.get(f"{server.url}/v1/models")).json()["data"][0]["id"]
    seed = next(_seeds)
    body = {
        "model": server.model,
        "prompt": [100 + (seed * 7919 + position * (104729 + seed)) % 400 for position in range(prompt_tokens)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    server.new_marks()
    sent_s, tokens_s = time.monotonic(), []
    async with http.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and any(each["token_ids"] for each in json.loads(line[6:])["choices"]):
                tokens_s.append(time.monotonic())  # noqa: PERF401 - each line is timed as it comes
    await asyncio.sleep(SETTLE_S)
    if seen is not None:
        seen.add(sent_s, tokens_s, server.new_marks())


async def measure(servers: Mapping[str, Server], requests: int, prompt_tokens: int) -> dict[str, Seen]:
    """Ask the servers in turn, one request at a time."""
    found = {name: Seen() for name in servers}
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        for number in range(-WARM_UPS, requests):
            for name in list(servers)[:: -1 if number % 2 else 1]:
                await ask(http, servers[name], prompt_tokens, found[name] if number >= 0 else None)
    return found


def table(found: Mapping[str, Seen]) -> Table:
    """Lay out each stage's minimum and median, a column for each server."""
    shown = Table("part", "passes", *(f"{name}: ms after the stage before, min / median" for name in found))
    places = [(part, stage) for part, stages in PARTS.items() for stage in stages]
    for place, then in zip(places, [*places[1:], ("", "")], strict=True):
        cells = [seen.stages_ms[place] for seen in found.values()]
        shown.add_row(*place, *map(_least_and_median, cells), end_section=place[0] != then[0])
    for title, name in (("TTFT", "ttft_ms"), ("second token", "second_ms"), ("later ones", "steps_ms")):
        shown.add_row("client", title, *(_least_and_median(getattr(seen, name)) for seen in found.values()))
    shown.add_row(
        "client", "second token beside a step", *(_least_and_median(s.beside_a_step_ms) for s in found.values())
    )
    return shown


PARTS: Final = {"first token": TO_FIRST, "fetch": TO_FETCH, "second token": TO_SECOND}


def _least_and_median(values_ms: Sequence[float]) -> str:
    return f"{min(values_ms):.2f} / {statistics.median(values_ms):.2f}" if values_ms else ""


@asynccontextmanager
async def own_deployment(settings: Mapping[str, str], console: Console) -> AsyncIterator[dict[str, Server]]:
    """Start one deployment that marks stages."""
    from ridgeline.cluster.commands.serve import started
    from ridgeline.cluster.config.loader import load_config
    from ridgeline.cluster.runtime.ray_start import ray_runtime

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "stages"
        file.touch()
        os.environ[FILE_VARIABLE] = str(file)
        config = load_config("deploy/local.yaml", {"server.port": "0", "name": "stages", **settings}).config
        async with ray_runtime(config), started(config, console) as one:
            yield {"here": Server(one.url, file)}


@asynccontextmanager
async def others(given: Sequence[str]) -> AsyncIterator[dict[str, Server]]:
    """Use servers that run already."""
    servers = {}
    for each in given:
        name, where = each.split("=", 1)
        url, file = where.split(",", 1)
        servers[name] = Server(url, Path(file))
    yield servers


async def run(given: argparse.Namespace, console: Console) -> None:
    """Measure and print the table."""
    settings = dict(each.split("=", 1) for each in given.set)
    async with others(given.server) if given.server else own_deployment(settings, console) as servers:
        found = await measure(servers, given.requests, given.prompt_tokens)
    console.print(table(found))
    for name, seen in found.items():
        if seen.incomplete:
            console.print(
                f"{name}: {seen.incomplete} of {len(seen.ttft_ms)} requests did not overlap, and are not in its stages"
            )


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], help="a setting of the deployment, as name=value")
    parser.add_argument("--server", action="append", default=[], help="NAME=URL,FILE of one that runs already")
    asyncio.run(run(parser.parse_args(), Console(width=200)))


if __name__ == "__main__":
    main()
