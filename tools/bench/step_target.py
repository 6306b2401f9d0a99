"""What a step target does: one engine on one core under Poisson load, without a target and with three, in alternation.

Targets are multiples of the engine's own unloaded decode step, and the load is a share of what it computes unloaded, so
that the figures mean the same on every machine. Run it with `make bench-step-target`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from cluster.config.loader import load_config
from cluster.runtime.actors import engine_environment
from cluster.runtime.plan import make_plan
from contracts.tasks import GenerateTask

if TYPE_CHECKING:
    from engine.vllm_engine import VllmEngine

MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 2048
FACTORS = (0.0, 1.5, 2.0, 3.0)
"""Targets in unloaded decode steps; 0: none."""
WARM_UP_TOKENS = 24
START_WITHIN_S = 300.0
TPOT_OVER = 1.05
GAP_OVER = 1.3
THROUGHPUT_UNDER = 0.95


@dataclass
class Round:
    """What clients saw of one engine setting."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    longest_gap_s: list[float] = field(default_factory=list)
    tokens: int = 0
    lasted_s: float = 0.0

    def add(self, arrived_s: float, tokens_s: list[float]) -> None:
        """Add an answer by when its tokens came."""
        self.ttft_s.append(tokens_s[0] - arrived_s)
        self.tpot_s.append((tokens_s[-1] - tokens_s[0]) / (len(tokens_s) - 1))
        self.longest_gap_s.append(max(later - earlier for earlier, later in pairwise(tokens_s)))
        self.tokens += len(tokens_s)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, from the first arrival to the last token."""
        return self.tokens / self.lasted_s


def p90(values: list[float]) -> float:
    """Return the 90th percentile, interpolated."""
    return quantiles(values, n=10, method="inclusive")[-1]


class OneEngine:
    """An engine on one core, and its answers with the times of their tokens."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._number = 0

    async def answer(self, seed: int, prompt_tokens: int, output_tokens: int) -> tuple[list[int], list[float]]:
        """Return the tokens of an answer to a prompt that only `seed` gives, and when each came."""
        from vllm.sampling_params import SamplingParams

        from decode_worker.handler import DecodeHandler
        from engine.request import sampling

        draw = random.Random(seed)
        self._number += 1
        params = SamplingParams(max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=0.0)
        task = GenerateTask(
            request_id=f"r{self._number}",
            leg="decode",
            prompt_token_ids=[draw.randrange(1000, 40_000) for _ in range(prompt_tokens)],
            sampling=sampling.encode(params),
        )
        token_ids: list[int] = []
        times_s: list[float] = []
        async with aclosing(DecodeHandler().run(self.engine, task)) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
                times_s += [time.perf_counter()] * len(delta.token_ids)
        return token_ids, times_s

    async def limit(self, target_s: float) -> None:
        """Set the target; 0: none."""
        await self.engine.limit_steps(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, target_s)

    async def unloaded(self, prompt_tokens: int) -> tuple[float, float]:
        """Return the seconds of a whole prompt and of a decode step, alone."""
        prompts_s, steps_s = [], []
        for seed in range(3):
            began_s = time.perf_counter()
            _, times_s = await self.answer(1_000_000 + seed, prompt_tokens, WARM_UP_TOKENS)
            if seed:  # the first one warms up
                prompts_s.append(times_s[0] - began_s)
                steps_s += [later - earlier for earlier, later in pairwise(times_s)]
        return median(prompts_s), median(steps_s)

    async def load(self, target_s: float, arrivals_s: list[float], seed: int, prompt: int, output: int) -> Round:
        """Run one round; each request comes when it comes, whatever has become of the others."""
        await self.limit(target_s)
        result = Round()
        began_s = time.perf_counter()

        async def one(number: int, at_s: float) -> None:
            await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
            arrived_s = time.perf_counter()
            _, times_s = await self.answer(seed + number, prompt, output)
            result.add(arrived_s, times_s)

        async with asyncio.TaskGroup() as group:
            for number, at_s in enumerate(arrivals_s):
                group.create_task(one(number, at_s))
        result.lasted_s = time.perf_counter() - began_s - arrivals_s[0]
        return result


