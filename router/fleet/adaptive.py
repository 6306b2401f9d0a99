"""The policy of mode `adaptive`: predict, then choose. A pure function of what a request asks for and of the workers.

An option says which worker computes the prompt and which one decodes; they may be the same. For each one it is
predicted (`ridgeline.router.fleet.prediction`) what the request would see, whom else it would take beyond their limits,
and how much of the workers' time it would take. The choice is the option that loses the fewest requests:

    lost = limits that it is likely to break, its own and others' + work / least work of all options - 1
           + `OVERDUE` for each limit on TTFT by which its first token comes too late

since one that takes twice the time that it must takes the time of another request. Of options that lose about the same,
the one with the least latency is chosen, its own and what it adds to others'. If its worker has enough prompts for now,
its time to first token counts twice, since those behind it wait too while another worker has room.

Without limits nothing is broken, and only latency counts: its mean is kept low. What is known of one request does not
suffice for that: an answer that is decoded where there are fewer than anywhere else is made slower by the prompts to
come, since that is where they will be computed, and it makes them slower. `BESIDE_PROMPTS` counts that.

Some workers may favour a phase (`ridgeline.router.fleet.rebalance`). To use one against its favour counts as `AGAINST`
lost requests: it is done to save more than one. A worker that favours decode has nothing better to do with its steps,
so an answer there costs what it adds to them, and answers are spread instead of gathered.

`ridgeline.router.flow.choice` asks when a prompt is next; the answer may be a worker that has no room for a prompt yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.contracts.workers import TPOT_LIMIT_USED
from ridgeline.router.fleet.prediction import (
    Asked,
    Load,
    attended,
    compute_s,
    joined_step_s,
    later,
    prompt_s,
    step_s,
    tpot_s,
)

ABOUT = 0.1
"""Options that lose only this much more than the best one are about equal to it."""
TTFT_MISSED = (0.95, 1.1)
"""Below the first of these parts of a limit on TTFT it is certain to be kept, above the second to be missed, and in
between as likely as it is near: predictions err."""
OVERDUE = 0.25
"""What each limit on TTFT counts by which a first token comes too late, in requests lost. A prompt that cannot be in
time would otherwise go where it is computed a few tokens at a time for a minute, since that takes the least work; there
it makes the steps of all others as long as they may be."""
MOST_OVERDUE = 4.0
"""More limits than this count no more."""
TPOT_MISSED = 1.2
"""The same for TPOT, where it is certain to be kept up to the limit itself, or beyond it by `TPOT_SLACK`."""
TPOT_SLACK = 0.1
"""The part of a limit by which a prediction for an answer of `LONG_ANSWER_TOKENS` may exceed it: sequences end before
the answer does, and those that take their places are chosen with the limit in view. For shorter answers it is less."""
LONG_ANSWER_TOKENS = 50
CROWDED = (1.1, 1.35)
"""The longest step that keeps the limits of a worker's sequences, over one without prompts. From the second of these
down to the first, a prompt beside them is more and more likely to make them miss their limits: what steps take longer
than predicted cannot be made up for."""
CONSIDERED = 2
"""Workers that are considered for each half of a request that is split."""
AGAINST = 1.0
"""What it counts to use a worker for the phase that it does not favour, in requests lost: as much as one that it saves,
since it makes others late that come after. Without limits each such use counts like the request's latency once more."""

BESIDE_PROMPTS = 2.0
"""How many times the prompts count, without limits, that are expected to be computed beside an answer: more than once,
since they wait for it too, and so does what comes after them. Chosen by simulation (`tools.bench.simulated_modes`)."""

HandoverS = Callable[[Load, Load], float]
"""Returns the seconds that it takes to move the prompt's KV from one worker to another."""


class Wanted(Asked, frozen=True):
    """A request for which workers are to be chosen."""

    waited_s: float = 0.0
    """Time since it arrived."""
    may_split: bool = True
    """Whether two workers may share it; not if its prompt is shorter than `router.min_remote_prefill_tokens`."""
    sure_tokens: float = 0.0
    """The length that its answer will most likely have at least; its engine counts on that."""
    prompt_load: float = 0.0
    """Seconds for which the prompts that come in one second are computed, on all the workers that are looked at."""


