"""Which workers a prompt gets when it is next: by load in the fixed modes, by a policy in mode `adaptive`.

The rules are pure, in `ridgeline.router.scheduler.policies`; here the workers' state becomes what they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import msgspec
from msgspec.structs import replace

from ridgeline.contracts.handoff import KvLayout, LayerGroup
from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import StepModel, WorkerDescription
from ridgeline.router.fleet.request_route import Demand, blocks_needed
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.placement.learned import Learned
from ridgeline.router.placement.placement_events import Reuse
from ridgeline.router.scheduler.adaptive import Adaptive
from ridgeline.router.scheduler.features import WINDOW_STEPS, Assignment, RequestFeatures, window_tokens
from ridgeline.router.scheduler.policies import by_nearness, by_work, predicted

KEEPER_MAY_RUN, KEEPER_MAY_RUN_MORE = 1.25, 2
"""A worker that has an adapter in memory is preferred while it runs at most so many times as many sequences, and so
many more, as the least busy one."""


class Choice(msgspec.Struct, frozen=True):
    """The workers of a prompt whose turn it is."""

    worker: Worker
    decode_worker: Worker | None = None
    """The one that decodes, if another one does and has been chosen already."""
    assignment: Assignment | None = None
    """Why these, if a policy chose them."""
    cached_tokens: int = 0
    """Tokens of the prompt that its worker is expected to have."""


class Chooser(Protocol):
    """Chooses the workers of the prompt that is next."""

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker]) -> Choice | None:
        """Return the choice; None to wait for a worker that has no room now, which only an urgent prompt never does.

        `waited_s` is the time since the request's arrival; `roomy` are the workers that would take a prompt now, at
        least one.
        """
        ...

    def least_s(self, demand: Demand) -> float | None:
        """Return the seconds that a prompt takes at least; None if prompts do not go by their SLOs on TTFT."""
        ...


class ByLoad:
    """Chooses by what workers have to do and by what they have cached, without predictions: the fixed modes do."""

    def __init__(self, pool: Pool, learned: Learned) -> None:
        self._learned = learned
        self._decodes = pool == "decode"

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker]) -> Choice:
        """Return the best worker with room."""
        return self.best(demand, roomy)

    def best(self, demand: Demand, workers: Sequence[Worker], source: Worker | None = None) -> Choice:
        """Return the best of these workers, the first of equals; `source` hands the KV of the prompt to it."""
        asked = _Asked()
        asked.begin(demand, self._learned)
        views = _able([WorkerView(worker, asked) for worker in workers], demand)
        request = RequestFeatures(demand.prompt_tokens, self._learned.output_tokens(demand.output_tokens))
        fewest = min(view.decodes for view in views)

        def rank(view: WorkerView) -> tuple[float, ...]:
            if not self._decodes:
                return by_work(request, view, fewest)
            return by_nearness(request, view, distance(source.description, view.worker.description) if source else 0)

        found = min(views, key=rank)
        return Choice(found.worker, cached_tokens=found.cached_tokens(request))

    def least_s(self, demand: Demand) -> float | None:
        """Return None: prompts go first come, first served."""
        return None


def distance(one: WorkerDescription, other: WorkerDescription) -> int:
    """Return 0 for workers on one node, 1 in one rack, 2 for what is farther or not known."""
    if one.node and one.node == other.node:
        return 0
    return 1 if one.rack and one.rack == other.rack else 2


class ByPolicy:
    """Chooses by the policy that serves now, and by load alone until steps of prompts and of decoding are known."""

    def __init__(
        self,
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
        self._by_load = ByLoad("adaptive", learned)
        self._asked = _Asked()
        self._views: dict[Worker, WorkerView] = {}
        """One of each worker for all decisions: to make them anew took half of a decision's time at 32 workers."""

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker]) -> Choice | None:
        """Return the policy's workers, or None if it would wait."""
        everyone = self._workers()
        model = any_model(everyone)
        if model is None:
            return self._by_load.best(replace(demand, prefix=()), roomy)
        views = self._views_of(everyone, {*roomy}, demand, model)
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
            return self._by_load.best(replace(demand, prefix=()), roomy) if demand.urgent else None
        by_id = {view.worker_id: view for view in views}
        prompt, decode = by_id[assigned.prompt_worker], by_id[assigned.decode_worker]
        why = predicted(assigned, request, prompt, decode, self._learned.overhead_s)
        return Choice(prompt.worker, decode.worker if assigned.splits else None, why, why.cached_tokens)

    def _views_of(
        self, everyone: Sequence[Worker], roomy: AbstractSet[Worker], demand: Demand, model: StepModel
    ) -> list[WorkerView]:
        """Return the workers that may get a part of the request, as they are now."""
        if len(self._views) != len(everyone):
            self._views = {one: view for one, view in self._views.items() if one in everyone}
        asked = self._asked
        asked.begin(demand, self._learned, model, everyone)
        views = []
        for one in everyone:
            takes_prompt = one in roomy
            if takes_prompt or (not demand.urgent and one.takes_work):
                view = self._views.get(one)
                if view is None:
                    view = self._views[one] = WorkerView(one, asked)
                view.takes_prompt = takes_prompt or view.has_most_of(demand)
                views.append(view)
        return _able(views, demand)

    def least_s(self, demand: Demand) -> float | None:
        """Return the seconds of the prompt alone on an idle worker; 0 while no model is known."""
        model = any_model(self._workers())
        tokens = demand.prompt_tokens
        return model.step_s(tokens, 0, 0, tokens * tokens / 2) if model else 0.0


