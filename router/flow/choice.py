"""Which workers a prompt gets when it is next: by score in the pure modes, by prediction in mode `adaptive`.

The rules are pure, in `ridgeline.router.fleet.policy` and `ridgeline.router.fleet.adaptive`; here the workers' state
becomes what these need.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from ridgeline.contracts.vocabulary import Pool
from ridgeline.contracts.workers import DECODE_STEP_MARGIN, TPOT_LIMIT_USED, StepModel
from ridgeline.router.fleet.adaptive import Decision, Wanted, choose
from ridgeline.router.fleet.corrections import Corrections
from ridgeline.router.fleet.policy import PROMPT_SCORERS, Demand, blocks_needed, pick
from ridgeline.router.fleet.prediction import Load, attended, idle_prompt_s, taking_turns, with_prompts
from ridgeline.router.fleet.prefixes import BlockHashes, Found
from ridgeline.router.fleet.shape import Workers
from ridgeline.router.fleet.short_list import short_list
from ridgeline.router.fleet.worker import Worker
from ridgeline.router.flow.learned import Learned
from ridgeline.router.flow.rates import FadingAmount

PROMPTS_WINDOW_S: Final = 10.0
"""Time constant with which the load by prompts follows the traffic."""


class Choice(msgspec.Struct, frozen=True):
    """The workers of a prompt whose turn it is."""

    worker: Worker
    decode_worker: Worker | None = None
    """The one that decodes, if another one does and has been chosen already."""
    decision: Decision | None = None


class Chooser(Protocol):
    """Chooses the workers of the prompt that is next."""

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker], *, urgent: bool) -> Choice | None:
        """Return the choice; None to wait for a worker that has no room now, which only an `urgent` prompt never does.

        `waited_s` is the time since the request's arrival; `roomy` are the workers that would take a prompt now, at
        least one.
        """
        ...

    def least_s(self, demand: Demand) -> float | None:
        """Return the seconds that a prompt takes at least; None if prompts do not go by their limits on TTFT."""
        ...


class _Now(msgspec.Struct, frozen=True):
    """What is the same for all workers while a prompt's are chosen."""

    model: StepModel
    """For workers that have none of their own yet, or none that has seen both prompts and decoding."""
    open_workers: set[Worker]
    needed_blocks: int
    left_tokens: float
    """See `Load`."""
    found: Found
    """The workers that have any of the prompt."""
    corrections: Corrections


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


