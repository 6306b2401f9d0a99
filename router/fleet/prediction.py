"""What a prompt or an answer would take on a worker, from the worker's own model of its steps. Pure functions.

In the formulas, n sequences with c tokens of context decode on the worker, L is the least time per output token that
one of them may take, and step(P, n, c, A) is `ridgeline.contracts.workers.StepModel`:

- s = step(0, n, c, 0) is a step without prompts, and T = `TPOT_LIMIT_USED` L the longest that keeps all limits. While
  n > 0, the engine computes as many prompt tokens in a step as fit (`ridgeline.decode_worker.pacing`), or as many as
  its limit says if no sequence has an L. In the first steps beside a prompt that is `MOST_LIMITS` T, until sequences
  with r tokens left on average have lost a slack of `FUTURE_SLACK_USED` r (T - `DECODE_STEP_MARGIN` s), and then
  (1 + `AHEAD`) T - `AHEAD` s on average. While nothing decodes but sequences are to come, it is `MOST_LIMITS` T.
  Where T < `DECODE_STEP_MARGIN` s, L cannot be kept, and a step beside a prompt takes `LOST_LIMITS` s.
- a prompt of p tokens takes w = p times the time per prompt token, with its attention, and k steps, in which there is
  room for w beside s, for at least `LEAST_PROMPT_SHARE` s in each, and for at most as many tokens as a step may have:
  w + k s in all. The prompts before it are computed beside what decodes now; then it is, beside what will decode by
  then as well, since they are about to have their first tokens.
- workers that share a device take turns: beside d others of which each decodes something, all that a worker computes
  takes 1 + d times as long, and a prompt waits for their prompts too, for as long as it is computed itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from ridgeline.contracts.vocabulary import Phase
from ridgeline.contracts.workers import (
    DECODE_STEP_MARGIN,
    FUTURE_SLACK_USED,
    LEAST_PROMPT_SHARE,
    LOST_LIMITS,
    MOST_LIMITS,
    TPOT_LIMIT_USED,
    StepModel,
)

AHEAD = 0.25
"""By how much more than their limits leave sequences let prompts lengthen steps, on average, since some of them are
ahead. Chosen by simulation (`tools.bench.simulated_modes`)."""
AT_MOST_DONE = 0.95
"""The part of a prompt that may be taken as computed while its first token has not come."""


class Asked(msgspec.Struct, frozen=True):
    """What a request asks for, or the mean of several."""

    prompt_tokens: float
    output_tokens: float
    """Expected length of its answer, at least 1."""
    ttft_limit_s: float = math.inf
    tpot_limit_s: float = math.inf

    @property
    def limited(self) -> bool:
        """Whether it has any limit."""
        return math.isfinite(self.ttft_limit_s) or math.isfinite(self.tpot_limit_s)

    @property
    def context_tokens(self) -> float:
        """The mean context of the sequence while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2


class Load(msgspec.Struct, frozen=True, gc=False):
    """What a worker has to do, as far as predictions need it."""

    worker_id: str
    model: StepModel
    step_tokens: int
    """Tokens that one step computes at most."""
    prompt_tokens: float = 0.0
    """Prompt tokens that it has to compute before those of a prompt that comes now, see `with_prompts`."""
    prompts_s: float = 0.0
    """Seconds that they add to the steps that compute them, see `compute_s`."""
    steps: _Steps | None = None
    """The steps in which it computes prompts beside what decodes now, if they have been worked out."""
    decoding: float = 0
    """Sequences that decode there now, those included whose first token was made elsewhere and whose KV comes."""
    decodes: float = 0
    """Those and the ones that will, once their prompts are computed, here or elsewhere."""
    context_tokens: float = 0.0
    """Tokens of the latter's contexts."""
    left_tokens: float = 0.0
    """Tokens that one that decodes is sure to make yet, on average."""
    tpot_limit_s: float = math.inf
    """The least time per output token that one of them may take."""
    step_target_s: float = math.inf
    """The time that a step is planned to take at most by the worker's role, while something decodes."""
    takes_prompt: bool = True
    """Whether it has so few prompts that it would be sent one more now."""
    room: bool = True
    """Whether its KV blocks and its batch have room for one more sequence."""
    cached_tokens: int = 0
    """Tokens of the prompt that is asked about whose KV it has."""
    shares: bool = False
    """Whether it computes the same prompt now for another sequence."""
    favours: Phase | None = None
    """The phase that it should be kept free for (`ridgeline.router.fleet.rebalance`); None: it does both."""
    slower: float = 1.0
    """By what to multiply the predicted time of a prompt, since the latest ones took as much longer
    (`ridgeline.router.fleet.corrections`)."""
    outside_s: float = 0.0
    """Seconds of the time to first token that pass outside of its engine, after the prompt was placed (likewise)."""
    sharers: tuple[Load, ...] = ()
    """The workers that take turns with it on one device, see `taking_turns`."""

    @property
    def is_idle(self) -> bool:
        """Whether neither it nor one that shares its device has anything to do, now or later."""
        return not (self.decodes or self.prompt_tokens or any(not other.is_idle for other in self.sharers))

    @property
    def turns(self) -> int:
        """By what all takes longer here, since others decode on the same device."""
        return 1 + sum([other.decodes > 0 for other in self.sharers])

    @property
    def decoding_context_tokens(self) -> float:
        """Tokens of the contexts of those that decode now."""
        return self.context_tokens * self.decoding / self.decodes if self.decodes else 0.0


