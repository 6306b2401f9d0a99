"""Measures what a decision costs the router, in a fixed mode and by policies: its rules, its count of what workers do.

There are no engines and no network: 32 workers decode 2,000 streams, every one of them computes two prompts, and a
decision chooses the workers of one more. It is measured twice: with prompts of which no worker has anything, and with
turns of conversations that share a system prompt, which all workers have, each conversation being on one of them.

usage: python -m tools.bench.decision_cost [--workers 32] [--streams 2000] [--decisions 3000]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from itertools import product
from typing import Final

from ridgeline.contracts.workers import StepModel, WorkerStatus
from ridgeline.router.fleet.prefixes import BlockHashes
from ridgeline.router.fleet.request_route import Demand
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.placement.choice import ByLoad, ByPolicy, Chooser
from ridgeline.router.placement.learned import Learned
from ridgeline.router.scheduler.adaptive import Adaptive
from tests.support.lone_worker import lone_worker
from tests.support.samples import kv_layout

MODEL: Final = StepModel(
    base_s=0.008,
    per_prefill_token_s=5e-5,
    per_sequence_s=5e-5,
    per_context_token_s=1.5e-8,
    per_attended_token_s=2e-9,
    steps=100,
)
"""Steps about as long as an 8B model's on one GPU."""
BLOCK_TOKENS: Final = 16
SYSTEM_PROMPT_TOKENS: Final = 1_000
KV_BLOCKS: Final = 100_000
LAYOUT: Final = kv_layout(
    block_size=BLOCK_TOKENS, num_layers=32, num_kv_heads=8, block_bytes=65_536, layout="NHD", isa="cuda"
)
PROMPT_TOKENS: Final = 2_000
LONGEST_ANSWER_TOKENS: Final = 400
FIXED: Final = "mode colocated"
"""Not a policy, but the rule of the fixed modes."""


def _worker(number: int) -> Worker:
    """Return a worker of mode adaptive, with a model of its steps."""
    kv = {"layout": LAYOUT, "num_kv_blocks": KV_BLOCKS, "prefix_block_tokens": BLOCK_TOKENS}
    worker = lone_worker(f"worker-{number}", "adaptive", max_model_len=8_192, **kv)
    worker.status = WorkerStatus(worker_id=worker.worker_id, kv_blocks_free=90_000, step_model=MODEL)
    return worker


def _conversation(draw: random.Random, prompt_tokens: int) -> BlockHashes:
    """Return the hashes of the blocks of a prompt that begins with the system prompt."""
    shared, blocks = SYSTEM_PROMPT_TOKENS // BLOCK_TOKENS, prompt_tokens // BLOCK_TOKENS
    return (*range(shared), *(draw.getrandbits(64) for _ in range(blocks - shared)))


def measure(policy: str, workers: int, streams: int, decisions: int, *, conversations: bool) -> list[float]:
    """Return the microseconds of each decision by a policy, in order of their length."""
    fleet, draw, took_us = [_worker(number) for number in range(workers)], random.Random(1), []
    learned = Learned()
    rules: Chooser = ByLoad("colocated", learned)
    if policy != FIXED:
        adaptive = Adaptive(lambda: None, learned.traffic, always=(policy, {}))
        rules = ByPolicy(lambda: [worker for worker in fleet if worker.pool == "adaptive"], learned, adaptive)
    begun = [_conversation(draw, PROMPT_TOKENS) for _ in range(decisions)]
    if conversations:
        for number, prefix in enumerate(begun):
            learned.computed(fleet[number % workers].description, prefix[: -draw.randrange(1, 50)])
    with ExitStack() as held:
        for _ in range(streams):
            context = draw.randrange(100, 4_000)
            reserve = draw.choice(fleet).reserve(decode_context_tokens=context)
            held.enter_context(reserve).prompt_done()
        for worker in fleet:
            for _ in range(2):
                held.enter_context(worker.reserve(draw.randrange(100, 4_000), last_block=draw.getrandbits(64)))
        for prefix in begun:
            demand = Demand(PROMPT_TOKENS, LONGEST_ANSWER_TOKENS, prefix=prefix, ttft_limit_s=1.0, tpot_limit_s=0.03)
            began_s = time.perf_counter()
            choice = rules.choose(demand, 0.01, fleet)
            took_us.append((time.perf_counter() - began_s) * 1e6)
            assert choice is not None, "every worker has room"
            assert policy == FIXED or choice.assignment is not None, "every worker has a model of its steps"
    return sorted(took_us)


def main() -> None:
    """Print the median and the 99th percentile of both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("workers", 32), ("streams", 2_000), ("decisions", 3_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    policies = (FIXED, "colocated", "disaggregated", "slack")
    for (prompts, conversations), policy in product((("new prompts", False), ("conversations", True)), policies):
        took_us = measure(policy, asked.workers, asked.streams, asked.decisions, conversations=conversations)
        print(  # noqa: T201
            f"{asked.workers} workers, {asked.streams} streams, {prompts}, {policy}: a decision takes "
            f"{statistics.median(took_us):.0f} us, p99 {took_us[int(0.99 * len(took_us))]:.0f} us "
            f"({len(took_us)} decisions)"
        )


if __name__ == "__main__":
    main()
