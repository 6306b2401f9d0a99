"""Changes a trace before it is replayed: times, lengths, number of requests.

Nothing is dropped or cut silently: each change leaves a note, and the notes are in the summary and the report.
"""

import random
from collections.abc import Iterable
from dataclasses import replace

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.trace.trace import Trace, TraceRow, in_order, tick_of

MIN_BLOCK_TOKENS = 16


def rows_wanted(plan: ReplayPlan) -> int | None:
    """Return how many requests of the beginning of a trace the plan sends; None if that takes the whole trace."""
    needs_others = plan.too_long == "drop" or plan.spread_ticks or plan.jitter_s
    return None if needs_others else plan.limit


def shape_trace(trace: Trace, plan: ReplayPlan) -> Trace:
    """Apply the plan's controls: jitter, lengths, limit, then time, so that `rate` is the rate actually offered.

    Raises TraceError if no request is left.
    """
    shaped = _spread_ticks(trace, plan) if plan.spread_ticks else trace
    shaped = _jitter(shaped, plan.jitter_s, plan.seed)
    shaped = _scale_lengths(shaped, plan.length_scale)
    shaped = _drop_long(shaped, plan)
    shaped = _keep(shaped, range(len(shaped.rows))[: plan.limit], f"limit {plan.limit}")
    shaped = _clip_long(shaped, plan)
    shaped = _scale_time(shaped, plan)
    if plan.duration_s is not None:
        kept = [place for place, row in enumerate(shaped.rows) if row.arrival_s <= plan.duration_s]
        shaped = _keep(shaped, kept, f"duration {plan.duration_s:g} s")
    if not shaped.rows:
        raise TraceError(f"nothing of the trace '{trace.name}' is left after these cuts: {'; '.join(shaped.notes)}")
    return shaped


def fit_context(trace: Trace, max_model_tokens: int | None, least_prompt_tokens: int = 1) -> Trace:
    """Lengthen prompts to the server's shortest, then drop requests that the model cannot hold: it would refuse them.

    A session whose context grows beyond the model's limit ends there, as an agent's does that has no room left.
    Raises TraceError if none is left.
    """
    short = sum(row.input_tokens < least_prompt_tokens for row in trace.rows)
    if short:
        rows = tuple(replace(row, input_tokens=max(row.input_tokens, least_prompt_tokens)) for row in trace.rows)
        reason = f"lengthened to {least_prompt_tokens} tokens, since the server adds up to {least_prompt_tokens - 1}"
        trace = _noted(trace, rows, f"{short} of {len(rows)} prompts {reason}")
    if max_model_tokens is None:
        return trace
    kept = [place for place, row in enumerate(trace.rows) if row.input_tokens + row.output_tokens <= max_model_tokens]
    reason = f"longer than the model's {max_model_tokens} tokens; --length-scale or --max-input-tokens keeps them"
    fitted = _keep(trace, kept, reason)
    if not fitted.rows:
        raise TraceError(f"no request of '{trace.name}' fits: all are {reason}")
    return fitted


def _noted(trace: Trace, rows: tuple[TraceRow, ...], note: str) -> Trace:
    return replace(trace, rows=rows, notes=(*trace.notes, note))


def _keep(trace: Trace, kept: Iterable[int], reason: str) -> Trace:
    """Keep the rows at these places, but none whose first in `after` is left out: its session or sub-agent ends there.

    A row that waits for sub-agents that end early is sent when they have ended.
    """
    left: set[int] = set()
    for place in kept:
        after = trace.rows[place].after
        if not after or after[0] in left:
            left.add(place)
    dropped = len(trace.rows) - len(left)
    if not dropped:
        return trace
    note = f"{dropped} of {len(trace.rows)} requests dropped: {reason}"
    of_sessions = {row.session for place, row in enumerate(trace.rows) if place not in left} - {None}
    if of_sessions:
        note += f"; {len(of_sessions)} sessions end early or are left out"
    return _noted(trace, in_order(trace.rows, sorted(left)), note)