class Option(msgspec.Struct, frozen=True, gc=False):
    """A way to serve a request, and what is predicted for it."""

    prompt_worker: str
    decode_worker: str
    ttft_s: float
    """From the request's arrival."""
    tpot_s: float
    broken: float
    """Limits that it is likely to break: its own for TTFT and for TPOT, and one for each other sequence."""
    work_s: float
    """Seconds of any worker that it takes."""
    latency_s: float
    """Its whole latency, and what it adds to the latencies of others."""
    cached_tokens: int = 0
    """Tokens of the prompt that its worker is expected to have."""
    against: int = 0
    """Workers that it uses for the phase that they do not favour."""
    overdue: float = 0.0
    """The limits on TTFT by which its first token comes too late."""
    waits: bool = False
    """Whether the prompt waits for a worker that has enough of them now."""
    beside: bool = False
    """Whether sequences decode now where the prompt is computed."""
    slower: float = 1.0
    """By what the predicted time of the prompt was multiplied, see `ridgeline.router.fleet.corrections`."""
    outside_s: float = 0.0
    """Seconds of its `ttft_s` that pass outside of the engine once it is placed."""

    @property
    def splits(self) -> bool:
        """Whether two workers share the request."""
        return self.prompt_worker != self.decode_worker


class Decision(msgspec.Struct, frozen=True):
    """What was chosen, why, and what else there was."""

    chosen: Option
    reason: str
    """`within_limits`, `fewest_broken` (it is likely to break one) or `least_latency` (there are no limits)."""
    others: tuple[Option, ...]
    """The next best options, best first."""
    wanted: Wanted
    costs: tuple[float, ...] = ()
    """By what the chosen option and then the others were ranked: the requests that they lose, or without limits the
    seconds of latency that they cost."""
    held_s: float = 0.0
    """Time for which the prompt was held back, next to be placed, since a worker that had enough prompts was better for
    it than those that would have taken it."""


def choose(wanted: Wanted, loads: Sequence[Load], handover_s: HandoverS) -> Decision | None:
    """Return the best option; None without any worker.

    A worker without room for the sequence does not decode it, unless none has room. While a worker computes the same
    prompt, for another sequence of a request with n > 1, no other one computes it too.
    """
    views = [_view(wanted, load) for load in loads]
    tpot_missed = 1.0 + TPOT_SLACK * min(1.0, wanted.output_tokens / LONG_ANSWER_TOKENS), TPOT_MISSED
    computing = [view for view in views if view.load.shares] or views
    fits = [view for view in views if view.load.room] or views
    if not fits:
        return None
    computing = _beside_no_idle(computing, wanted.prompt_tokens)
    whole = (
        [view for view in fits if view in computing]
        if wanted.may_split
        else _beside_no_idle(fits, wanted.prompt_tokens)
    )
    options = [_option(wanted, tpot_missed, view, view) for view in whole]
    if wanted.may_split:
        prompts = sorted(computing, key=_prompt_rank)[:CONSIDERED]
        for decode in sorted(fits, key=_decode_rank)[:CONSIDERED]:
            waits_s = joined_step_s(decode.load, decode.alone_s, wanted.tpot_limit_s) / 2
            for prompt in prompts:
                if prompt is not decode:
                    gap_s = handover_s(prompt.load, decode.load) + waits_s
                    options.append(_option(wanted, tpot_missed, prompt, decode, gap_s))
    if wanted.limited:
        return _within_limits(wanted, options)
    # An answer that must stay where its prompt is computed cannot get out of the way of other prompts.
    return _least_latency(wanted, options, _for_prompts(views) if wanted.may_split else None)


def _beside_no_idle(views: list[_View], prompt_tokens: float) -> list[_View]:
    """Return the workers that a prompt may go to: while one of them is idle, none for which it would have to wait.

    Only for one that has more than half of its KV it may: the idle one has the more to compute.
    """
    if any(view.load.is_idle and view.load.takes_prompt for view in views):
        return [view for view in views if view.load.takes_prompt or 2 * view.load.cached_tokens > prompt_tokens]
    return views


def _delay_s(option: Option) -> float:
    """Return its latency, and what a prompt that waits for its worker takes from those that wait behind it."""
    return option.latency_s + (option.ttft_s if option.waits else 0.0)


def _for_prompts(views: list[_View]) -> str | None:
    """Return the worker that has fewer answers than any other one, so that prompts will go there.

    None if there is none, or if workers favour phases, which says where prompts go.
    """
    if len(views) < 2 or any(view.load.favours for view in views):
        return None
    fewest, second = sorted(views, key=lambda view: view.load.decodes)[:2]
    return fewest.load.worker_id if fewest.load.decodes < second.load.decodes else None