class _Asked:
    """What all views know of the decision that is being made."""

    def __init__(self) -> None:
        self.demand = Demand(0)
        self.model: StepModel | None = None
        """For what a worker's own one has not seen; None: nobody asks how long steps take."""
        self.cached: Mapping[str, tuple[str, int]] = {}
        """See `ridgeline.router.fleet.prefixes.PrefixMatch.cached_tokens_by_worker`."""
        self.busy: dict[tuple[str, str], int] = {}
        """Workers that have work, by device."""
        self.blocks: dict[int | tuple[LayerGroup, ...], int] = {}
        """KV blocks that the sequence needs, by their size."""

    def begin(
        self, demand: Demand, learned: Learned, model: StepModel | None = None, everyone: Sequence[Worker] = ()
    ) -> None:
        """Forget the last decision."""
        self.demand, self.model, self.cached, self.blocks = demand, model, {}, {}
        if demand.prefix:
            self.cached = learned.prefixes.look_up(demand.prefix).cached_tokens_by_worker()
        busy: dict[tuple[str, str], int] = {}
        self.busy = busy
        for one in everyone:
            if one.device and one.outstanding.running:
                busy[one.device] = busy.get(one.device, 0) + 1


class WorkerView:
    """A worker as policies see it (`ridgeline.router.scheduler.features.WorkerState`)."""

    def __init__(self, worker: Worker, asked: _Asked) -> None:
        self.worker = worker
        self.worker_id = worker.worker_id
        self.takes_prompt = True
        self._asked = asked

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens sent there whose first token has not come back."""
        return self.worker.outstanding.prompt_tokens

    def has_most_of(self, demand: Demand) -> bool:
        """Return whether a prompt adds little there, as other sequences of one prompt do: short windows let it in."""
        cached_tokens = self.cached_tokens(RequestFeatures(demand.prompt_tokens, 0)) if demand.prefix else 0
        most_tokens = WINDOW_STEPS * self.step_tokens
        return 2 * cached_tokens > demand.prompt_tokens and self.worker.outstanding.prompt_tokens < most_tokens

    @property
    def running(self) -> int:
        """Sequences sent there that have not ended."""
        return self.worker.outstanding.running

    @property
    def decodes(self) -> int:
        """Sequences that it decodes, or will once their prompts are computed."""
        return self.worker.outstanding.decodes

    @property
    def context_tokens(self) -> int:
        """Tokens of their contexts."""
        return self.worker.outstanding.context_tokens

    @property
    def turns(self) -> int:
        """Workers of its device that have work, itself included."""
        device = self.worker.device
        if not device:
            return 1
        return max(1, self._asked.busy.get(device, 0) + (not self.worker.outstanding.running))

    @property
    def model(self) -> StepModel:
        """How long its steps take."""
        assert self._asked.model is not None
        return whole_model(self.worker, self._asked.model)

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step."""
        role = self.worker.role
        return role.max_num_batched_tokens if role else self.worker.description.max_model_len

    @property
    def prompts_s(self) -> float:
        """Seconds that the rest of its prompts adds to steps."""
        model = self.model
        tokens, attends = self.worker.prompts.left(model)
        return model.per_prefill_token_s * tokens + model.per_attended_token_s * attends

    def has_room(self, request: RequestFeatures) -> bool:
        """Return whether its batch and its KV blocks have room for the sequence."""
        blocks, layout = self._asked.blocks, self.worker.description.layout
        kind = layout.groups or layout.block_size
        if kind not in blocks:
            blocks[kind] = blocks_needed(self._asked.demand, layout)
        return self.worker.has_room(blocks[kind])

    def cached_tokens(self, request: RequestFeatures) -> int:
        """Return how many of the prompt's tokens it has, or will have once it has computed what it has."""
        prefix, known = self._asked.demand.prefix, self.worker.description
        if not prefix:
            return 0
        if prefix[-1] in self.worker.prompts.last_blocks:
            tokens = len(prefix) * known.prefix_block_tokens
        else:
            incarnation, tokens = self._asked.cached.get(known.worker_id, ("", 0))
            tokens = tokens if incarnation == known.incarnation else 0
        return min(tokens, request.prompt_tokens - 1)


