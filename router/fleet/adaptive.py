"""The policy of mode `adaptive`: predict, then choose. A pure function of what a request asks for and of the workers.

An option says which worker computes the prompt and which one decodes; they may be the same. For each one it is
predicted (`router.fleet.prediction`) what the request would see, whom else it would take beyond their limits, and how
much work it would add. The choice is, in this order:

1. the option that breaks the fewest limits, its own and those of sequences that are there already;
2. of those, one that adds about the least work, in seconds of any worker: what is scarce is kept for others;
3. of those, the one with the least latency, its own and what it adds to others'.

Without limits nothing is broken, and only the third rule counts: the mean latency is kept low.

`router.flow.prompt_queue` asks when a prompt is next; the choice may be to wait for a worker that is busy now.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import nsmallest

import msgspec

from router.fleet.prediction import Load, attended, compute_s, prompt_s, step_s, tpot_s

ABOUT = 1.1
"""Options whose work is within this factor of the least are about equal."""
KEPT_TTFT = 0.9
"""The part of a TTFT limit that may be used by prediction, since predictions err."""
CONSIDERED = 3
"""Workers that are considered for each half of a request that is split."""
SHORT_LIST = 3
"""In a large fleet, workers that are looked at by each of three rules of thumb."""


HandoverS = Callable[[str, str], float]
"""Returns the seconds that it takes to move the prompt's KV from one worker to another."""


class Wanted(msgspec.Struct, frozen=True):
    """A request for which workers are to be chosen."""

    prompt_tokens: int
    output_tokens: float
    """Expected length of its answer."""
    ttft_limit_s: float = math.inf
    tpot_limit_s: float = math.inf
    waited_s: float = 0.0
    """Time since it arrived."""

    @property
    def limited(self) -> bool:
        """Whether it has any limit."""
        return math.isfinite(self.ttft_limit_s) or math.isfinite(self.tpot_limit_s)


class Option(msgspec.Struct, frozen=True):
    """A way to serve a request, and what is predicted for it."""

    prompt_worker: str
    decode_worker: str
    ttft_s: float
    """From the request's arrival."""
    tpot_s: float
    broken: int
    """Limits that it breaks: of its own, one for TTFT and one for TPOT; of others, one for each sequence."""
    work_s: float
    """Seconds of any worker that it adds."""
    latency_s: float
    """Its whole latency, and what it adds to the latencies of others."""

    @property
    def splits(self) -> bool:
        """Whether two workers share the request."""
        return self.prompt_worker != self.decode_worker


class Decision(msgspec.Struct, frozen=True):
    """What was chosen, why, and what else there was."""

    chosen: Option
    reason: str
    """`within_limits`, `fewest_broken` (none keeps all limits) or `least_latency` (there are no limits)."""
    others: tuple[Option, ...] = ()
    """The best other options, best first."""


def choose(wanted: Wanted, loads: Sequence[Load], handover_s: HandoverS) -> Decision | None:
    """Return the best option; None without any worker.

    A worker without room for the sequence does not decode it, unless none has room.
    """
    views = [_view(wanted, load) for load in _short_list(loads)]
    fits = [view for view in views if view.load.room] or views
    if not fits:
        return None
    options = [_option(wanted, view, view, 0.0) for view in fits]
    for prompt in sorted(views, key=lambda view: (view.late, view.ttft_s))[:CONSIDERED]:
        for decode in sorted(fits, key=lambda view: (view.breaks, view.decode_s, view.load.decodes))[:CONSIDERED]:
            if prompt is not decode:
                gap_s = handover_s(prompt.load.worker_id, decode.load.worker_id) + decode.step_s / 2
                options.append(_option(wanted, prompt, decode, gap_s))
    return _best(wanted, options)