def _least_latency(wanted: Wanted, options: list[Option], for_prompts: str | None) -> Decision:
    beside_s = BESIDE_PROMPTS * wanted.prompt_load * wanted.output_tokens
    costs = [
        (_delay_s(option) + (beside_s * option.tpot_s if option.decode_worker == for_prompts else 0.0))
        * (1 + option.against)
        for option in options
    ]
    best, *others = sorted(range(len(options)), key=costs.__getitem__)[: 1 + CONSIDERED]
    return _decision(wanted, "least_latency", options, costs, best, others)


def _within_limits(wanted: Wanted, options: list[Option]) -> Decision:
    least_s = max(1e-9, min([option.work_s for option in options]))
    lost = [
        option.broken + OVERDUE * option.overdue + AGAINST * option.against + option.work_s / least_s - 1.0
        for option in options
    ]
    about = min(lost) + ABOUT
    places = range(len(options))
    best = min([place for place in places if lost[place] <= about], key=lambda place: _delay_s(options[place]))
    ranked = sorted(places, key=lost.__getitem__)[: 1 + CONSIDERED]
    others = [place for place in ranked if place != best][:CONSIDERED]
    reason = "fewest_broken" if options[best].broken >= 0.5 else "within_limits"
    return _decision(wanted, reason, options, lost, best, others)


def _decision(
    wanted: Wanted, reason: str, options: list[Option], costs: list[float], best: int, others: list[int]
) -> Decision:
    """Return the decision for the option at the place `best`."""
    return Decision(
        options[best],
        reason,
        tuple([options[place] for place in others]),
        wanted,
        (costs[best], *[costs[place] for place in others]),
    )


class _View(msgspec.Struct, gc=False):
    """A worker with what is predicted for either half of the request there."""

    load: Load
    took_s: float
    """Until the prompt is computed."""
    ttft_s: float
    late: float
    """How likely that misses the limit."""
    overdue: float
    """The limits on TTFT that it comes too late."""
    computes_s: float
    """What the prompt adds to the steps there."""
    begins_s: float
    """What steps take that would not be without the prompt; nothing on an idle worker, whose time nobody else needs."""
    delays_s: float
    """What the prompt adds to the latencies of those that decode there, or on a worker that shares the device."""
    alone_s: float
    """A step of what decodes there or will; 0 if nothing does."""
    crowds: float
    """Limits of the sequences that decode there that are likely to be missed because of the prompt."""
    steps_after_s: float
    """A step of what decodes there or will, and of the answer."""


def _view(wanted: Wanted, load: Load) -> _View:
    tokens = wanted.prompt_tokens - load.cached_tokens
    computes_s = compute_s(load, tokens, attended(wanted.prompt_tokens, load.cached_tokens))
    took_s, alone_s = prompt_s(load, tokens, computes_s) * load.slower, step_s(load)
    took_s += min(took_s, sum([other.prompts_s for other in load.sharers]))
    ttft_s = wanted.waited_s + load.outside_s + took_s
    part = ttft_s / wanted.ttft_limit_s
    begins_s = 0.0 if load.decoding or load.is_idle else math.ceil(tokens / load.step_tokens) * load.model.base_s
    delays_s, crowds = load.decoding * computes_s, _crowds(load, alone_s, computes_s)
    for other in load.sharers:
        turn_s = (computes_s + begins_s) / load.turns
        delays_s += other.decoding * turn_s
        crowds += _crowds(other, step_s(other), turn_s)
    return _View(
        load=load,
        took_s=took_s,
        ttft_s=ttft_s,
        late=_missed(part, TTFT_MISSED),
        overdue=0.0 if part <= TTFT_MISSED[1] else min(MOST_OVERDUE, part - TTFT_MISSED[1]),
        computes_s=computes_s,
        begins_s=begins_s,
        delays_s=delays_s,
        alone_s=alone_s,
        crowds=crowds,
        steps_after_s=load.model.decode_s(load.decodes + 1, load.context_tokens + wanted.context_tokens),
    )


def _crowds(load: Load, alone_s: float, computes_s: float) -> float:
    """Return how many of the sequences that decode there are likely to miss their limits beside a prompt.

    Up to half, since on average they have half of their tokens already; fewer if the prompt adds less than a step.
    """
    if not load.decoding or load.tpot_limit_s == math.inf:
        return 0.0
    crowded = 1.0 - _missed(TPOT_LIMIT_USED * load.tpot_limit_s / alone_s, CROWDED)
    return load.decoding / 2 * crowded * min(1.0, computes_s / alone_s)


