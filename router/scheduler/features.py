"""What a request asks for, what a policy knows of a worker, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, Protocol

import msgspec

from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import SHORTEST_STEP_S, StepModel

WINDOW_STEPS: Final = 2
"""So many steps' worth of prompt tokens are sent to a worker at a time: beside those of one step, those of the next."""
RATE_KEPT: Final = 0.8
"""Steps count as long as is needed to compute prompts at this part of the rate of the longest ones. What a worker has
can no longer be put behind what is more urgent: with two of the longest steps, in overload all prompts were late."""
GRAIN_TOKENS: Final = 32
HOPELESS_AFTER: Final = 4
"""How often in a row a client's prompts may pass those of its that cannot meet their deadline any more."""


@lru_cache(maxsize=1024)
def window_tokens(model: StepModel, step_tokens: int) -> int:
    """Return how many prompt tokens a worker has when it gets no more; its steps compute `step_tokens` at most."""
    least_rate = RATE_KEPT * step_tokens / max(SHORTEST_STEP_S, model.step_s(step_tokens, 0, 0, 0))
    sizes = range(GRAIN_TOKENS, step_tokens, GRAIN_TOKENS)
    enough = (tokens for tokens in sizes if tokens >= least_rate * model.step_s(tokens, 0, 0, 0))
    return WINDOW_STEPS * next(enough, step_tokens)


class RequestFeatures(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request whose workers are to be chosen."""

    prompt_tokens: int
    output_tokens: float
    """Expected length of the output."""
    ttft_slo_s: float = math.inf
    tpot_slo_s: float = math.inf
    sure_tokens: float = 0.0
    """P25 output length: engines count on so much when they plan with TPOT slack."""
    waited_s: float = 0.0
    """Time since it arrived."""
    may_split: bool = True
    """Whether two workers may share it; not if its prompt is shorter than `router.min_remote_prefill_tokens`."""

    @property
    def context_tokens(self) -> float:
        """The mean context of the sequence while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2


class WorkerState(Protocol):
    """A worker as policies see it: `ridgeline.router.fleet.worker`, or a modelled one."""

    @property
    def worker_id(self) -> str: ...

    @property
    def model(self) -> StepModel:
        """How long its steps take."""
        ...

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step."""
        ...

    @property
    def turns(self) -> int:
        """Workers of its device that have work, itself included: its steps take as many times as long."""
        ...

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens sent there whose first token has not come back."""
        ...

    @property
    def prompts_s(self) -> float:
        """Seconds that the rest of those prompts adds to steps."""
        ...

    @property
    def running(self) -> int:
        """Sequences sent there that have not ended."""
        ...

    @property
    def decodes(self) -> int:
        """Sequences that it decodes, or will once their prompts are computed."""
        ...

    @property
    def context_tokens(self) -> float:
        """Tokens of their contexts."""
        ...

    @property
    def takes_prompt(self) -> bool:
        """Whether it has room for one more prompt; else the prompt waits in the router."""
        ...

    def has_room(self, request: RequestFeatures) -> bool:
        """Return whether its batch and its KV blocks have room for the sequence."""
        ...

    def cached_tokens(self, request: RequestFeatures) -> int:
        """Return how many of the prompt's tokens are in its prefix cache."""
        ...


class WorkerSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a simulation needs to know of one worker."""

    worker_id: str
    model: StepModel
    step_tokens: int
    """Most tokens of one step."""
    window_tokens: int
    """It gets a prompt only while it has fewer prompt tokens to compute."""
    max_num_seqs: int = 1 << 30
    """Sequences that it runs at a time."""
    kv_tokens: int = 1 << 60
    """Tokens for which its KV cache has room."""
    device: str = ""
    """Workers with the same one take turns on it; empty: it has one of its own."""


class PoolLimits(msgspec.Struct, frozen=True):
    """Of a pool of the fixed modes: what a simulation of these needs to know."""

    workers: int
    step_tokens: int
    max_num_seqs: int


class FleetModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a simulation needs to know of the fleet."""

    workers: tuple[WorkerSpec, ...]
    """In the order in which policies divide them."""
    handover_s: float
    """From a first token to the first decode step on another worker, in which it can be."""
    overhead_s: float = 0.0
    """Seconds of a TTFT that pass outside of engines, whatever the policy."""
    pools: Mapping[Pool, PoolLimits] = {}
    """Those that the workers make in the fixed modes; without them these have the limits of mode adaptive."""


class Assignment(msgspec.Struct, frozen=True):
    """The workers of a request, and what is predicted for it there."""

    prompt_worker: str
    decode_worker: str
    reason: str
    paced: bool = False
    """Whether its engine bounds steps by its TPOT SLO."""
    policy: str = ""
    """The policy that chose them."""
    request: RequestFeatures | None = None
    ttft_s: float = 0.0
    """From its arrival."""
    tpot_s: float = 0.0
    cached_tokens: int = 0
    """Tokens of the prompt that its worker is expected to have."""
    held_s: float = 0.0
    """Time for which the prompt was held back, next to be placed, since the policy waited for another worker."""

    @property
    def splits(self) -> bool:
        """Whether one worker computes the prompt and another one decodes."""
        return self.prompt_worker != self.decode_worker