@asynccontextmanager
async def one_engine(core: int) -> AsyncIterator[OneEngine]:
    """Start an engine for whole requests on one core; this process stays off it if there is another."""
    os.environ.update(engine_environment(1, START_WITHIN_S, on_cpu=True))
    from engine.vllm_engine import VllmEngine  # torch reads the number of its threads when it is imported

    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS, "workers": 1}
    settings = {f"pools.colocated.{name}": str(value) for name, value in limits.items()}
    config = load_config("deploy/local.yaml", {"mode": "colocated", "fixed_mode": "true", **settings}).config
    plan = make_plan(config)
    engine = VllmEngine(plan.engine_config(plan.workers[0], "127.0.0.1"))
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        engine.start()
    finally:
        os.sched_setaffinity(0, everywhere - {core} or everywhere)
    try:
        await engine.describe()
        yield OneEngine(engine)
    finally:
        engine.close()


async def compare(one: OneEngine, options: argparse.Namespace) -> int:
    """Print the table, and what does not hold; return what to exit with."""
    console = Console(width=160)
    prompt_s, step_s = await one.unloaded(options.prompt)
    rate = options.load / prompt_s
    console.print(
        f"unloaded: prompt of {options.prompt} tokens {prompt_s:.2f} s, decode step {1e3 * step_s:.1f} ms; "
        f"{rate:.3f} requests/s"
    )
    rounds: dict[float, list[Round]] = {factor: [] for factor in FACTORS}
    errors: dict[float, list[float]] = {factor: [] for factor in FACTORS}
    for number in range(options.rounds):
        draw = random.Random(options.seed + number)
        arrivals_s = [at := 0.0] + [at := at + draw.expovariate(rate) for _ in range(options.requests - 1)]
        order = FACTORS if number % 2 == 0 else FACTORS[::-1]
        for place, factor in enumerate(order):
            seed = 10_000 * (1 + number * len(FACTORS) + place)
            result = await one.load(factor * step_s, arrivals_s, seed, options.prompt, options.output)
            rounds[factor].append(result)
            model = one.engine.stats.step_model
            errors[factor].append(model.error if model else 0.0)
            console.print(f"round {number + 1}, target {factor:g} steps: {result.tokens_per_s:.1f} tokens/s")
    return report(console, rounds, errors, step_s)


def report(console: Console, rounds: dict[float, list[Round]], errors: dict[float, list[float]], step_s: float) -> int:
    """Print what was measured; return 1 if a target was not kept, or cost throughput."""
    table = Table("target", "tokens/s", "TTFT p50/p90", "TPOT p50/p90", "longest gap p90", "model error")
    failed = []
    free = sum(one.tokens for one in rounds[0.0]) / sum(one.lasted_s for one in rounds[0.0])
    for factor, of_target in rounds.items():
        target_s = factor * step_s
        joined = [
            [value for one in of_target for value in getattr(one, name)]
            for name in ("ttft_s", "tpot_s", "longest_gap_s")
        ]
        ttft_s, tpot_s, gap_s = joined
        throughput = sum(one.tokens for one in of_target) / sum(one.lasted_s for one in of_target)
        table.add_row(
            f"{1e3 * target_s:.0f} ms ({factor:g} steps)" if factor else "none",
            f"{throughput:.1f}",
            f"{median(ttft_s):.1f}/{p90(ttft_s):.1f} s",
            f"{1e3 * median(tpot_s):.0f}/{1e3 * p90(tpot_s):.0f} ms",
            f"{1e3 * p90(gap_s):.0f} ms",
            f"{100 * median(errors[factor]):.1f} %",
        )
        if not factor:
            continue
        if p90(tpot_s) > TPOT_OVER * target_s:
            failed.append(f"{factor:g} steps: TPOT p90 is {p90(tpot_s) / target_s:.2f} targets, the limit {TPOT_OVER}")
        if p90(gap_s) > GAP_OVER * target_s:
            failed.append(f"{factor:g} steps: longest gap p90 is {p90(gap_s) / target_s:.2f} targets, not {GAP_OVER}")
        if throughput < THROUGHPUT_UNDER * free:
            failed.append(f"{factor:g} steps: throughput is {throughput / free:.2f} of the unbounded engine's")
    console.print(table)
    for sentence in failed:
        console.print(f"not kept: {sentence}")
    return 1 if failed else 0


async def run(options: argparse.Namespace) -> int:
    """Start the engine and measure."""
    async with one_engine(max(os.sched_getaffinity(0))) as one:
        return await compare(one, options)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="One engine with and without a step target, under the same load.")
    parser.add_argument("--rounds", type=int, default=2, help="alternations of all targets")
    parser.add_argument("--requests", type=int, default=12, help="requests of each round")
    parser.add_argument("--load", type=float, default=0.3, help="share of the time that unloaded prompts would take")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(asyncio.run(run(options)))


if __name__ == "__main__":
    main()
