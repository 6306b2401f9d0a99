"""Does anything stay behind? Sends thousands of mixed requests, half of whose clients leave, at any moment.

usage: python -m tools.chaos.stress --requests 3000 --seed 1 --rounds 1

It runs `ridgeline serve` with one prefill and one decode worker and a tiny random model with short steps, so that many
hand-offs coincide with a client that leaves. Two seconds after the last request of a round nothing may be held: no
task, block, lease, fetch or heartbeat. Prints what is held, with the history of such hand-offs; exits with 1 if
anything was held or any request failed.

Most clients that leave do so around the moment at which their first token is due, when the request is being handed
off. The same seed plans the same requests; when each one is left depends on timing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console

from ridgeline.cluster.config.models import RidgelineConfig
from tests.engines.harness import Engines, Increase
from tests.engines.tiny_model import make_tiny_model_like
from tools.chaos.records import ask
from tools.chaos.running import LOCAL, Running, pool_settings, running, stop
from tools.chaos.wishes import COMPLETIONS, SCHEMA, Wish

MAX_MODEL_LEN_TOKENS: Final = 1024
STEP_TOKENS: Final = 128
CONCURRENCY: Final = 24
KV_CACHE: Final = "256 MiB"
LONGEST_PROMPT_TOKENS: Final = 600
LEASE_S: Final = 30.0
HELD_WITHIN_S: Final = 2.0
WAITED_OUT_WITHIN_S: Final = LEASE_S + 10.0
ENDS_WITHIN_S: Final = 120.0
"""Time for any request to end, far above any correct duration."""
LEAVE_SHARE: Final = 0.5
PROGRESS_EVERY: Final = 250
COUNTED: Final = {
    "ridgeline_requests_total": "outcome",
    "ridgeline_overlapped_handoffs_total": "result",
    "ridgeline_first_token_total": "mode",
    "ridgeline_recompute_total": "reason",
    "ridgeline_expired_leases_total": "worker",
}
"""What is told of the whole run, by label."""


@dataclass(frozen=True)
class Stay:
    """How long a client stays that leaves by the clock."""

    of_first: float = 0.0
    of_whole: float = 0.0
    """Fractions of the usual time to a first token and of a whole request."""
    delay_s: float = 0.0


Plan = tuple[Wish, Stay | None]
"""One planned request, a function of the seed and its number; a client without a stay leaves after tokens or never."""


@dataclass
class Tally:
    """The result of a round."""

    ends: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    lives: list[str] = field(default_factory=list)
    wall_s: float = 0.0


def plan(seed: int, number: int, text: Sequence[int], model: str, longest_tokens: int = LONGEST_PROMPT_TOKENS) -> Plan:
    """Plan a request: mostly short prompts, some of several steps, some cached; all ways of sampling and ending."""
    rng = random.Random(f"{seed}/{number}")
    length = rng.choice(
        [rng.randint(1, 60)] * 12 + [rng.randint(60, 250)] * 2 + [rng.randint(250, LONGEST_PROMPT_TOKENS)]
    )
    start = rng.choice([0, rng.randrange(len(text) - 700), rng.randrange(len(text) - 700)])
    kind, extra = rng.choice(list(_kinds(rng).items()))
    body = {
        "model": model,
        "prompt": list(text[start : start + min(length, longest_tokens)]),
        "max_tokens": rng.choice([1, 2, 3, rng.randint(4, 24), rng.randint(4, 24)]),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": rng.random() < 0.85,
        **extra,
    }
    tokens, delay_s, stay = _leave(rng) if rng.random() < LEAVE_SHARE else (None, 0.0, None)
    wish = Wish(number, kind, COMPLETIONS, body, body["max_tokens"], body.get("n", 1), tokens, delay_s)
    return wish, stay


def _kinds(rng: random.Random) -> dict[str, dict[str, Any]]:
    seed = rng.randrange(1000)
    schema = {"name": "light", "schema": SCHEMA, "strict": True}
    return {
        "plain": {},
        "one token": {"max_tokens": 1},
        "two tokens": {"max_tokens": 2},
        "seeded": {"temperature": 0.8, "seed": seed},
        "penalty": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
        "two": {"n": 2, "temperature": 0.7},
        "four": {"n": 4, "temperature": 0.9},
        "two that are seeded": {"n": 2, "temperature": 0.9, "seed": seed},
        "two that stop": {"n": 2, "temperature": 1.0, "stop": ["a", "e", "i", "o"]},
        "stop at once": {"temperature": 1.0, "stop": rng.sample(["a", "e", "o", "r", "s", "t", " "], 4)},
        "stop later": {"temperature": 1.0, "stop": ["q", "zz"]},
        "stop token": {"temperature": 1.0, "stop_token_ids": list(range(rng.randint(100, 8_000)))},
        "logprobs": {"logprobs": 2},
        "prompt_logprobs": {"prompt_logprobs": 1, "stream": False},
        "echo": {"echo": True, "logprobs": 1},
        "bad words": {"bad_words": [" the", " of"]},
        "json": {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": rng.randint(1, 20)},
        "min_tokens": {"min_tokens": 1, "ignore_eos": False},
    }


def _leave(rng: random.Random) -> tuple[int | None, float, Stay | None]:
    """Choose a moment, mostly around the first token: the prefill ends before it, and the hand-off follows."""
    due = max(0.05, rng.gauss(1.0, 0.25))
    at_first = 1, rng.choice([0.0, 0.0, rng.uniform(0.0, 0.03)]), None
    return rng.choice(
        [
            (None, 0.0, Stay(delay_s=rng.uniform(0.0, 0.02))),
            *[(None, 0.0, Stay(of_first=due))] * 2,
            *[at_first] * 2,
            (rng.randint(2, 6), rng.uniform(0.0, 0.02), None),
            (None, 0.0, Stay(of_whole=rng.uniform(0.0, 1.2))),
        ]
    )


class Clients:
    """All clients of a deployment; those that leave aim by how long recent requests took."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._first_s: deque[float] = deque([0.1], maxlen=30)
        self._whole_s: deque[float] = deque([0.5], maxlen=30)

    async def ask(self, plan: Plan) -> str:
        """Run a request and return how it ended: finished, left, or the error."""
        wish, stay = plan
        stay_s = None
        if stay is not None:
            usual_s = statistics.median(self._first_s), statistics.median(self._whole_s)
            stay_s = stay.delay_s + stay.of_first * usual_s[0] + stay.of_whole * usual_s[1]
        record = await ask(self._http, wish, stay_s, ENDS_WITHIN_S)
        if record.left:
            return "left"
        if record.broken or record.errors:
            return f"{wish.kind}: {record.status} {record.broken or record.errors[0][:300]}"
        if wish.stream and record.token_times_s:
            self._first_s.append(record.token_times_s[0] - record.sent_s)
            self._whole_s.append(record.ended_s - record.sent_s)
        return "finished"