def _short_list(loads: Sequence[Load]) -> Sequence[Load]:
    """Return the workers worth a prediction: those with the fewest prompts, the most of this one, and the fewest
    answers of those that have any, which cost the least more."""
    if len(loads) <= 3 * SHORT_LIST:
        return loads
    prompts = nsmallest(SHORT_LIST, loads, key=lambda load: (load.prompt_tokens, load.decodes))
    cached = nsmallest(SHORT_LIST, (load for load in loads if load.cached_tokens), key=lambda load: -load.cached_tokens)
    fits = [load for load in loads if load.room]
    decodes = nsmallest(SHORT_LIST, fits, key=lambda load: (not load.decodes, load.decodes))
    return list({load.worker_id: load for load in (*prompts, *cached, *decodes)}.values())


def _best(wanted: Wanted, options: list[Option]) -> Decision:
    fewest = min(option.broken for option in options)
    best = [option for option in options if option.broken == fewest]
    if wanted.limited:
        about_s = ABOUT * min(option.work_s for option in best)
        best = [option for option in best if option.work_s <= about_s]
    chosen = min(best, key=lambda option: option.latency_s)
    reason = ("fewest_broken" if fewest else "within_limits") if wanted.limited else "least_latency"
    others = nsmallest(
        CONSIDERED, (one for one in options if one is not chosen), key=lambda one: (one.broken, one.latency_s)
    )
    return Decision(chosen, reason, tuple(others))


class _View(msgspec.Struct):
    """A worker with what is predicted for either half of the request there."""

    load: Load
    took_s: float
    """Until the prompt is computed."""
    ttft_s: float
    late: bool
    """Whether that is beyond the limit."""
    computes_s: float
    """What the prompt adds to the steps there."""
    begins_s: float
    """What steps take that would not be without the prompt."""
    step_s: float
    """A step of what decodes there or will."""
    longer_step_s: float
    """A step with this sequence too."""
    decode_s: float
    """What the answer adds to the worker's time: whole steps where nothing else decodes."""
    breaks: int
    """Sequences whose steps the answer makes too long, itself included."""


def _view(wanted: Wanted, load: Load) -> _View:
    tokens = wanted.prompt_tokens - load.cached_tokens
    attends = attended(wanted.prompt_tokens, load.cached_tokens)
    took_s = prompt_s(load, tokens, attends)
    ttft_s = wanted.waited_s + took_s
    before_s, after_s = step_s(load), step_s(load, 1, _context(wanted))
    others = load.decodes if after_s > load.tpot_limit_s >= before_s else 0
    return _View(
        load=load,
        took_s=took_s,
        ttft_s=ttft_s,
        late=ttft_s > KEPT_TTFT * wanted.ttft_limit_s,
        computes_s=compute_s(load, tokens, attends),
        begins_s=0.0 if load.decoding else math.ceil(tokens / load.step_tokens) * load.model.base_s,
        step_s=before_s,
        longer_step_s=after_s,
        decode_s=wanted.output_tokens * max(0.0, after_s - before_s),
        breaks=others + (after_s > wanted.tpot_limit_s),
    )


def _context(wanted: Wanted) -> float:
    """Return the mean context of the sequence while it decodes."""
    return wanted.prompt_tokens + wanted.output_tokens / 2


def _option(wanted: Wanted, prompt: _View, decode: _View, gap_s: float) -> Option:
    """Predict one option; `gap_s` is what a hand-over adds between the first two tokens."""
    after_prompts_s = tpot_s(decode.load, _context(wanted), wanted.output_tokens, prompt.took_s)
    per_token_s = after_prompts_s + gap_s / max(1.0, wanted.output_tokens - 1)
    too_slow = per_token_s > wanted.tpot_limit_s >= decode.longer_step_s  # by the hand-over, or prompts beside it
    delays_s = prompt.load.decoding * prompt.computes_s + decode.load.decodes * decode.decode_s
    return Option(
        prompt_worker=prompt.load.worker_id,
        decode_worker=decode.load.worker_id,
        ttft_s=prompt.ttft_s,
        tpot_s=per_token_s,
        broken=decode.breaks + prompt.late + too_slow,
        work_s=prompt.computes_s + prompt.begins_s + decode.decode_s + gap_s,
        latency_s=prompt.ttft_s + wanted.output_tokens * per_token_s + delays_s,
    )