def _able(views: list[WorkerView], demand: Demand) -> list[WorkerView]:
    """Return those that the router of the request reaches; if it reaches none, it finds that out itself: all.

    Of them, those that have its adapter and a place for it in their steps. One that would have to read the adapter from
    disk, which holds up its steps, is left out while others have it in memory, are about as busy and take the prompt.
    """
    if demand.avoided:
        views = [view for view in views if view.worker_id not in demand.avoided] or views
    if not (key := demand.adapter) or not views:
        return views
    views = [view for view in views if key in view.worker.adapters.loaded] or views
    views = [view for view in views if view.worker.adapters.has_place_for(key)] or views
    most = KEEPER_MAY_RUN * min(view.running for view in views) + KEEPER_MAY_RUN_MORE
    keepers = [view for view in views if view.running <= most and not view.worker.adapters.must_read(key)]
    return keepers if any(view.takes_prompt for view in keepers) else views


def short_window(worker: Worker, most_tokens: int) -> int:
    """Return as few prompt tokens as use a worker's steps well: those that are there cannot go by their SLOs."""
    model, role = worker.step_model, worker.role
    if model is None or not model.is_whole or role is None:
        return most_tokens
    return min(most_tokens, window_tokens(model, role.max_num_batched_tokens))


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


def best_source(
    demand: Demand, sink: Worker, cached_tokens: int, sources: Sequence[Worker], learned: Learned
) -> Reuse | None:
    """Return the worker from which `sink` fetches the beginning of a prompt, of which it has `cached_tokens` itself.

    None if to compute it takes no longer, or if nobody knows how long steps take.

    A later turn of a conversation begins with an answer that only the worker that decoded it has. To fetch that takes a
    question to its engine, which answers between two steps, and the transfer; to compute it takes what the step model
    says. All of this is estimated here: no number of tokens is worth it on every machine.
    """
    model, best, best_gain_s = sink.step_model, None, 0.0
    if model is None or not model.knows_prompts or not demand.prefix:
        return None
    known = learned.prefixes.look_up(demand.prefix)
    for source in sources:
        description, decodes = source.description, source.outstanding.decodes
        tokens = min(known.cached_tokens(source.worker_id, description.incarnation), demand.prompt_tokens - 1)
        tokens -= tokens % _whole_blocks_tokens(description.layout)
        if tokens <= cached_tokens or source.step_model is None:
            continue
        more_tokens = tokens - cached_tokens
        line_s = model.per_prefill_token_s + model.per_attended_token_s * (tokens + cached_tokens) / 2
        compute_s = more_tokens * line_s * model.correction(more_tokens)
        step_s = source.step_model.decode_s(decodes, source.outstanding.context_tokens) if decodes else 0.0
        num_bytes = _bytes_between(description.layout, cached_tokens, tokens)
        fetch_s = step_s + learned.fetch_s(source.worker_id, sink.worker_id, num_bytes)
        if compute_s - fetch_s > best_gain_s:
            best_gain_s = compute_s - fetch_s
            best = Reuse(source.worker_id, description.incarnation, tokens, compute_s)
    return best


def _whole_blocks_tokens(layout: KvLayout) -> int:
    """Return the tokens after which every group of layers has a whole block: caches have prefixes of such lengths."""
    return math.lcm(layout.block_size, *(group.block_size for group in layout.groups))


def _bytes_between(layout: KvLayout, cached_tokens: int, tokens: int) -> int:
    """Return the bytes of what a worker lacks; windows and states that it has from earlier tokens are of no use."""
    blocks = layout.blocks_of(tokens) - (0 if layout.groups else layout.blocks_of(cached_tokens))
    return blocks * layout.block_bytes * layout.num_layers * layout.tensor_parallel_size
