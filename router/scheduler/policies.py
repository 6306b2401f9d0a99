"""Policies: which worker computes a prompt, and which one decodes. `Policy` is the plug-in point.

A policy is a pure function of the request and of the workers. Entry points of the group `ridgeline.policies` add more;
`examples/routing_policy.py` has one. `make_policy` makes one by its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from importlib.metadata import entry_points
from itertools import chain, islice
from typing import Final, Protocol

import msgspec

from ridgeline.contracts.workers import (
    DECODE_STEP_MARGIN,
    FUTURE_SLACK_USED,
    LEAST_PROMPT_SHARE,
    LOST_LIMITS,
    TPOT_LIMIT_USED,
)
from ridgeline.router.scheduler.features import Assignment, RequestFeatures, WorkerState

IN_TIME: Final = (0.95, 1.1)
"""The predicted share of an SLO up to which it counts as met, and from which it counts as missed; linear between.

A tenth is the error of step models that is tolerated (`ridgeline.decode_worker.pacing.model`)."""
SHORTLIST: Final = 2
"""Workers that are considered for each half of a request: the best by a simple rank, and one to compare it with."""


NEARER_MAY_RUN: Final = 0.1
"""A nearer decode worker is preferred while it runs at most this fraction more sequences than a farther one, for each
step of distance: KV travels through memory or one switch, and each further sequence slows a decode step by less."""


class Policy(Protocol):
    """Chooses the workers of one request. One that divides the workers has a `shape` (`Shape`) as well."""

    @property
    def paced(self) -> bool:
        """Whether engines bound their steps by the TPOT SLO of the request."""
        ...

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return the workers; None: wait until one has room. `workers` are those that take work, at least one."""
        ...


def by_prompts(request: RequestFeatures, worker: WorkerState) -> tuple[float, ...]:
    """Rank by prompt tokens: those ahead of it, and twice its own that are not cached.

    Its own delay this request, and whatever comes after it. Those that no worker has cached are left out of the sum.
    """
    return (worker.prompt_tokens - 2 * worker.cached_tokens(request), worker.running)


def by_sequences(request: RequestFeatures, worker: WorkerState) -> tuple[float, ...]:
    """Rank by sequences, since each costs a decode step about the same; a worker without room comes last."""
    return (not worker.has_room(request), worker.decodes, worker.context_tokens)


def by_work(request: RequestFeatures, worker: WorkerState, fewest_decodes: int) -> tuple[float, ...]:
    """Rank as `by_prompts`; but cached tokens count less where more sequences decode than `fewest_decodes`.

    Each of these slows every decode step of the request by about the compute of one token. Without that, a worker with
    the system prompt of all requests would get all of them, and the others nothing to decode.
    """
    slower_tokens = (worker.decodes - fewest_decodes) * request.output_tokens
    saved_tokens = max(0.0, 2 * worker.cached_tokens(request) - slower_tokens)
    return (worker.prompt_tokens - saved_tokens, worker.running, worker.context_tokens)


def by_nearness(request: RequestFeatures, worker: WorkerState, distance: int) -> tuple[float, ...]:
    """Rank as `by_sequences`, but a nearer worker may run `NEARER_MAY_RUN` more, and of equals cached tokens decide.

    What is cached need not be fetched, which takes less time than a further sequence costs.
    """
    has_no_room, decodes, context_tokens = by_sequences(request, worker)
    sequences = decodes * (1 + NEARER_MAY_RUN * distance) + distance / 4
    return (has_no_room, sequences, -worker.cached_tokens(request), context_tokens)


class Colocated:
    """One worker does all of a request: the one with the fewest prompt tokens to compute."""

    def __init__(self, *, paced: bool = False) -> None:
        self.paced = paced

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return the worker with the least prompts, then with the fewest sequences."""
        accepting = [worker for worker in workers if worker.takes_prompt]
        if not accepting:
            return None
        worker = min(accepting, key=lambda one: by_prompts(request, one)).worker_id
        return Assignment(worker, worker, "fewest_prompt_tokens", self.paced)


class Shape:
    """Which workers are for prompts: a part of them, one at least, and never all."""

    def __init__(self, prefill_part: float) -> None:
        """Raise ValueError if it is not a part."""
        if not 0.0 < prefill_part < 1.0:
            raise ValueError(f"prefill_part is {prefill_part}, which is not between 0 and 1")
        self.prefill_part = prefill_part

    def prefill_workers(self, workers: int) -> int:
        """Return how many of the first workers are for prompts; 0 if one has to do all."""
        return min(workers - 1, max(1, round(self.prefill_part * workers))) if workers > 1 else 0


def shape_of(policy: Policy) -> Shape | None:
    """Return the division of the workers by which a policy goes; None: any worker does any part of a request."""
    shape = getattr(policy, "shape", None)
    return shape if isinstance(shape, Shape) else None


class Disaggregated:
    """The first workers compute prompts, the others decode."""

    paced = False

    def __init__(self, prefill_part: float = 0.5) -> None:
        self.shape = Shape(prefill_part)

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return the prefill worker with the least prompts, and the decode worker with the fewest sequences."""
        number = self.shape.prefill_workers(len(workers))
        sink = min(workers[number:], key=lambda one: by_sequences(request, one))
        accepting = [worker for worker in workers[:number] or workers if worker.takes_prompt]
        if not accepting:
            return None
        source = min(accepting, key=lambda one: by_prompts(request, one))
        if not request.may_split:
            return _one_worker(sink, "short_prompt", paced=self.paced)
        return Assignment(source.worker_id, sink.worker_id, "in_shape", self.paced)