def attended(tokens: float, cached_tokens: float = 0.0) -> float:
    """Return the tokens that a prompt attends to, summed over those to be computed after `cached_tokens` of them."""
    return (tokens - cached_tokens) * (tokens + cached_tokens) / 2


def idle_prompt_s(model: StepModel, tokens: float) -> float:
    """Return the seconds of a whole prompt in one step of an idle worker, which no worker can be faster than."""
    return model.step_s(tokens, 0, 0, attended(tokens))


def step_s(load: Load) -> float:
    """Return the seconds of a step of all that decode or will; 0 without any."""
    return load.model.decode_s(load.decodes, load.context_tokens) if load.decodes else 0.0


def later(load: Load, alone_s: float, after_s: float, output_tokens: float) -> tuple[float, float]:
    """Return how many sequences decode or will once `after_s` seconds have passed, and the tokens of their contexts.

    Some of those that decode now, in steps of `alone_s`, will have ended. They are taken to have answers of this
    length, of which any part may be left. Those that do not decode yet, since their prompts are not computed, stay.
    """
    if not load.decoding:
        return load.decodes, load.context_tokens
    ended = after_s / alone_s / output_tokens
    decodes = load.decodes - load.decoding * (ended if ended < 1.0 else 1.0)
    return decodes, load.context_tokens * decodes / load.decodes


def joined_step_s(load: Load, alone_s: float, tpot_limit_s: float) -> float:
    """Return the seconds of the step that runs when the KV of a sequence with this limit arrives.

    While its KV is on its way, the engine lets a step that computes prompts take `MOST_LIMITS` limits. One without
    prompts takes `alone_s`.
    """
    mixed_s = alone_s + load.prompts_s
    limit_s = MOST_LIMITS * TPOT_LIMIT_USED * min(load.tpot_limit_s, tpot_limit_s)
    return max(alone_s, min(mixed_s, limit_s, load.step_target_s))


def compute_s(load: Load, tokens: float, attends: float) -> float:
    """Return the seconds that prompt tokens add to the steps that compute them.

    That is what the model's corrections make of steps with as many of them as there may be. Where limits leave a step
    less time, prompts are computed in pieces, of whose sizes nothing is known, so that nothing is corrected.
    """
    model = load.model
    line_s = model.per_prefill_token_s * tokens + model.per_attended_token_s * attends
    if not model.corrections:
        return line_s
    steps = math.ceil(tokens / load.step_tokens) or 1
    step_s = model.step_s(tokens / steps, 0, 0, attends / steps)
    longest_s = TPOT_LIMIT_USED * load.tpot_limit_s
    if load.decodes and step_s > (longest_s if longest_s < load.step_target_s else load.step_target_s):
        return line_s
    return steps * max(0.0, step_s - model.base_s)


def prompt_s(load: Load, tokens: float, work_s: float) -> float:
    """Return the seconds until a prompt is computed that comes to a worker now, behind what it has.

    `work_s` are those that it adds to the steps that compute it.
    """
    left_tokens, steps = load.left_tokens, load.steps or _steps(load, load.decoding, comes=not load.prompt_tokens)
    if not load.prompt_tokens:
        return _through(load, steps, tokens, work_s, left_tokens)[0]
    before_s, left_tokens = _through(load, steps, load.prompt_tokens, load.prompts_s, left_tokens)
    if load.decodes != load.decoding:
        steps = _steps(load, load.decodes)
    return before_s + _through(load, steps, tokens, work_s, left_tokens)[0]


class _Steps(msgspec.Struct, frozen=True, gc=False):
    """The steps in which a worker computes prompts; in seconds."""

    alone_s: float
    """A step without prompts."""
    usual_s: float
    """What prompts may have of a step on average; inf if it has as many tokens as a step may have."""
    longest_s: float = math.inf
    """What they may have of it while sequences lend them time."""
    long_steps_per_token: float = 0.0
    """Steps for which a token lends time that a sequence is sure to make yet."""


