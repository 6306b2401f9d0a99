"""Twenty streams, each of whose decode worker is killed in the middle: all of them must be completed by another one.

usage: python -m tests.chaos.kill_decode --rounds 20 --seed 1 --out runs/kill-decode

One prefill and two decode workers. In each round: two bystander streams, then the one that counts (greedy, 60 tokens);
at a random token of it, SIGKILL of the actor or of the engine process that decodes it. All three must come to their end
with every token, in order, each the model's best one; then both decode workers must be back before the next round.
Prints a line for each round and the pauses; exit 1 unless all rounds were complete.
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
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console

from loadtest.prompts import TextWindows
from tests.chaos import verify
from tests.chaos.deployment import Member
from tests.chaos.records import Record, ask
from tests.chaos.running import Running, pool_settings, running, stop
from tests.chaos.scoring import score
from tests.chaos.wishes import COMPLETIONS, Wish

OUTPUT_TOKENS: Final = 60
LAST_KILL_TOKEN: Final = 55
BYSTANDERS: Final = 2
BYSTANDER_TOKENS: Final = 120
BACK_WITHIN_S: Final = 180.0
LOOK_S: Final = 0.005
Part = Literal["actor", "engine"]


@dataclass(frozen=True)
class Round:
    """What one kill did."""

    number: int
    part: Part
    at_token: int
    """Tokens the client had when the kill was done."""
    worker_id: str
    certain: bool
    """Whether that worker was seen to have taken the stream; else the one that the router picks next was hit."""
    pause_s: float
    """The largest gap between tokens from the kill on; 0 if no token was left."""
    back_after_s: float | None
    wrong: list[str]


class Rounds:
    """One after the other on a running deployment."""

    def __init__(self, setup: Running, seed: int) -> None:
        self._setup = setup
        self._rng = random.Random(seed)
        self._windows = TextWindows(setup.text_tokens, seed)
        self._asked = 0

    async def one(self, number: int) -> Round:
        """Start, wait for the token, kill, wait for the end, check."""
        part: Part = self._rng.choice(("actor", "engine"))
        at_token = self._rng.randint(0, LAST_KILL_TOKEN)
        bystanders = [self._start(BYSTANDER_TOKENS) for _ in range(BYSTANDERS)]
        await _until(lambda: all(record.num_tokens >= 3 for record, _ in bystanders))
        before = await self._tasks()
        record, ending = self._start(OUTPUT_TOKENS)
        await _until(lambda: record.num_tokens >= at_token or ending.done())
        victim, certain = await self._decoding(before)
        process = victim.actor if part == "actor" else victim.engine()
        had, killed_s = record.num_tokens, time.monotonic()
        if process is not None:
            process.kill()
        endings = [ending, *(end for _, end in bystanders)]
        await asyncio.gather(*endings)
        records = [end.result() for end in endings]
        wrong = [sentence for one in records for sentence in verify.violations(one, self._setup.decode)]
        wrong += [f"{one.status}: {error}" for one in records for error in one.errors]
        times_s = record.token_times_s
        gaps_s = [later - earlier for earlier, later in pairwise(times_s) if later > killed_s]
        began_s = time.monotonic()
        pids = frozenset({process.pid}) if process is not None else frozenset()
        back = await self._setup.deployment.wait_full("decode", 2, BACK_WITHIN_S, without=pids)
        back_after_s = time.monotonic() - killed_s if back else None
        if not back:
            wrong.append(f"two decode workers were not back {time.monotonic() - began_s:.0f} s after the streams' end")
        else:
            wrong += await self.score(records)  # on both workers, so not before the killed one is back
        return Round(number, part, had, victim.worker_id, certain, max(gaps_s, default=0.0), back_after_s, wrong)

    async def score(self, records: Sequence[Record]) -> list[str]:
        """Sentences about tokens that are not the model's best."""
        setup = self._setup
        async with setup.deployment.past_the_router(setup.model, setup.model_path, setup.tokenizer) as pairs:
            return (await score(pairs, records)).wrong

    def _start(self, num_tokens: int) -> tuple[Record, asyncio.Task[Record]]:
        """A greedy stream; its record fills while it runs."""
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

    async def _tasks(self) -> dict[str, float]:
        """Tasks each decode worker has taken and not finished: counted the moment they come."""
        return (await self._setup.deployment.metrics()).by_label("ridgeline_tasks", "worker")

    async def _decoding(self, before: dict[str, float]) -> tuple[Member, bool]:
        """The decode worker that has taken a task more than before; else the one with fewer, which comes next."""
        members = [member for member in await self._setup.deployment.members("decode") if member.whole]
        now = await self._tasks()
        more = [member for member in members if now.get(member.worker_id, 0) > before.get(member.worker_id, 0)]
        if len(more) == 1:
            return more[0], True
        return min(members, key=lambda member: before.get(member.worker_id, 0)), False


async def _until(condition: Any) -> None:
    async with asyncio.timeout(BACK_WITHIN_S):
        while not condition():  # noqa: ASYNC110 - a record is a plain object
            await asyncio.sleep(LOOK_S)


async def run(options: argparse.Namespace, console: Console) -> tuple[list[Round], list[str]]:
    """All rounds; and what else was wrong."""
    settings = pool_settings(1, 2, options.cores, options.kv_cache, options.step_tokens)
    settings.append(f"supervision.max_restarts={2 * options.rounds}")
    rounds: list[Round] = []
    async with running([*settings, *options.set]) as setup:
        series = Rounds(setup, options.seed)
        for number in range(1, options.rounds + 1):
            rounds.append(await series.one(number))
            console.print(_line(rounds[-1]), markup=False, highlight=False)
            if setup.deployment.serve.process.poll() is not None or rounds[-1].back_after_s is None:
                break
        ending = await stop(setup)
    return rounds, [ending] if ending else []


def _line(done: Round) -> str:
    where = f"{done.part} of {done.worker_id}{'' if done.certain else ' (expected to decode it)'}"
    back = "NOT BACK" if done.back_after_s is None else f"back after {done.back_after_s:.1f} s"
    verdict = "complete" if not done.wrong else f"WRONG: {done.wrong}"
    return f"{done.number:3d}  {where} killed at token {done.at_token}: {verdict}, pause {done.pause_s:.2f} s, {back}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit 1 unless every round was complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--kv-cache", default="512 MiB")
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more for ridgeline serve")
    parser.add_argument("--out", type=Path, default=Path("runs/kill-decode"))
    options = parser.parse_args(arguments)
    console = Console(width=160)
    rounds, wrong = asyncio.run(run(options, console))
    complete = sum(not done.wrong for done in rounds)
    pauses_s = [done.pause_s for done in rounds if done.pause_s]
    if pauses_s:
        console.print(f"pause: p50 {statistics.median(pauses_s):.2f} s, max {max(pauses_s):.2f} s")
    console.print(f"{complete} of {options.rounds} rounds complete", *wrong, markup=False, highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rounds.json").write_text(json.dumps([asdict(done) for done in rounds], indent=1) + "\n")
    sys.exit(0 if complete == options.rounds and not wrong else 1)


if __name__ == "__main__":
    main()