class Threshold:
    """Splits a request only if more than `split_above_tokens` of its prompt are not cached where it would decode."""

    paced = False

    def __init__(self, split_above_tokens: int, prefill_part: float = 0.5) -> None:
        self._disaggregated = Disaggregated(prefill_part)
        self.shape = self._disaggregated.shape
        self.split_above_tokens = split_above_tokens

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return one worker that decodes for a short prompt, else a worker for each half."""
        decode = workers[self.shape.prefill_workers(len(workers)) :]
        here = min(decode, key=lambda one: by_sequences(request, one))
        if request.prompt_tokens - here.cached_tokens(request) > self.split_above_tokens:
            return self._disaggregated.assign(request, workers)
        return _one_worker(here, "short_prompt", paced=self.paced)


class Slack:
    """Prefers the workers of a shape, and leaves it where that would miss an SLO and another choice would not.

    The first workers are for prompts and the others for decode. Engines compute prompts in the slack that the TPOT SLOs
    of their sequences leave.
    """

    paced = True

    def __init__(self, prefill_part: float = 0.5) -> None:
        self.shape = Shape(prefill_part)

    def assign(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Assignment | None:
        """Return the choice with the fewest SLOs missed, then one of the shape, then the one with the least latency."""
        best = min(self._choices(request, workers), key=lambda choice: choice.rank)
        if not best.source.worker.takes_prompt:
            return None
        return Assignment(
            best.source.worker.worker_id,
            best.sink.worker.worker_id,
            "in_shape" if best.fits_shape else "to_meet_slo",
            self.paced,
        )

    def _choices(self, request: RequestFeatures, workers: Sequence[WorkerState]) -> Iterator[_Choice]:
        """Yield choices of a short list: the workers with the fewest prompt tokens and with the fewest sequences."""
        number = self.shape.prefill_workers(len(workers))
        by_place = range(len(workers))
        prompts = [by_prompts(request, worker) for worker in workers].__getitem__
        first, prefill = (nsmallest(SHORTLIST, places, prompts) for places in (by_place, by_place[:number]))
        fewest = sorted(by_place, key=lambda place: (workers[place].decodes, workers[place].context_tokens))
        second = _roomiest(request, workers, fewest)
        decode = _roomiest(request, workers, [place for place in fewest if place >= number]) if number else []
        shaped = _pairs(prefill, decode)
        estimates = {place: _Estimate(request, workers[place]) for place in {*first, *second, *chain(*shaped)}}
        for estimate in estimates.values():
            yield _Choice(estimate, estimate, fits_shape=not number)
        if not request.may_split:
            return
        for source, sink in shaped:
            yield _Choice(estimates[source], estimates[sink], fits_shape=True)
        for source, sink in {*_pairs(first, second)} - {*shaped}:
            yield _Choice(estimates[source], estimates[sink], fits_shape=False)


def predicted(
    assigned: Assignment, request: RequestFeatures, prompt: WorkerState, decode: WorkerState, overhead_s: float
) -> Assignment:
    """Return an assignment with what is predicted for the request there; `overhead_s` pass outside of engines."""
    source = _Estimate(request, prompt)
    return msgspec.structs.replace(
        assigned,
        request=request,
        ttft_s=source.ttft_s + overhead_s,
        tpot_s=(source if decode is prompt else _Estimate(request, decode)).token_s,
        cached_tokens=prompt.cached_tokens(request),
    )


def _one_worker(worker: WorkerState, reason: str, *, paced: bool) -> Assignment | None:
    return Assignment(worker.worker_id, worker.worker_id, reason, paced) if worker.takes_prompt else None


class _Estimate:
    """What a worker would make of either half of a request."""

    def __init__(self, request: RequestFeatures, worker: WorkerState) -> None:
        self.request, self.worker = request, worker
        model = worker.model if worker.turns == 1 else worker.model.times(worker.turns)
        self.model, decodes = model, worker.decodes
        per_step = model.made_per_sequence
        self.token_before_s = model.decode_s(decodes, worker.context_tokens) / per_step if decodes else 0.0
        self.token_s = model.decode_s(decodes + 1, worker.context_tokens + request.context_tokens) / per_step
        tokens = request.prompt_tokens - worker.cached_tokens(request)
        attends = tokens * (2 * request.prompt_tokens - tokens) / 2
        self.prompt_s = model.per_prefill_token_s * tokens + model.per_attended_token_s * attends
        self.ttft_s = request.waited_s + self._until_computed_s(tokens)

    def _until_computed_s(self, tokens: int) -> float:
        """Return the seconds until the prompt is computed.

        That is the work ahead of it and its own, in the part of each step that what decodes there leaves to prompts.
        """
        worker, per_step = self.worker, self.model.made_per_sequence
        alone_s = self.token_before_s * per_step
        k = self.model.correction(min(tokens, worker.step_tokens) + worker.decodes * self.model.computed_per_sequence)
        work_s = k * (worker.turns * worker.prompts_s + self.prompt_s)
        steps = math.ceil((worker.prompt_tokens + tokens) / worker.step_tokens)
        if not alone_s:
            return work_s + steps * k * self.model.base_s
        slo_s = TPOT_LIMIT_USED * self.request.tpot_slo_s * per_step
        if slo_s == math.inf:
            return work_s + steps * alone_s
        bare_s = DECODE_STEP_MARGIN * alone_s
        step_s = LOST_LIMITS * alone_s if bare_s > slo_s else slo_s + FUTURE_SLACK_USED * (slo_s - bare_s)
        part = max(LEAST_PROMPT_SHARE, 1.0 - alone_s / step_s)
        return max(work_s / part, work_s + alone_s)


class _Choice:
    """Two workers, and by what they are ranked."""

    def __init__(self, source: _Estimate, sink: _Estimate, *, fits_shape: bool) -> None:
        self.source, self.sink, self.fits_shape = source, sink, fits_shape
        request, sequences = sink.request, sink.worker.decodes
        tpot_slo_s = request.tpot_slo_s
        missed = _missed(source.ttft_s / request.ttft_slo_s) + (own := _missed(sink.token_s / tpot_slo_s))
        delay_s = sequences * (sink.token_s - (sink.token_before_s or sink.token_s)) * request.output_tokens / 2
        if sequences:  # half of their tokens, on average, are still to come
            missed += sequences / 2 * (own - _missed(sink.token_before_s / tpot_slo_s))
        waits_s = 0.0 if source.worker.takes_prompt else source.ttft_s
        latency_s = source.ttft_s + (request.output_tokens - 1) * sink.token_s + delay_s + waits_s
        latency_s += source.worker.decodes * source.prompt_s
        self.rank = (not sink.worker.has_room(request), round(missed, 1), not fits_shape, latency_s)


def _roomiest(request: RequestFeatures, workers: Sequence[WorkerState], fewest: Sequence[int]) -> list[int]:
    """Return the first workers with room, in the order of their sequences; if none has room, the first ones."""
    return [*islice((place for place in fewest if workers[place].has_room(request)), SHORTLIST)] or [
        *fewest[:SHORTLIST]
    ]


def _pairs(sources: Sequence[int], sinks: Sequence[int]) -> list[tuple[int, int]]:
    return [(source, sink) for source in sources for sink in sinks if source != sink]


def _missed(part: float) -> float:
    """Return how likely an SLO is missed of which a prediction takes this part."""
    met, missed = IN_TIME
    return min(1.0, max(0.0, (part - met) / (missed - met)))


GROUP: Final = "ridgeline.policies"
"""The group of entry points. Each names a class, or a function that returns a `Policy`."""
ADAPTIVE: Final = "adaptive"
"""Not a policy, but the choice among policies by simulation (`ridgeline.router.scheduler.adaptive`)."""
BUILT_IN: Final[Mapping[str, Callable[..., Policy]]] = {
    "colocated": Colocated,
    "colocated, paced": partial(Colocated, paced=True),
    "disaggregated": Disaggregated,
    "threshold": Threshold,
    "slack": Slack,
}
_DIVISION = re.compile(r"([1-9]\d*) of ([1-9]\d*) for prefill(, slack)?")


def division_name(prefill_workers: int, workers: int, *, slack: bool = False) -> str:
    """Return the name of the policy by which so many workers compute prompts, with exceptions (`Slack`) or without."""
    return f"{prefill_workers} of {workers} for prefill" + ", slack" * slack


def policy_names() -> list[str]:
    """Return the names of all policies that are installed here."""
    return sorted({*BUILT_IN, *entry_points(group=GROUP).names})


def make_policy(name: str, options: Mapping[str, object]) -> Policy:
    """Return a policy made with these options. Raises ValueError for one that is not there, or cannot be made."""
    maker = BUILT_IN.get(name) or _division(name) or _installed(name)
    try:
        made = maker(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"policy {name!r} cannot be made with the options {dict(options)}: {error}") from error
    if not callable(getattr(made, "assign", None)) or not isinstance(getattr(made, "paced", None), bool):
        raise ValueError(
            f"policy {name!r} has no `assign` or no `paced`: see ridgeline.router.scheduler.policies.Policy"
        )
    return made


def _division(name: str) -> Callable[..., Policy] | None:
    found = _DIVISION.fullmatch(name)
    if found is None:
        return None
    return partial(Slack if found[3] else Disaggregated, int(found[1]) / int(found[2]))


def _installed(name: str) -> Callable[..., Policy]:
    for found in entry_points(group=GROUP, name=name):
        try:
            loaded: Callable[..., Policy] = found.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"policy {name!r} ({found.value}) cannot be imported: {error}") from error
        return loaded
    raise ValueError(f"there is no policy {name!r} here: choose {ADAPTIVE} or one of {', '.join(policy_names())}")
