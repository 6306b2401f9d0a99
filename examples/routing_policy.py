"""Write a routing policy, and see what it does before any engine runs.

    python examples/routing_policy.py

A policy is a pure function of a request and of the workers: it filters them, scores them, and picks one, or one for the
prompt and another for decode. To serve with this one, put it into a package whose pyproject.toml says

    [project.entry-points."ridgeline.policies"]
    long_prompts_apart = "my_package.policies:LongPromptsApart"

install that package where Ridgeline's router runs, and start

    ridgeline serve --mode adaptive --set router.policy.name=long_prompts_apart \
        --set router.policy.options.long_tokens=2000

`ridgeline whatif FILE --policy long_prompts_apart` tries it on recorded traffic.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from ridgeline.contracts.workers import StepModel
from ridgeline.router.scheduler.engines import ModelledRequest
from ridgeline.router.scheduler.features import Assignment, FleetModel, RequestFeatures, WorkerSpec, WorkerState
from ridgeline.router.scheduler.offline_simulation import serve
from ridgeline.router.scheduler.policies import Colocated, Policy

STEPS = StepModel(
    base_s=0.008,
    per_prefill_token_s=2.5e-4,
    per_sequence_s=5e-5,
    per_context_token_s=1.5e-8,
    per_attended_token_s=2e-9,
)
"""How long the steps of the modelled engines take; `ridgeline record` writes down those of your own."""
WORKERS = tuple(WorkerSpec(f"worker-{number}", STEPS, step_tokens=2048, window_tokens=4096) for number in range(3))


class LongPromptsApart:
    """Sends long prompts to the first worker and short ones elsewhere, unless the others have far more to do."""

    paced = False

    def __init__(self, long_tokens: int = 1000) -> None:
        self.long_tokens = long_tokens

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return the worker that does all of the request; None: wait until one has room."""
        open_ = [worker for worker in workers if worker.takes_prompt]
        if not open_:
            return None
        is_long = request.prompt_tokens >= self.long_tokens

        def score(worker: WorkerState) -> float:
            belongs = (worker.worker_id == workers[0].worker_id) == is_long
            return worker.prompt_tokens + (0 if belongs else 4 * self.long_tokens)

        chosen = min(open_, key=score).worker_id
        return Assignment(chosen, chosen, "long_prompts_apart", self.paced)


def traffic(seed: int = 1) -> list[ModelledRequest]:
    """Return 200 requests: most prompts are short, one in ten is long."""
    draw, now_s, made = random.Random(seed), 0.0, []
    for number in range(200):
        now_s += draw.expovariate(12.0)
        made.append(ModelledRequest(number, now_s, 2000 if draw.random() < 0.1 else 200, output_tokens=32))
    return made


def main() -> None:
    """Print how long short prompts wait under a built-in policy and under this one."""
    policies: tuple[Policy, ...] = (Colocated(), LongPromptsApart())
    for policy in policies:
        requests = traffic()
        serve(requests, FleetModel(WORKERS, handover_s=0.005), policy, by_deadline=False)
        ttfts_s = sorted(one.ttft_s for one in requests if one.prompt_tokens < 1000)
        got = Counter(one.decode_worker.worker_id for one in requests if one.decode_worker)
        share = ", ".join(f"{name} {got[name]}" for name in sorted(got))
        p95_ms = 1e3 * ttfts_s[len(ttfts_s) * 95 // 100]
        print(f"{type(policy).__name__}: P95 TTFT of short prompts {p95_ms:.0f} ms (simulated); prompts: {share}")


if __name__ == "__main__":
    main()
