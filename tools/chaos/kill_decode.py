"""Kills a decode worker in the middle of its streams, twenty times: the other worker must complete all of them.

usage: python -m tools.chaos.kill_decode --rounds 20 --seed 1 --out runs/kill-decode

There are one prefill and two decode workers. Each round sends four greedy streams of 60 tokens. When the last of them
has reached a random token, the actor or the engine process of one decode worker gets SIGKILL. A round in which that
worker had no stream does not count and is repeated. All four streams must end with every token, in order, each the
model's best one, and both decode workers must be back before the next round. Prints a line for each round and the
pauses; exits with 1 unless all rounds were complete.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from loadtest.trace.prompts import TextWindows
from tools.chaos import verify
from tools.chaos.records import Record, ask
from tools.chaos.running import Running, pool_settings, running, stop
from tools.chaos.scoring import score
from tools.chaos.wishes import COMPLETIONS, Wish

OUTPUT_TOKENS: Final = 60
LAST_KILL_TOKEN: Final = 55
STREAMS: Final = 4
BACK_WITHIN_S: Final = 180.0
LOOK_S: Final = 0.005
Part = Literal["actor", "engine"]


@dataclass(frozen=True)
class Round:
    """The result of one kill."""

    number: int
    part: Part
    at_token: int
    """Tokens of the shortest stream at the time of the kill."""
    worker_id: str
    continued: int
    """Streams that lost their worker and continued on the other one, as the router counts them."""
    pause_s: float
    """The largest gap between tokens of any stream after the kill, in seconds."""
    back_after_s: float | None
    wrong: list[str]


class Rounds:
    """Rounds, one after the other, on a running deployment."""

    def __init__(self, setup: Running, seed: int) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._windows = TextWindows(setup.text_tokens, seed)
        self._asked = 0

    async def one(self, number: int) -> Round:
        """Run one round: start streams, wait for the token, kill, wait for the end, check."""
        part: Part = self._rng.choice(("actor", "engine"))
        at_token = self._rng.randint(1, LAST_KILL_TOKEN)
        # Look it up now: once the streams run, that would take longer than they do.
        victim = self._rng.choice([one for one in await self._setup.deployment.members("decode") if one.whole])
        process = victim.actor if part == "actor" else victim.engine()
        assert process is not None, f"{victim.worker_id} has lost its engine before the kill"
        before = await self._continued()
        streams = [self._start(OUTPUT_TOKENS) for _ in range(STREAMS)]
        records = [record for record, _ in streams]
        await _until(lambda: all(record.num_tokens >= at_token or ending.done() for record, ending in streams))
        process.kill()
        had, killed_s = min(record.num_tokens for record in records), time.monotonic()
        await asyncio.gather(*(ending for _, ending in streams))
        continued = await self._continued() - before
        wrong = [sentence for one in records for sentence in verify.violations(one, self._setup.decode)]
        wrong += [f"{one.status}: {error}" for one in records for error in one.errors]
        gaps_s = [gap_s for one in records if (gap_s := one.gap_after_s(killed_s)) is not None]
        back = await self._setup.deployment.wait_full("decode", 2, BACK_WITHIN_S, without=frozenset({process.pid}))
        back_after_s = time.monotonic() - killed_s if back else None
        if not back:
            wrong.append(f"two decode workers were not back within {BACK_WITHIN_S:.0f} s")
        else:
            wrong += await self.score(records)  # it uses both workers, so the killed one must be back
        return Round(number, part, had, victim.worker_id, continued, max(gaps_s, default=0.0), back_after_s, wrong)

    async def score(self, records: Sequence[Record]) -> list[str]:
        """Return sentences about tokens that are not the model's best."""
        setup = self._setup
        async with setup.deployment.past_the_router(setup.model, setup.model_path, setup.tokenizer) as pairs:
            return (await score(pairs, records)).wrong

    def _start(self, num_tokens: int) -> tuple[Record, asyncio.Task[Record]]:
        """Start a greedy stream; its record is filled while it runs."""
        body: dict[str, Any] = {
            "model": self._setup.model,
            "prompt": self._windows.window(self._asked, 40),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        wish = Wish(self._asked, "plain", COMPLETIONS, body, num_tokens)
        self._asked += 1
        record = Record(wish, time.monotonic())
        return record, asyncio.create_task(ask(self._setup.http, wish, record))

    async def _continued(self) -> int:
        """Return how many streams have been continued since the router's start."""
        return int((await self._setup.deployment.metrics()).sum("ridgeline_continuation_pause_seconds_count"))


async def _until(condition: Any) -> None:
    async with asyncio.timeout(BACK_WITHIN_S):
        while not condition():  # noqa: ASYNC110 - a record is a plain object
            await asyncio.sleep(LOOK_S)


async def run(options: argparse.Namespace, console: Console) -> tuple[list[Round], list[str]]:
    """Run all rounds; return them, and what else was wrong."""
    settings = pool_settings(1, 2, options.cores, options.kv_cache, options.step_tokens)
    settings.append(f"supervision.max_restarts={4 * options.rounds}")
    rounds: list[Round] = []
    async with running([*settings, *options.set]) as setup:
        series = Rounds(setup, options.seed)
        for number in range(1, 2 * options.rounds + 1):
            rounds.append(await series.one(number))
            console.print(_line(rounds[-1]), markup=False, highlight=False)
            if setup.deployment.serve.process.poll() is not None or rounds[-1].back_after_s is None:
                break
            if sum(done.continued > 0 for done in rounds) == options.rounds:
                break
        ending = await stop(setup)
    return rounds, [ending] if ending else []


def _line(done: Round) -> str:
    back = "NOT BACK" if done.back_after_s is None else f"back after {done.back_after_s:.1f} s"
    met = "complete" if done.continued else "complete, but the worker had no stream: repeated"
    verdict = met if not done.wrong else f"WRONG: {done.wrong}"
    killed = f"{done.part} of {done.worker_id} killed at token {done.at_token}, {done.continued} of {STREAMS} continued"
    return f"{done.number:3d}  {killed}: {verdict}, pause {done.pause_s:.2f} s, {back}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all rounds; exit with 1 unless every round was complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache", default="512 MiB")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings for ridgeline serve")
    parser.add_argument("--out", type=Path, default=Path("runs/kill-decode"))
    options = parser.parse_args(arguments)
    console = Console(width=160)
    rounds, wrong = asyncio.run(run(options, console))
    complete = sum(not done.wrong and done.continued > 0 for done in rounds)
    wrong += [f"round {done.number}: {sentence}" for done in rounds for sentence in done.wrong]
    pauses_s = [done.pause_s for done in rounds if done.continued]
    if pauses_s:
        continued = sum(done.continued for done in rounds)
        console.print(f"{continued} streams continued, {STREAMS * len(rounds)} in all")
        console.print(f"pause: p50 {statistics.median(pauses_s):.2f} s, max {max(pauses_s):.2f} s")
    console.print(f"{complete} of {options.rounds} rounds complete", *wrong, markup=False, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rounds.json").write_text(json.dumps([asdict(done) for done in rounds], indent=1) + "\n")
    sys.exit(0 if complete == options.rounds and not wrong else 1)


if __name__ == "__main__":
    main()