def _prompt_rank(view: _View) -> tuple[bool, float, float]:
    """Return by which of them to choose a worker to compute the prompt, smallest first."""
    return view.load.favours == "decode", view.late, view.ttft_s


def _decode_rank(view: _View) -> tuple[bool, float, float, float]:
    """Return by which of them to choose a worker to decode, smallest first, before the prompt's worker is known."""
    load = view.load
    if load.favours == "decode":
        return False, load.decodes, 0.0, 0.0
    over = view.steps_after_s / load.tpot_limit_s - 1.0
    return (
        load.favours == "prefill",
        load.decodes * over if over > 0.0 else 0.0,
        view.steps_after_s / (load.decodes + 1),
        load.decodes,
    )


def _missed(part: float, certain: tuple[float, float]) -> float:
    """Return how likely a limit is missed of which a prediction takes this part.

    0 up to the first of `certain`, 1 from the second on.
    """
    kept, missed = certain
    if part <= kept:
        return 0.0
    return 1.0 if part >= missed else (part - kept) / (missed - kept)


def _option(
    wanted: Wanted, tpot_missed: tuple[float, float], prompt: _View, decode: _View, gap_s: float = 0.0
) -> Option:
    """Predict one option; `gap_s` is what a hand-over adds between the first two tokens.

    The answer begins once the prompt is computed: until then some of those that decode will end. It is likely to break
    its own limit on TPOT, and of the others half of those whose steps become too long because of it, since on average
    they have half of their tokens already.

    Its work is its share of the steps in which it is made. A step for few sequences takes nearly as long as one for
    many, so that answers gather where there are some; what one adds, given the others, lets them spread, which is
    wanted among workers that favour decode.
    """
    load, output_tokens = decode.load, wanted.output_tokens
    decodes, context_tokens = later(load, decode.alone_s, prompt.took_s, output_tokens)
    before_s = load.model.decode_s(decodes, context_tokens) if decodes else 0.0
    after_s = load.model.decode_s(decodes + 1, context_tokens + wanted.context_tokens)
    added_s = after_s - (before_s or load.model.base_s)
    per_token_s = tpot_s(load, before_s, after_s, output_tokens, prompt.took_s) + gap_s / max(1.0, output_tokens - 1)
    breaks = _missed(per_token_s / wanted.tpot_limit_s, tpot_missed)
    if after := _missed(after_s / load.tpot_limit_s, tpot_missed):
        breaks += decodes * max(0.0, after - _missed(before_s / load.tpot_limit_s, tpot_missed)) / 2
    delays_s = prompt.delays_s
    if after_s > before_s:
        delays_s += decodes * output_tokens * (after_s - before_s)
    if load.sharers and decodes < 1.0:
        their_delay_s, their_breaks = _takes_turns(load, output_tokens, tpot_missed)
        delays_s += (1.0 - decodes) * their_delay_s
        breaks += (1.0 - decodes) * their_breaks
    decode_s = output_tokens * (added_s if load.favours == "decode" else after_s / (decodes + 1))
    against = (prompt.load.favours == "decode") + (load.favours == "prefill")
    return Option(
        prompt_worker=prompt.load.worker_id,
        decode_worker=load.worker_id,
        ttft_s=prompt.ttft_s,
        tpot_s=per_token_s,
        broken=prompt.late + prompt.crowds + breaks,
        work_s=prompt.computes_s + prompt.begins_s + decode_s,
        latency_s=prompt.ttft_s + output_tokens * per_token_s + delays_s,
        cached_tokens=prompt.load.cached_tokens,
        against=against if wanted.may_split else 0,
        overdue=prompt.overdue,
        waits=not prompt.load.takes_prompt,
        beside=prompt.load.decoding > 0,
        slower=prompt.load.slower,
        outside_s=prompt.load.outside_s,
    )


def _takes_turns(load: Load, output_tokens: float, tpot_missed: tuple[float, float]) -> tuple[float, float]:
    """Return what the first answer that a worker decodes costs the others on its device.

    The latency that it adds to theirs, and how many limits of theirs it is likely to break, half of those that become
    too long as in `_option`.
    """
    delays_s = breaks = 0.0
    for other in load.sharers:
        alone_s = step_s(other)
        before, after = (turns * alone_s / other.tpot_limit_s for turns in (load.turns - 1, load.turns))
        delays_s += other.decodes * output_tokens * alone_s
        breaks += other.decodes * (_missed(after, tpot_missed) - _missed(before, tpot_missed)) / 2
    return delays_s, breaks
