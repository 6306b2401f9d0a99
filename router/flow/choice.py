"""Which workers a prompt gets when it is next: by score in the pure modes, by a policy in mode `adaptive`.

The rules are pure, in `ridgeline.router.fleet.policy` and `ridgeline.router.scheduler`; here the workers' state becomes
what these need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import msgspec

from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import StepModel
from ridgeline.router.fleet.policy import PROMPT_SCORERS, Demand, blocks_needed, pick
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.learned import Learned
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import Assignment, RequestFeatures
from ridgeline.router.scheduler.policies import predicted


class Choice(msgspec.Struct, frozen=True):
    """The workers of a prompt whose turn it is."""

    worker: Worker
    decode_worker: Worker | None = None
    """The one that decodes, if another one does and has been chosen already."""
    assignment: Assignment | None = None
    """Why these, if a policy chose them."""


class Chooser(Protocol):
    """Chooses the workers of the prompt that is next."""

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker], *, urgent: bool) -> Choice | None:
        """Return the choice; None to wait for a worker that has no room now, which only an `urgent` prompt never does.

        `waited_s` is the time since the request's arrival; `roomy` are the workers that would take a prompt now, at
        least one.
        """
        ...

    def least_s(self, demand: Demand) -> float | None:
        """Return the seconds that a prompt takes at least; None if prompts do not go by their SLOs on TTFT."""
        ...


class ByScore:
    """Chooses by the scores of the workers that have room."""

    def __init__(self, pool: Pool) -> None:
        self._scorer = PROMPT_SCORERS[pool]

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker], *, urgent: bool) -> Choice:
        """Return the best worker with room."""
        chosen = pick(demand, (worker.load() for worker in roomy), self._scorer)
        return Choice(next(worker for worker in roomy if worker.worker_id == chosen))

    def least_s(self, demand: Demand) -> float | None:
        """Return None: prompts go first come, first served."""
        return None


class ByPolicy:
    """Chooses by the policy that serves now, and by score until steps of prompts and of decoding are known."""

    def __init__(
        self,
        pool: Pool,
        workers: Callable[[], Sequence[Worker]],
        learned: Learned,
        policy: Adaptive,
        min_remote_prefill_tokens: int = 0,
    ) -> None:
        """`workers` returns those of the pool, each of which may get any part of a request.

        A request with a shorter prompt than `min_remote_prefill_tokens` goes whole to one of them.
        """
        self._workers = workers
        self._learned = learned
        self._policy = policy
        self._min_remote_prefill_tokens = min_remote_prefill_tokens
        self._by_score = ByScore(pool)

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker], *, urgent: bool) -> Choice | None:
        """Return the policy's workers, or None if it would wait."""
        everyone = self._workers()
        model = any_model(everyone)
        if model is None:
            return self._by_score.choose(demand, waited_s, roomy, urgent=urgent)
        open_workers = set(roomy)
        workers = [one for one in everyone if one in open_workers or (not urgent and one.takes_work)]
        reached = [one for one in workers if one.worker_id not in demand.avoided] or workers
        cached = self._learned.prefixes.look_up(demand.prefix).cached_tokens_by_worker() if demand.prefix else {}
        busy = Counter(one.device for one in everyone if one.device and one.outstanding.running)
        views = [WorkerView(one, model, demand, cached, busy, takes_prompt=one in open_workers) for one in reached]
        request = RequestFeatures(
            demand.prompt_tokens,
            self._learned.output_tokens(demand.output_tokens),
            demand.ttft_limit_s,
            demand.tpot_limit_s,
            self._learned.sure_tokens(demand.output_tokens),
            waited_s,
            may_split=demand.prompt_tokens >= self._min_remote_prefill_tokens,
        )
        assigned = self._policy.assign(request, views)
        if assigned is None:
            return self._by_score.choose(demand, waited_s, roomy, urgent=urgent) if urgent else None
        by_id = {view.worker_id: view for view in views}
        prompt, decode = by_id[assigned.prompt_worker], by_id[assigned.decode_worker]
        return Choice(
            prompt.worker,
            decode.worker if assigned.splits else None,
            predicted(assigned, request, prompt, decode, self._learned.outside_s),
        )

    def least_s(self, demand: Demand) -> float | None:
        """Return the seconds of the prompt alone on an idle worker; 0 while no model is known."""
        model = any_model(self._workers())
        tokens = demand.prompt_tokens
        return model.step_s(tokens, 0, 0, tokens * tokens / 2) if model else 0.0


class WorkerView:
    """A worker as policies see it (`ridgeline.router.scheduler.features.WorkerState`), for one request."""

    def __init__(
        self,
        worker: Worker,
        whole: StepModel,
        demand: Demand,
        cached: Mapping[str, tuple[str, int]],
        busy: Mapping[tuple[str, str], int],
        *,
        takes_prompt: bool,
    ) -> None:
        """`whole`: the model for what the worker's own one has not seen. `busy`: workers that have work, by device.

        `cached`: see `ridgeline.router.fleet.prefixes.Found.cached_tokens_by_worker`.
        """
        self.worker = worker
        self.worker_id = worker.worker_id
        self.takes_prompt = takes_prompt
        self._whole, self._demand, self._cached = whole, demand, cached
        counted = worker.outstanding
        self.prompt_tokens, self.running = counted.prompt_tokens, counted.running
        self.decodes, self.context_tokens = counted.decodes, counted.context_tokens
        self.turns = 1
        if worker.device and busy:
            self.turns = max(1, busy[worker.device] + (not counted.running))

    @cached_property
    def model(self) -> StepModel:
        """How long its steps take."""
        return whole_model(self.worker, self._whole)

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step."""
        role = self.worker.role
        return role.max_num_batched_tokens if role else self.worker.description.max_model_len_tokens

    @cached_property
    def prompts_s(self) -> float:
        """Seconds that the rest of its prompts adds to steps."""
        model = self.model
        tokens, attends = self.worker.prompts.left(model)
        return model.per_prefill_token_s * tokens + model.per_attended_token_s * attends

    def has_room(self, request: RequestFeatures) -> bool:
        """Return whether its batch and its KV blocks have room for the sequence."""
        return self.worker.has_room(blocks_needed(self._demand, self.worker.description.block_size_tokens))

    def cached_tokens(self, request: RequestFeatures) -> int:
        """Return how many of the prompt's tokens it has, or will have once it has computed what it has."""
        prefix, known = self._demand.prefix, self.worker.description
        if not prefix:
            return 0
        if prefix[-1] in self.worker.prompts.last_blocks:
            tokens = len(prefix) * known.block_size_tokens
        else:
            incarnation, tokens = self._cached.get(known.worker_id, ("", 0))
            tokens = tokens if incarnation == known.incarnation else 0
        return min(tokens, request.prompt_tokens - 1)


def any_model(workers: Sequence[Worker]) -> StepModel | None:
    """Return a model that has seen prompts and decoding, put together of two workers' if no worker has seen both."""
    known: list[StepModel] = []
    for worker in workers:
        if (model := worker.step_model) is not None:
            if model.is_whole:
                return model
            known.append(model)
    return known[0].completed_by(known) if known else None


def whole_model(worker: Worker, whole: StepModel) -> StepModel:
    """Return the model of a worker's steps, with what it has not seen as `whole` has it."""
    own = worker.step_model
    if own is None:
        return whole
    return own if own.is_whole else own.completed_by([whole]) or whole