class ByPrediction:
    """Chooses by what is predicted for each worker, and by score until steps of prompts and of decoding are known."""

    def __init__(
        self,
        pool: Pool,
        workers: Callable[[], Sequence[Worker]],
        learned: Learned,
        min_remote_prefill_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep what choices are made from.

        `workers` returns those of the pool, each of which may get any part of a request; one with a shorter prompt than
        `min_remote_prefill_tokens` goes whole to one of them.
        """
        self._workers = workers
        self._min_remote_prefill_tokens = min_remote_prefill_tokens
        self._learned = learned
        self._by_score = ByScore(pool)
        self._clock = clock
        self._prompts_s = FadingAmount(clock, PROMPTS_WINDOW_S)
        """Seconds that prompts take that were placed lately."""
        self._any_favours = False
        """Whether a worker was told last time that it favours a phase."""
        self._role_number: int | None = None
        """The change of mode that gave the workers their roles when a prompt was placed last."""

    def choose(self, demand: Demand, waited_s: float, roomy: Sequence[Worker], *, urgent: bool) -> Choice | None:
        """Return the best workers, or None if the one for the prompt has no room now."""
        workers = self._workers()
        model = _any_model(workers)
        if model is None:
            return self._by_score.choose(demand, waited_s, roomy, urgent=urgent)
        open_workers, avoided = set(roomy), demand.avoided
        takes_work = [one for one in workers if one in open_workers or (not urgent and one.takes_work)]
        reached = [one for one in takes_work if one.worker_id not in avoided] if avoided else takes_work
        now = _Now(
            model=model,
            open_workers=open_workers,
            needed_blocks=blocks_needed(demand, roomy[0].description.block_size_tokens),
            left_tokens=self._learned.sure_tokens(0) / 2,
            found=self._learned.prefixes.look_up(demand.prefix),
            corrections=self._learned.corrections,
        )
        holders = partial(_holders, reached, demand.prefix, now.found)
        looked_at = short_list(reached, demand.prompt_tokens, now.needed_blocks, open_workers, holders)
        sharers = _sharers(looked_at, workers)
        loads = [_load(worker, now, demand, sharers.get(worker, ())) for worker in looked_at]
        by_id = {worker.worker_id: worker for worker in looked_at}
        bytes_per_token, bytes_per_s = _kv_bytes_per_token(roomy[0]), self._learned.bytes_per_s

        def handover_s(source: Load, sink: Load) -> float:
            moved_bytes = (demand.prompt_tokens - sink.cached_tokens) * bytes_per_token
            return moved_bytes / bytes_per_s(source.worker_id, sink.worker_id)

        wanted = self._wanted(demand, waited_s, len(looked_at) / len(takes_work))
        decision = choose(wanted, loads, handover_s)
        if decision is None:
            return self._by_score.choose(demand, waited_s, roomy, urgent=urgent)
        chosen = decision.chosen
        worker = by_id[chosen.prompt_worker]
        if worker not in open_workers:
            return None
        if not urgent:
            prompt_tokens, cached_tokens = wanted.prompt_tokens, chosen.cached_tokens
            attends = attended(prompt_tokens, cached_tokens)
            self._prompts_s.add(model.step_s(prompt_tokens - cached_tokens, 0, 0, attends))
            self._rebalance(workers, wanted, model, cached_tokens)
        decode = by_id[chosen.decode_worker] if chosen.splits else None
        return Choice(worker, decode, decision)

    def _rebalance(self, workers: Sequence[Worker], wanted: Wanted, model: StepModel, cached_tokens: int) -> None:
        """Count a prompt that is placed, and have workers favour from now on the phases that the rebalancer says."""
        role_number = workers[0].role.number if workers[0].role else None
        if self._role_number not in (None, role_number):  # another mode was in between, with other traffic perhaps
            self._learned.forget_traffic()
            self._any_favours = False
        self._role_number = role_number
        rebalancer, now_s = self._learned.rebalancer, self._clock()
        least_ttft_s = idle_prompt_s(model, wanted.prompt_tokens)
        least_tpot_s = model.decode_s(1, wanted.context_tokens)
        within_reach = replace(
            wanted,
            ttft_limit_s=max(wanted.ttft_limit_s, least_ttft_s),
            tpot_limit_s=max(wanted.tpot_limit_s, least_tpot_s),
        )
        rebalancer.placed(within_reach, now_s, cached_tokens)
        is_due = rebalancer.due(now_s)
        if not (is_due or rebalancer.divides or self._any_favours):
            return
        workers = [worker for worker in workers if not worker.leaves]
        if is_due and (alike := _alike(workers, self._learned)) is not None:
            rebalancer.read(now_s, alike)
        if rebalancer.prefill_workers(len(workers)) or self._any_favours:
            favours = rebalancer.favours([worker.worker_id for worker in workers])
            for worker in workers:
                worker.outstanding.favours = favours.get(worker.worker_id)
            self._any_favours = bool(favours)

    def least_s(self, demand: Demand) -> float | None:
        """Return the seconds of the prompt alone on an idle worker; 0 while no model is known."""
        model = _any_model(self._workers())
        return idle_prompt_s(model, demand.prompt_tokens) if model else 0.0

    def _wanted(self, demand: Demand, waited_s: float, part_of_workers: float) -> Wanted:
        return Wanted(
            prompt_tokens=demand.prompt_tokens,
            output_tokens=self._learned.output_tokens(demand.output_tokens),
            sure_tokens=self._learned.sure_tokens(demand.output_tokens),
            ttft_limit_s=demand.ttft_limit_s,
            tpot_limit_s=demand.tpot_limit_s,
            waited_s=waited_s,
            may_split=demand.prompt_tokens >= self._min_remote_prefill_tokens,
            prompt_load=part_of_workers * self._prompts_s.per_s,
        )


def _any_model(workers: Sequence[Worker]) -> StepModel | None:
    """Return a model that has seen prompts and decoding, put together of two workers' if no worker has seen both."""
    known: list[StepModel] = []
    for worker in workers:
        if (model := worker.step_model) is not None:
            if model.is_whole:
                return model
            known.append(model)
    return known[0].completed_by(known) if known else None


def _whole_model(worker: Worker, whole: StepModel) -> StepModel:
    """Return the model of a worker's steps, with what it has not seen as `whole` has it."""
    own = worker.step_model
    if own is None:
        return whole
    return own if own.is_whole else own.completed_by([whole]) or whole


def _alike(workers: Sequence[Worker], learned: Learned) -> Workers | None:
    """Return what the workers have in common, with the step model of one that has decoded.

    None if none has, or if some share a device: a division is estimated for workers that each have one.
    """
    if _sharers(workers, workers):
        return None
    by_decoding = sorted(workers, key=lambda one: one.favours == "prefill")
    whole = _any_model(by_decoding)
    if whole is None:
        return None
    for worker in by_decoding:
        known, model = worker.description, _whole_model(worker, whole)
        if worker.step_model is not None and model.per_sequence_s + model.per_context_token_s > 0.0:
            return Workers(
                model=model,
                number=len(workers),
                step_tokens=worker.role.max_num_batched_tokens if worker.role else known.max_model_len_tokens,
                places=worker.max_num_seqs,
                kv_tokens=known.num_kv_blocks * known.block_size_tokens,
                handover_s_per_token=_kv_bytes_per_token(worker) / learned.mean_bytes_per_s,
            )
    return None


def _kv_bytes_per_token(worker: Worker) -> float:
    layout = worker.description.layout
    return layout.block_bytes * layout.num_layers * layout.tensor_parallel_size / layout.block_size_tokens


def _holders(
    workers: Sequence[Worker], prefix: BlockHashes, found: Found, enough: Set[Worker]
) -> Iterator[Sequence[Worker]]:
    """Yield the workers by how much of the prompt they have, those that compute it now first.

    It ends when one of `enough` has as much.
    """
    if not prefix:
        return
    last_block = prefix[-1]
    yield [worker for worker in workers if last_block in worker.last_blocks]
    by_id: dict[str, Worker] = {}
    for worker_ids in found.groups(worker.worker_id for worker in enough):
        by_id = by_id or {worker.worker_id: worker for worker in workers}
        yield [by_id[worker_id] for worker_id in worker_ids if worker_id in by_id]


def _prefix_on(worker: Worker, found: Found, demand: Demand) -> tuple[bool, int]:
    """Return whether it computes the same prompt now, and how many of its tokens it has, or will have then."""
    known, prefix = worker.description, demand.prefix
    shares = prefix[-1] in worker.last_blocks
    if shares:
        tokens = len(prefix) * known.block_size_tokens
    else:
        tokens = found.cached_tokens(known.worker_id, known.incarnation)
    return shares, min(tokens, demand.prompt_tokens - 1)


def _load(worker: Worker, now: _Now, demand: Demand, sharers: Sequence[Worker] = ()) -> Load:
    """Return what predictions need of a worker that takes turns with these."""
    counted, role, model = worker.outstanding, worker.role, _whole_model(worker, now.model)
    shares, cached_tokens = _prefix_on(worker, now.found, demand) if demand.prefix else (False, 0)
    idle = Load(
        worker_id=worker.worker_id,
        model=model,
        step_tokens=role.max_num_batched_tokens if role else worker.description.max_model_len_tokens,
        decoding=counted.decoding,
        decodes=counted.decodes,
        context_tokens=counted.context_tokens,
        left_tokens=now.left_tokens,
        tpot_limit_s=worker.tpot_limit_s(DECODE_STEP_MARGIN * model.decode_s(1, 0) / TPOT_LIMIT_USED),
        step_target_s=model.planned_s(role.step_target_s) if role and role.step_target_s else math.inf,
        takes_prompt=worker in now.open_workers,
        room=worker.has_room(now.needed_blocks),
        cached_tokens=cached_tokens,
        shares=shares,
        favours=counted.favours,
        slower=now.corrections.ratio(worker.worker_id, beside=counted.decoding > 0),
        outside_s=now.corrections.outside_s(beside=counted.decoding > 0),
    )
    others = [_load(other, now, demand) for other in sharers]
    return with_prompts(taking_turns(idle, others), *worker.prompts_ahead())


def _sharers(looked_at: Sequence[Worker], workers: Sequence[Worker]) -> Mapping[Worker, list[Worker]]:
    """Return for some of the workers the others that take turns with them on one device, if any do."""
    on_device: dict[tuple[str, str], list[Worker]] = {one.device: [] for one in looked_at if one.device is not None}
    if on_device:
        for worker in workers:
            if worker.device in on_device:
                on_device[worker.device].append(worker)
    together = [(one, on_device[one.device]) for one in looked_at if one.device is not None]
    return {one: [other for other in them if other is not one] for one, them in together if len(them) > 1}