async def one_round(
    clients: Clients,
    pair: Engines,
    plans: Sequence[Plan],
    concurrency: int,
    say: Any,
    held_within_s: float = HELD_WITHIN_S,
) -> Tally:
    """Send all requests, wait two seconds or so, and look for what is held."""
    tally, waiting, began_s = Tally(), iter(plans), time.monotonic()

    async def one_after_the_other() -> None:
        for each in waiting:
            end = await clients.ask(each)
            tally.ends[end if end in ("finished", "left") else "failed"] += 1
            if end not in ("finished", "left"):
                tally.errors.append(f"request {each[0].number}, {end}")
                say(tally.errors[-1])
            if tally.ends.total() % PROGRESS_EVERY == 0:
                say(f"{tally.ends.total()} of {len(plans)} done, {dict(tally.ends)}")

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_the_other())
    tally.wall_s = time.monotonic() - began_s
    tally.held = await pair.becomes_idle(held_within_s)
    if tally.held:
        tally.lives = await pair.stale_handoffs(HELD_WITHIN_S)
        await pair.becomes_idle(WAITED_OUT_WITHIN_S)  # so that the next round begins with nothing
    return tally


async def stress(setup: Running, options: argparse.Namespace, console: Console) -> list[Tally]:
    """Run all rounds."""
    tallies: list[Tally] = []
    clients = Clients(setup.http)
    async with setup.deployment.past_the_router(setup.model, setup.model_path, setup.tokenizer) as pairs:
        (pair,) = pairs
        before = await setup.deployment.metrics()
        for number in range(options.rounds):
            seed = options.seed + number
            plans = [plan(seed, each, setup.text_tokens, setup.model) for each in range(options.requests)]

            def say(sentence: str, seed: int = seed) -> None:
                console.print(f"seed {seed}: {sentence}", markup=False, highlight=False)

            tally = await one_round(clients, pair, plans, CONCURRENCY, say)
            tallies.append(tally)
            held = tally.held or "nothing"
            say(f"{dict(tally.ends)} in {tally.wall_s:.0f} s; held after {HELD_WITHIN_S:.0f} s: {held}")
            for sentence in tally.lives:
                say(sentence)
        counted = Increase(before, await setup.deployment.metrics())
        for name, label in COUNTED.items():
            console.print(f"{name}: {counted.by_label(name, label)}", markup=False, highlight=False)
    return tallies


async def run(options: argparse.Namespace, console: Console) -> list[str]:
    """Run everything and return what was wrong."""
    with tempfile.TemporaryDirectory(prefix="ridgeline-stress-") as folder:
        model = await asyncio.to_thread(make_tiny_model_like, RidgelineConfig(), Path(folder), MAX_MODEL_LEN_TOKENS)
        settings = [f"model.path={model}", f"model.max_model_len={MAX_MODEL_LEN_TOKENS}"]
        settings += [*pool_settings(1, 1, KV_CACHE, STEP_TOKENS), f"transfer.lease_s={LEASE_S:g}"]
        async with running([*settings, *options.set], LOCAL) as setup:
            tallies = await stress(setup, options, console)
            found = [await stop(setup)]
    clean = sum(not tally.held and not tally.errors for tally in tallies)
    console.print(f"{clean} of {len(tallies)} rounds of {options.requests} requests left nothing and failed nobody")
    found += [f"held: {tally.held}" for tally in tallies if tally.held]
    found += [sentence for tally in tallies for sentence in tally.errors]
    options.out.mkdir(parents=True, exist_ok=True)
    rows = [{"ends": dict(t.ends), "held": t.held, "lives": t.lives, "wall_s": t.wall_s} for t in tallies]
    (options.out / "rounds.json").write_text(json.dumps(rows, indent=1) + "\n")
    return [sentence for sentence in found if sentence]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run; exit with 1 if anything was held or any request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round; each round uses the next one")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings for ridgeline serve")
    parser.add_argument("--out", type=Path, default=Path("runs/stress"))
    console = Console(width=160)
    found = asyncio.run(run(parser.parse_args(arguments), console))
    for sentence in found[:40]:
        console.print(f"VIOLATION {sentence}", markup=False, highlight=False)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