def _spread_ticks(trace: Trace, plan: ReplayPlan) -> Trace:
    tick_s = tick_of(trace.rows)
    if tick_s is None:
        raise TraceError(f"the arrivals of '{trace.name}' are not quantised: leave out --spread-ticks")
    return _noted(trace, _delayed(trace, tick_s, plan.seed), f"each tick of {tick_s:g} s spread (seed {plan.seed})")


def _jitter(trace: Trace, jitter_s: float, seed: int) -> Trace:
    if not jitter_s:
        return trace
    return _noted(trace, _delayed(trace, jitter_s, seed), f"arrivals jittered by up to {jitter_s:g} s (seed {seed})")


def _delayed(trace: Trace, most_s: float, seed: int) -> tuple[TraceRow, ...]:
    """Delay each arrival by a random time; the turns of a session by the same."""
    source = random.Random(seed)
    by_session: dict[str, float] = {}
    moved = []
    for row in trace.rows:
        delay_s = source.uniform(0, most_s)
        if row.session is not None:
            delay_s = by_session.setdefault(row.session, delay_s)
        moved.append(replace(row, arrival_s=row.arrival_s + delay_s))
    first_s = min(row.arrival_s for row in moved)
    moved = [replace(row, arrival_s=row.arrival_s - first_s) for row in moved]
    return in_order(moved, sorted(range(len(moved)), key=lambda place: moved[place].arrival_s))


def _scale_lengths(trace: Trace, scale: float) -> Trace:
    if scale == 1:
        return trace
    block_tokens = max(MIN_BLOCK_TOKENS, round(trace.prefix_block_tokens * scale))
    rows = tuple(
        replace(
            row,
            input_tokens=max(1, round(row.input_tokens * scale)),
            output_tokens=max(1, round(row.output_tokens * scale)),
        )
        for row in trace.rows
    )
    scaled = _noted(trace, rows, f"input and output lengths scaled by {scale:g}")
    return replace(scaled, prefix_block_tokens=block_tokens)


def _bounds(plan: ReplayPlan) -> tuple[float, float]:
    return plan.max_input_tokens or float("inf"), plan.max_output_tokens or float("inf")


def _is_long(row: TraceRow, bounds: tuple[float, float]) -> bool:
    return row.input_tokens > bounds[0] or row.output_tokens > bounds[1]


def _bounds_text(plan: ReplayPlan) -> str:
    limits = {"input": plan.max_input_tokens, "output": plan.max_output_tokens}
    return "over " + " or ".join(f"{most} {side} tokens" for side, most in limits.items() if most)


def _drop_long(trace: Trace, plan: ReplayPlan) -> Trace:
    if plan.too_long != "drop":
        return trace
    bounds = _bounds(plan)
    kept = [place for place, row in enumerate(trace.rows) if not _is_long(row, bounds)]
    return _keep(trace, kept, _bounds_text(plan))


def _clip_long(trace: Trace, plan: ReplayPlan) -> Trace:
    most_input, most_output = bounds = _bounds(plan)
    long_count = sum(_is_long(row, bounds) for row in trace.rows)
    if not long_count:
        return trace
    rows = tuple(
        replace(
            row,
            input_tokens=int(min(row.input_tokens, most_input)),
            output_tokens=int(min(row.output_tokens, most_output)),
        )
        for row in trace.rows
    )
    return _noted(trace, rows, f"{long_count} of {len(rows)} requests clipped: {_bounds_text(plan)}")


def _scale_time(trace: Trace, plan: ReplayPlan) -> Trace:
    factor = plan.time_scale
    if isinstance(plan.rate, float):
        if trace.mean_rate is None:
            raise TraceError(
                f"the trace '{trace.name}' has no spread of arrivals to rescale to {plan.rate:g} requests/s"
            )
        factor = trace.mean_rate / plan.rate
    if factor == 1:
        return trace
    rows = tuple(replace(row, arrival_s=row.arrival_s * factor, offset_s=row.offset_s * factor) for row in trace.rows)
    return _noted(trace, rows, f"arrival gaps multiplied by {factor:.4g}")