def _steps(load: Load, sequences: float, *, comes: bool = False) -> _Steps:
    """Return what steps are like beside so many of the sequences; `comes`: if there are none, beside those to come."""
    limit_s = TPOT_LIMIT_USED * load.tpot_limit_s
    if not sequences:
        alone_s = load.model.base_s
        begins = comes and load.decodes > 0
        return _Steps(alone_s, _room_s(alone_s, MOST_LIMITS * limit_s, math.inf) if begins else math.inf)
    alone_s = load.model.decode_s(sequences, load.context_tokens * sequences / load.decodes)
    if limit_s == math.inf:
        return _Steps(alone_s, _room_s(alone_s, math.inf, load.step_target_s))
    if limit_s < DECODE_STEP_MARGIN * alone_s:
        return _Steps(alone_s, _room_s(alone_s, LOST_LIMITS * alone_s, load.step_target_s))
    return _Steps(
        alone_s,
        _room_s(alone_s, alone_s + (1.0 + AHEAD) * (limit_s - alone_s), load.step_target_s),
        _room_s(alone_s, MOST_LIMITS * limit_s, load.step_target_s),
        FUTURE_SLACK_USED * (limit_s - DECODE_STEP_MARGIN * alone_s) / ((MOST_LIMITS - 1.0) * limit_s),
    )


def _through(load: Load, steps: _Steps, tokens: float, work_s: float, left_tokens: float) -> tuple[float, float]:
    """Return the seconds that prompt tokens take in such steps, and the rest of `left_tokens`.

    The sequences there can still lend time for the rest.
    """
    number, per_token = work_s / steps.usual_s, steps.long_steps_per_token
    if per_token:
        long_steps, lent_steps = work_s / steps.longest_s, left_tokens * per_token
        if long_steps > lent_steps:
            long_steps = lent_steps
        left_tokens -= long_steps / per_token
        number = long_steps + (work_s - long_steps * steps.longest_s) / steps.usual_s
    least = tokens / load.step_tokens
    return work_s + math.ceil(number if number > least else least) * steps.alone_s, left_tokens


def _room_s(alone_s: float, step_s: float, target_s: float) -> float:
    """Return the part of a step that prompts may have."""
    room_s, least_s = (step_s if step_s < target_s else target_s) - alone_s, LEAST_PROMPT_SHARE * alone_s
    return room_s if room_s > least_s else least_s


def tpot_s(load: Load, others_s: float, alone_s: float, output_tokens: float, after_prompts_s: float = 0.0) -> float:
    """Return the time per output token of a sequence whose answer begins after `after_prompts_s`.

    `alone_s` is a step with it and without prompts, `others_s` one of the others alone, 0 without any. The prompts that
    the worker still computes then make its steps longer, within what its sequences allow; until then it spends on them
    what it does not spend on its sequences.
    """
    if not load.prompt_tokens:
        return alone_s
    longest_s = min(TPOT_LIMIT_USED * load.tpot_limit_s, load.step_target_s)
    on_prompts = max(LEAST_PROMPT_SHARE, 1.0 - others_s / longest_s)
    left_s = load.prompts_s - on_prompts * after_prompts_s
    if left_s <= 0.0 or alone_s >= longest_s:
        return alone_s
    return min(alone_s + left_s / output_tokens, longest_s)


def with_prompts(load: Load, prompts_tokens: Sequence[int], first_for_s: float) -> Load:
    """Return a load without prompts with these to compute, of which the first has been computed for `first_for_s`."""
    if not prompts_tokens:
        return load
    first = prompts_tokens[0]
    steps = _steps(load, load.decoding, comes=True)
    first_work_s = compute_s(load, first, attended(first))
    first_s, _ = _through(load, steps, first, first_work_s, load.left_tokens)
    done = min(AT_MOST_DONE, first_for_s / max(1e-9, first_s * load.slower))
    all_s = compute_s(load, sum(prompts_tokens), sum([attended(tokens) for tokens in prompts_tokens]))
    return replace(
        load,
        prompt_tokens=sum(prompts_tokens) - done * first,
        prompts_s=max(0.0, all_s - done * first_work_s),
        steps=steps if load.decoding else None,
    )


def taking_turns(load: Load, sharers: Sequence[Load]) -> Load:
    """Return a load without prompts whose steps take as much longer as the others that share its device make them.

    The models are those of workers that are alike. As long as both decode, no engine sees a step that nothing disturbs;
    the fastest is the nearest to that.
    """
    if not sharers:
        return load
    alone = min([load.model, *[other.model for other in sharers]], key=lambda model: model.decode_s(1, 0))
    shared = replace(load, sharers=tuple([replace(other, model=alone) for other in sharers]))
    return replace(shared, model=alone.times(shared.turns))
