"""Write a routing policy, and see what it does before any engine runs.

    python examples/routing_policy.py

A policy is a scorer: a pure function of a request (`Demand`) and a snapshot of a worker (`WorkerLoad`). The worker with
the lowest score gets the request. There is no plug-in for scorers yet. To serve with one, put it into
router/fleet/policy.py and enter it in PROMPT_SCORERS for the pool that computes prompts, or as DECODE_SCORER.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from ridgeline.router.fleet.policy import Demand, Scorer, WorkerLoad, least_prompt_tokens, pick

LONG_PROMPT_TOKENS = 1000
WORKERS = ("worker-0", "worker-1", "worker-2")
TOKENS_PER_S = 4000.0


def long_prompts_apart(demand: Demand, load: WorkerLoad) -> tuple[float, ...]:
    """Score so that long prompts go to worker-0 and short ones do not, unless the others have far more to do."""
    belongs = (load.worker_id == "worker-0") == (demand.prompt_tokens >= LONG_PROMPT_TOKENS)
    penalty = 0 if belongs else 4 * LONG_PROMPT_TOKENS
    return (load.outstanding_prompt_tokens + penalty, load.running)


def arrivals(seed: int = 1) -> Iterator[tuple[float, Demand]]:
    """Yield 200 requests with their times: most prompts are short, one in ten is long."""
    chance, now_s = random.Random(seed), 0.0
    for _ in range(200):
        now_s += chance.expovariate(12.0)
        yield now_s, Demand(2000 if chance.random() < 0.1 else 200)


def simulated(scorer: Scorer) -> tuple[list[float], Counter[str]]:
    """Return the waits of short prompts in seconds, sorted, and how many prompts each worker got.

    Workers compute prompts one after the other.
    """
    idle = WorkerLoad(
        worker_id="",
        connected=True,
        draining=False,
        outstanding_prompt_tokens=0,
        running=0,
        kv_blocks_free=1000,
        kv_blocks_total=1000,
        max_running=64,
        block_size_tokens=16,
    )
    free_at_s = dict.fromkeys(WORKERS, 0.0)
    waits_s, got = [], Counter[str]()
    for now_s, demand in arrivals():
        left = {name: max(0, round((at_s - now_s) * TOKENS_PER_S)) for name, at_s in free_at_s.items()}
        loads = [replace(idle, worker_id=name, outstanding_prompt_tokens=left[name]) for name in WORKERS]
        chosen = pick(demand, loads, scorer)
        got[chosen] += 1
        if demand.prompt_tokens < LONG_PROMPT_TOKENS:
            waits_s.append(left[chosen] / TOKENS_PER_S)
        free_at_s[chosen] = max(free_at_s[chosen], now_s) + demand.prompt_tokens / TOKENS_PER_S
    return sorted(waits_s), got


def main() -> None:
    """Print how long short prompts wait under the built-in policy and under this one."""
    for scorer in (least_prompt_tokens, long_prompts_apart):
        waits_s, got = simulated(scorer)
        share = ", ".join(f"{name} {got[name]}" for name in WORKERS)
        p95_ms = 1e3 * waits_s[len(waits_s) * 95 // 100]
        print(f"{scorer.__name__}: P95 wait of short prompts {p95_ms:.0f} ms; prompts: {share}")


if __name__ == "__main__":
    main()
