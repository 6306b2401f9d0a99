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

import msgspec

from router.fleet.prediction import Load, attended, compute_s, prompt_s, step_s, tpot_s

ABOUT = 1.1
"""Options whose work is within this factor of the least are about equal."""
KEPT_TTFT = 0.9
"""The part of a TTFT limit that may be used by prediction, since predictions err."""
CONSIDERED = 3
"""Workers that are considered for each half of a request that is split; for a whole one all are."""


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
    fits = [load for load in loads if load.room] or loads
    if not fits:
        return None
    options = [_whole(wanted, load) for load in fits]
    if len(loads) > 1:
        prompts = sorted(loads, key=lambda load: _prompt_rank(wanted, load))[:CONSIDERED]
        decodes = sorted(fits, key=lambda load: _decode_rank(wanted, load))[:CONSIDERED]
        options += [
            _split(wanted, prompt, decode, handover_s)
            for prompt in prompts
            for decode in decodes
            if prompt is not decode
        ]
    fewest = min(option.broken for option in options)
    best = [option for option in options if option.broken == fewest]
    if wanted.limited:
        about_s = ABOUT * min(option.work_s for option in best)
        best = [option for option in best if option.work_s <= about_s]
    chosen = min(best, key=lambda option: option.latency_s)
    reason = ("fewest_broken" if fewest else "within_limits") if wanted.limited else "least_latency"
    others = sorted((one for one in options if one is not chosen), key=lambda one: (one.broken, one.latency_s))
    return Decision(chosen, reason, tuple(others[:CONSIDERED]))


def _prompt_rank(wanted: Wanted, load: Load) -> tuple[float, ...]:
    ttft_s = wanted.waited_s + prompt_s(load, *_uncached(wanted, load))
    return (ttft_s > KEPT_TTFT * wanted.ttft_limit_s, ttft_s)


def _decode_rank(wanted: Wanted, load: Load) -> tuple[float, ...]:
    return (_broken_by_decode(wanted, load), _decode_work_s(wanted, load), load.decodes)


def _uncached(wanted: Wanted, load: Load) -> tuple[float, float]:
    """Return the tokens that a worker would have to compute, and what they attend to."""
    return wanted.prompt_tokens - load.cached_tokens, attended(wanted.prompt_tokens, load.cached_tokens)


def _context(wanted: Wanted) -> float:
    """Return the mean context of the sequence while it decodes."""
    return wanted.prompt_tokens + wanted.output_tokens / 2


def _decode_work_s(wanted: Wanted, load: Load) -> float:
    """Return what the answer adds to the worker's time: the whole step where nothing else decodes."""
    added_s = step_s(load, 1, _context(wanted)) - step_s(load)
    return wanted.output_tokens * max(0.0, added_s)


def _broken_by_decode(wanted: Wanted, load: Load) -> int:
    """Return how many sequences would have too long steps, this one included."""
    after_s = step_s(load, 1, _context(wanted))
    others = load.decodes if after_s > load.tpot_limit_s >= step_s(load) else 0
    return others + (after_s > wanted.tpot_limit_s)


def _whole(wanted: Wanted, load: Load) -> Option:
    return _option(wanted, load, load, gap_s=0.0)


def _split(wanted: Wanted, prompt: Load, decode: Load, handover_s: HandoverS) -> Option:
    gap_s = handover_s(prompt.worker_id, decode.worker_id) + step_s(decode) / 2
    return _option(wanted, prompt, decode, gap_s)


def _option(wanted: Wanted, prompt: Load, decode: Load, gap_s: float) -> Option:
    """Predict one option; `gap_s` is what the hand-over adds between the first two tokens."""
    tokens, attends = _uncached(wanted, prompt)
    took_s = prompt_s(prompt, tokens, attends)
    ttft_s = wanted.waited_s + took_s
    per_token_s = tpot_s(decode, _context(wanted), wanted.output_tokens, took_s)
    per_token_s += gap_s / max(1.0, wanted.output_tokens - 1)
    computes_s = compute_s(prompt, tokens, attends)
    begins_s = 0.0 if prompt.decoding else math.ceil(tokens / prompt.step_tokens) * prompt.model.base_s
    decode_s = _decode_work_s(wanted, decode)
    broken = _broken_by_decode(wanted, decode) + (ttft_s > KEPT_TTFT * wanted.ttft_limit_s)
    if per_token_s > wanted.tpot_limit_s >= step_s(decode, 1, _context(wanted)):
        broken += 1  # not for its steps, but for the hand-over or the prompts that are computed beside it
    delays_s = prompt.decoding * computes_s + decode.decodes * decode_s
    return Option(
        prompt_worker=prompt.worker_id,
        decode_worker=decode.worker_id,
        ttft_s=ttft_s,
        tpot_s=per_token_s,
        broken=broken,
        work_s=computes_s + begins_s + decode_s + gap_s,
        latency_s=ttft_s + wanted.output_tokens * per_token_s + delays_s,
    )
