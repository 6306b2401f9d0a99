"""Runs real engines under a mixed load while workers are killed, stopped and cut off: is anything lost?

usage: python -m tools.chaos.chaos --seconds 1800 --seed 1 --out runs/chaos

It runs `ridgeline serve` with two prefill and two decode workers, a lossy KV link, and clients that think, arrive at
random and sometimes leave; every few seconds it injects a fault. The router is never touched. Afterwards every answer
is checked (`verify`), greedy ones are scored by a single engine (`score`), and nothing may be left over, or replaced
without a fault. Prints a line every 10 s and a table at the end, writes report.json, and exits with 1 on a violation.

The same seed sends the same requests and the same order of faults in each pool; how they coincide depends on timing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from ridgeline.router.observe.loop_lag import LoopLag
from tests.engines.harness import Engines
from tools.chaos import verify
from tools.chaos.deployment import can_cut_connections
from tools.chaos.drive import Load
from tools.chaos.faults import WEIGHTS, Fault, Injector
from tools.chaos.operations import ModeChanges, Operations
from tools.chaos.records import Record
from tools.chaos.running import LOCAL, Running, pool_settings, running, stop
from tools.chaos.wishes import Mix

PROGRESS_EVERY_S: Final = 10.0
LEASE_S: Final = 10.0
IDLE_WITHIN_S: Final = LEASE_S + 10.0
"""Time to become idle: a hand-off that a dead decode worker had not fetched is held until its lease ends."""
ENDS_WITHIN_S: Final = 240.0
"""Time for all requests to end after the last one was sent."""
STALL_TIMEOUT_S: Final = 6.0
MAX_RESTARTS: Final = 1000
"""Enough for our kills."""
SHARED_MEMORY: Final = Path("/dev/shm")
MIB: Final = 2**20


@dataclass(frozen=True)
class Scores:
    """The scores of all greedy answers."""

    answers: int
    tokens: int
    worst_nat: float
    wrong: list[str]
    """A sentence for each answer with a token that is farther from the best one than a tie."""


@dataclass
class Outcome:
    """The findings of a run."""

    violations: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    scores: Scores | None = None
    idle_after_s: float | None = None
    router_rss_mib: tuple[float, float] = (0.0, 0.0)
    refused_before_work: float = 0.0
    modes: ModeChanges = field(default_factory=ModeChanges)
    operations: Operations = field(default_factory=Operations)
    wall_s: float = 0.0

    def kills_s(self) -> list[float]:
        """Return when a worker was taken away from its requests."""
        return [fault.at_s for fault in self.faults if fault.kills]

    def failed_before_an_answer(self) -> int:
        """Count 429 and 503 that the router did not count as refusals: accepted, then failed before the first event."""
        return max(0, sum(record.refused for record in self.records) - round(self.refused_before_work))


def settings(options: argparse.Namespace) -> list[str]:
    """Return the settings for `ridgeline serve` in addition to the configuration."""
    found = pool_settings(options.prefill, options.decode, options.kv_cache, options.step_tokens)
    found.append(f"transfer.lease_s={LEASE_S:g}")
    if options.kv_faults != "none":
        found.append(f"transfer.faults={options.kv_faults.format(seed=options.seed)}")
    faults = [f"supervision.stall_timeout_s={STALL_TIMEOUT_S:g}", f"supervision.max_restarts={MAX_RESTARTS}"]
    return [*found, *(faults if options.kinds else ()), *options.set]


async def run(options: argparse.Namespace, console: Console) -> Outcome:
    """Start a deployment, load it, inject faults, stop it and check."""
    outcome = Outcome()
    shared_before = set(os.listdir(SHARED_MEMORY))
    began_s = time.monotonic()
    async with running(settings(options), options.config) as setup:
        console.print(f"ready after {time.monotonic() - began_s:.0f} s: {setup.deployment.url}")
        await _run(setup, options, outcome, console)
        if wrong := await stop(setup):
            outcome.violations.append(wrong)
    outcome.wall_s = time.monotonic() - began_s
    if left := sorted(set(os.listdir(SHARED_MEMORY)) - shared_before):
        outcome.violations.append(f"left in {SHARED_MEMORY}: {left[:5]}{' and more' if left[5:] else ''}")
    return outcome


async def _run(setup: Running, options: argparse.Namespace, outcome: Outcome, console: Console) -> None:
    router = setup.deployment.router()
    before = await setup.deployment.metrics()
    rss_before = router.memory_info().rss / MIB
    load = Load(setup.http, Mix(options.seed, setup.model, setup.text_tokens, setup.tokenizer), options.seed)
    sizes = {"prefill": options.prefill, "decode": options.decode}
    injector = Injector(setup.deployment, sizes, options.kinds, options.seed, options.mean_gap_s)
    outcome.records, outcome.faults = load.records, injector.faults
    began_s = time.monotonic()

    def say(sentence: str) -> None:
        console.print(f"{time.monotonic() - began_s:6.0f} s  {sentence}", highlight=False)

    lag = LoopLag()
    watching = asyncio.create_task(lag.watch())
    signs = asyncio.create_task(_progress(setup, load, injector, lag, say))
    hurting = asyncio.create_task(injector.run(say))
    loading = asyncio.create_task(load.run())
    changing = asyncio.create_task(outcome.modes.run(setup.http, options.mode_every_s, say))
    ordering = asyncio.create_task(outcome.operations.run(setup.http, options.decode, options.scale_times, say))
    try:
        await _until_over(setup, began_s + options.seconds, ordering)
        injector.stop()
        changing.cancel()
        await hurting
        load.stop()
        async with asyncio.timeout(ENDS_WITHIN_S):
            await loading
    except TimeoutError:
        outcome.violations.append(f"{load.running} requests had not ended {ENDS_WITHIN_S:.0f} s after the last one")
    finally:
        helpers = (watching, signs, hurting, loading, changing, ordering)
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
    outcome.violations += [*injector.violations, *outcome.modes.violations, *outcome.operations.violations]
    if setup.deployment.serve.process.poll() is not None:
        return  # `stop` reports it
    await _check_afterwards(setup, outcome, say)
    after = await setup.deployment.metrics()
    outcome.refused_before_work = after.sum("ridgeline_rejected_total") - before.sum("ridgeline_rejected_total")
    outcome.router_rss_mib = (rss_before, router.memory_info().rss / MIB)
    if setup.deployment.router().pid != router.pid:
        outcome.violations.append("the router was replaced")


async def _until_over(setup: Running, end_s: float, ordering: asyncio.Task[None]) -> None:
    """Wait for the end, and for the operations if they take longer; raises what went wrong with giving them."""
    process = setup.deployment.serve.process
    while (time.monotonic() < end_s or not ordering.done()) and process.poll() is None:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    if ordering.done():
        ordering.result()


async def _check_afterwards(setup: Running, outcome: Outcome, say: Any) -> None:
    """Check that nothing is held and every answer is right."""
    for record in outcome.records:
        found = verify.violations(record, setup.decode)
        outcome.violations += [f"request {record.wish.number} ({record.wish.kind}): {each}" for each in found]
    deployment = setup.deployment
    async with deployment.past_the_router(setup.model, setup.model_path, setup.tokenizer) as pairs:
        began_s = time.monotonic()
        left: dict[str, float] = {}
        for pair in pairs:
            left |= await pair.becomes_idle(max(0.0, began_s + IDLE_WITHIN_S - time.monotonic()))
        outcome.idle_after_s = time.monotonic() - began_s
        if left:
            outcome.violations.append(f"still held {IDLE_WITHIN_S:.0f} s after the end: {left}")
        say(f"idle after {outcome.idle_after_s:.1f} s; scoring the greedy answers")
        outcome.scores = await score(pairs, outcome.records)
    outcome.violations += outcome.scores.wrong


async def _router_lag_s(setup: Running) -> float:
    try:
        return (await setup.deployment.metrics()).sum("ridgeline_loop_lag_seconds")
    except httpx.TransportError:
        return -1.0


async def _progress(setup: Running, load: Load, injector: Injector, lag: LoopLag, say: Any) -> None:
    """Print progress, and the last minute's delays of the router's event loop and of our own."""
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        ends = verify.endings(load.records)
        rss_mib = (await asyncio.to_thread(lambda: setup.deployment.router().memory_info().rss)) / MIB
        say(
            f"{len(load.records)} done ({', '.join(f'{count} {end}' for end, count in ends.most_common())}), "
            f"{load.running} running, {len(injector.faults)} faults, router {rss_mib:.0f} MiB, "
            f"late at most {await _router_lag_s(setup):.2f} s; we {lag.worst_s:.2f} s"
        )


def scorable(record: Record) -> bool:
    """Return whether the answer is greedy, has begun and its prompt is known, even if it was cut short."""
    return record.wish.greedy and record.num_tokens > 0 and bool(record.prompt_token_ids)


async def score(engines: Sequence[Engines], records: Sequence[Record]) -> Scores:
    """Score each answer with one prefill; each decode worker takes one at a time."""
    waiting = iter([record for record in records if scorable(record)])
    answers, tokens, worst_nat = 0, 0, 0.0
    wrong: list[str] = []

    async def one_after_the_other(engine: Engines) -> None:
        nonlocal answers, tokens, worst_nat
        for record in waiting:
            token_ids = record.choices[0].token_ids
            nats = await engine.behind_best_nats(record.prompt_token_ids, token_ids)
            answers, tokens, worst_nat = answers + 1, tokens + len(nats), max(worst_nat, *nats)
            position = next((position for position, nat in enumerate(nats) if not engine.is_tie(nat)), None)
            if position is not None:
                wrong.append(
                    f"request {record.wish.number}: token {position} of {len(nats)} is {nats[position]:.3f} nat from "
                    f"the best ({sum(not engine.is_tie(nat) for nat in nats)} such tokens)"
                )

    await asyncio.gather(*(one_after_the_other(engine) for engine in engines))
    return Scores(answers, tokens, worst_nat, wrong)


# --- the report


def summary(outcome: Outcome) -> dict[str, Any]:
    """Return the content of report.json and of the table."""
    pauses_s = verify.pauses_s(outcome.records, outcome.kills_s())
    whole_s = sorted(fault.whole_after_s for fault in outcome.faults if fault.whole_after_s is not None and fault.kills)
    ends = verify.endings(outcome.records)
    accepted = [record for record in outcome.records if not record.refused]
    one_ending = sum(not record.broken for record in accepted)
    return {
        "requests": len(outcome.records),
        "accepted": len(accepted),
        "accepted_with_an_ending": one_ending,
        "endings": dict(ends),
        "errors_by_reason": dict(verify.errors_by_reason(outcome.records)),
        "refusals_by_reason": dict(verify.refusals_by_reason(outcome.records)),
        "refused_before_work": outcome.refused_before_work,
        "failed_before_an_answer": outcome.failed_before_an_answer(),
        "tokens": sum(record.num_tokens for record in outcome.records),
        "faults": dict(Counter(fault.kind for fault in outcome.faults)),
        "mode_change_s": _spread(outcome.modes.took_s),
        "rerouted_prompts": outcome.modes.rerouted_prompts,
        "grown_s": _spread(outcome.operations.grew_s),
        "first_token_of_a_new_worker_s": _spread(outcome.operations.served_s),
        "shrunk_s": _spread(outcome.operations.shrank_s),
        "all_restarted_s": _spread(outcome.operations.restarted_s),
        "workers_replaced": sum(fault.replaced for fault in outcome.faults),
        "whole_again_s": _spread(whole_s),
        "pause_of_streams_alive_at_a_kill_s": _spread(pauses_s),
        "scores": asdict(outcome.scores) if outcome.scores else None,
        "idle_after_s": outcome.idle_after_s,
        "router_rss_mib": outcome.router_rss_mib,
        "wall_s": outcome.wall_s,
        "violations": outcome.violations,
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"count": len(values), "p50": statistics.median(values), "max": max(values)}


def print_summary(found: dict[str, Any], console: Console) -> None:
    """Print what is not empty as a table, with the violations below."""
    table = Table("what", f"in {found['wall_s']:.0f} s")
    for name, value in found.items():
        if value not in (None, {}) and name != "violations":
            table.add_row(name.replace("_", " "), _shown(value))
    table.add_row("violations", str(len(found["violations"])))
    console.print(table)
    for sentence in found["violations"][:40]:
        console.print(f"VIOLATION {sentence}", markup=False, highlight=False)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one)}" for name, one in value.items() if one != [])
    if isinstance(value, tuple):
        return " to ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(outcome: Outcome, found: dict[str, Any], folder: Path) -> None:
    """Write report.json, faults.json, and records.jsonl with one line per request."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in outcome.faults], indent=1) + "\n")
    with (folder / "records.jsonl").open("w") as lines:
        for record in outcome.records:
            lines.write(json.dumps(asdict(record)) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--config", type=Path, default=LOCAL, help="of the deployment (default: deploy/local.yaml)")
    parser.add_argument("--prefill", type=int, default=2, help="workers")
    parser.add_argument("--decode", type=int, default=2, help="workers")
    parser.add_argument("--kv-cache", default="512 MiB")
    parser.add_argument("--step-tokens", type=int, default=128, help="small, so that a stall stands out")
    parser.add_argument("--mean-gap-s", type=float, default=6.0, help="between faults in a pool, once it is whole")
    parser.add_argument(
        "--kv-faults",
        default="seed={seed},drop=0.02,cut=0.02,corrupt=0.01,delay=0.15,longest_delay_s=0.3,longest_drop_s=1",
        help="transfer.faults, or none",
    )
    parser.add_argument("--faults", default=",".join(WEIGHTS), help="kinds separated by commas, or none")
    parser.add_argument("--mode-every-s", type=float, default=0.0, help="change the mode so often; 0: never")
    parser.add_argument(
        "--scale-times", type=int, default=0, help="a decode worker more and fewer, then a restart of all"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings for ridgeline serve")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    options = parser.parse_args(arguments)
    options.kinds = _kinds(parser, options.faults)
    return options


def _kinds(parser: argparse.ArgumentParser, text: str) -> list[str]:
    if text == "none":
        return []
    named = [word.strip() for word in text.split(",")]
    if unknown := [word for word in named if word not in WEIGHTS]:
        parser.error(f"there is no fault {unknown[0]!r}: use some of {', '.join(WEIGHTS)}")
    return [kind for kind in WEIGHTS if kind in named]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, write; exit with 1 on a violation."""
    options = parse(arguments)
    console = Console(width=160)
    if any(kind.startswith("cut") for kind in options.kinds) and not can_cut_connections():
        options.kinds = [kind for kind in options.kinds if not kind.startswith("cut")]
        console.print("TCP connections are not cut: `ss -K` is missing or not permitted")
    if not options.kinds:
        console.print("no faults are injected into processes")
    outcome = asyncio.run(run(options, console))
    found = summary(outcome)
    print_summary(found, console)
    write(outcome, found, options.out)
    console.print(f"written: {options.out}/report.json, faults.json, records.jsonl")
    sys.exit(1 if outcome.violations else 0)


if __name__ == "__main__":
    main()
