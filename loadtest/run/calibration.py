"""Chooses rate, SLOs and number of requests from what an unloaded server was measured to take.

Pure arithmetic; `ridgeline.loadtest.run.unloaded` measures.

Machines differ by a factor of ten, so a fixed load is too light for one and too heavy for the next, and fixed SLOs
are met by all or by none.
"""

import heapq
import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ridgeline.loadtest.plan import AUTO, ComparePlan, ReplayPlan, Slo
from ridgeline.loadtest.run.quantities import counted, duration_text, minutes_text
from ridgeline.loadtest.run.replay import WARMUP_OUTPUT_TOKENS
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.statistics.verdict import LEAST_PAIRS, told_apart
from ridgeline.loadtest.trace.trace import Trace

RATE_SHARE = 0.8
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.5
HELD_ATTAINMENT = 0.9
RATE_STEP, RATE_STEPS = 0.95, 160
"""The search for the highest rate goes down by 5 % to less than a thousandth."""
LONG_ANSWER_QUANTILE = 0.9
ROUND_ANSWERS = 2.0
SHOWN_EXCESS = 0.25
"""The part by which a rate is too high that a round shows; a smaller one needs longer rounds."""
PLANNED_PAIRS = 6
"""Of simulated comparisons of three variants, in the same 90 s for each, three pairs told a fifth less in 28 to 48 of
100, six in 63 to 99, ten in 73 to 100. Shorter rounds show less of a queue, so it is not ten. The simulation is
`searched` in tests/support/simulated_comparisons.py: slopes of 5 and 12, drift of 0.06 and 0.12, 60 runs a cell."""
LEAST_REQUESTS = 10
"""The fewest requests that a budget leaves to a round."""
Plan = TypeVar("Plan", bound=ReplayPlan)


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers that share the load, in units of the worker that was measured.

    `replicas` do both phases; `prefill` and `decode` do one each.
    """

    prefill: float = 0.0
    decode: float = 0.0
    replicas: float = 0.0


def workers_of(pools: dict[str, int]) -> Workers:
    """Return the workers of a running server; one that publishes no pools counts as a single replica."""
    if {"prefill", "decode"} <= pools.keys():
        return Workers(prefill=pools["prefill"], decode=pools["decode"])
    return Workers(replicas=pools.get("colocated", 1))


class Load(msgspec.Struct, frozen=True):
    """The load of a run and where it comes from; `load` in summary.json."""

    rate: float | None
    """Mean arrivals a second; None if all arrive at once."""
    rate_source: str
    slo_source: str
    unloaded: Unloaded | None = None
    notes: tuple[str, ...] = ()

    def sentences(self, limits: Slo) -> list[str]:
        """Say what was measured, the rate, the limits, and where they come from."""
        rate = f"{self.rate:.3g} requests/s" if self.rate else "all requests at once"
        said = [f"rate: {rate}: {self.rate_source}", f"SLOs: {limits}: {self.slo_source}", *self.notes]
        if (found := self.unloaded) is None:
            return said
        measured = (
            f"measured without load: TTFT {duration_text(found.median_ttft_s)}, "
            f"TPOT {duration_text(found.median_tpot_s)} (medians of {len(found.input_tokens)} requests of "
            f"{found.input_tokens[0]} to {found.input_tokens[-1]} tokens, one at a time; mean TTFT "
            f"{duration_text(found.mean_ttft_s)}); with {found.batch_sequences} at once on each worker "
            f"{1 / found.prefill_token_s:.3g} prompt tokens/s and {duration_text(found.median_batch_gap_s)} a token"
        )
        return [measured, *said]

    def as_summary(self, limits: Slo) -> dict[str, Any]:
        """Return the content of `load` in summary.json."""
        summary: dict[str, Any] = msgspec.to_builtins(self)
        return summary | {"sentences": self.sentences(limits)}


def given_load(plan: ReplayPlan, trace: Trace) -> Load:
    """Describe the load of a plan in which nothing is measured."""
    rate = plan.rate if isinstance(plan.rate, float) else trace.mean_rate
    return Load(rate, _given_rate_source(plan), _given_slo_source(plan))


def settle(plan: Plan, trace: Trace, unloaded: Unloaded, workers: Workers) -> tuple[Plan, Load]:
    """Return the plan with numbers in place of `auto`, and the load that it now offers.

    `trace` has the plan's sizes at its own times. The settled plan offers the same load again without measuring.
    """
    limits, slo_source = plan.slos, _given_slo_source(plan)
    changes: dict[str, Any] = {}
    if plan.slo == AUTO:
        limits = Slo(
            ttft_ms=_three_digits(TTFT_FACTOR * unloaded.median_ttft_s * 1e3),
            tpot_ms=_three_digits(TPOT_FACTOR * unloaded.median_tpot_s * 1e3),
            gap_ms=plan.slo_gap_ms,
        )
        slo_source = f"{TTFT_FACTOR:g} times the unloaded median TTFT and {TPOT_FACTOR:g} times the median TPOT"
        changes = {"slo": None, "slo_ttft_ms": limits.ttft_ms, "slo_tpot_ms": limits.tpot_ms}
        slo_source += "" if plan.slo_gap_ms is None else ", the largest gap as given"
    rate, rate_source = trace.mean_rate, _given_rate_source(plan)
    if plan.rate == AUTO:
        most, bound = most_rate(trace, unloaded, workers, limits)
        rate, rate_source = _three_digits(RATE_SHARE * most), f"{RATE_SHARE:.0%} of {bound}"
    elif isinstance(plan.rate, float):
        rate = plan.rate
    if plan.rate is not None:
        changes["rate"] = rate
    return plan.model_copy(update=changes), Load(rate, rate_source, slo_source, unloaded)


def most_rate(trace: Trace, unloaded: Unloaded, workers: Workers, slo: Slo) -> tuple[float, str]:
    """Return the highest rate at which 90 % of the requests should meet the SLOs on TTFT and TPOT, and what it is.

    The trace's own arrivals are simulated, since bursts queue where even arrivals would not. Where no rate meets the
    SLOs, it is the rate whose prompts alone fill the workers.
    """
    mean_prompt_s = unloaded.prefill_token_s * statistics.fmean(row.input_tokens for row in trace.rows)
    fills = (workers.prefill or workers.replicas) / mean_prompt_s
    for rate in (fills * RATE_STEP**step for step in range(RATE_STEPS)):
        if _attainment(trace, rate, unloaded, workers, slo) >= HELD_ATTAINMENT:
            return rate, f"the calculated rate at which {HELD_ATTAINMENT:.0%} of the requests should meet the SLOs"
    return fills, "the rate whose prompts fill the workers; no rate is expected to meet the SLOs"


def _attainment(trace: Trace, rate: float, unloaded: Unloaded, workers: Workers, slo: Slo) -> float:
    stretch = (trace.mean_rate or rate) / rate
    due_s = [stretch * (row.arrival_s + row.offset_s) for row in trace.rows]
    tokens = [row.output_tokens for row in trace.rows]
    prompts_s = [row.input_tokens * unloaded.prefill_token_s for row in trace.rows]
    if workers.replicas:
        first_s, last_s = _served(due_s, prompts_s, tokens, workers.replicas, unloaded)
    else:
        first_s, _ = _served(due_s, prompts_s, [1] * len(tokens), workers.prefill, unloaded)
        _, last_s = _served(first_s, [0.0] * len(tokens), tokens, workers.decode, unloaded)
    ttft_s, tpot_s, _ = slo.in_seconds()
    answers = zip(due_s, first_s, last_s, tokens, strict=True)
    met = [first - due <= ttft_s and last - first <= tpot_s * (count - 1) for due, first, last, count in answers]
    return statistics.fmean(met)


def _served(
    due_s: list[float], prompts_s: list[float], tokens: list[int], workers: float, unloaded: Unloaded
) -> tuple[list[float], list[float]]:
    """Simulate workers; return when the first and the last token of each answer come.

    A request goes to the worker that is free first. A step takes in at most one prompt, and makes a token of each
    running answer. It grows by the same time with each answer, as it did up to the measured batch. A prompt of 0 s came
    from another worker.
    """
    count, batch = max(1, int(workers)), unloaded.batch_sequences
    slower = count / workers
    alone_s, batch_s = slower * unloaded.median_tpot_s, slower * unloaded.median_batch_gap_s
    more_s = max(0.0, batch_s - alone_s) / (batch - 1)
    free_s, queues = [0.0] * count, [deque[int]() for _ in range(count)]
    for index in sorted(range(len(due_s)), key=due_s.__getitem__):
        worker = min(range(count), key=free_s.__getitem__)
        queues[worker].append(index)
        work_s = slower * prompts_s[index] + tokens[index] * batch_s / batch
        free_s[worker] = max(free_s[worker], due_s[index]) + work_s
    first_s, last_s = [0.0] * len(due_s), [0.0] * len(due_s)
    for waiting in queues:
        now_s, steps = 0.0, 0
        running: list[tuple[int, int]] = []  # the step that makes the last token, and the request
        while waiting or running:
            if not running:
                now_s = max(now_s, due_s[waiting[0]])
            if waiting and due_s[waiting[0]] <= now_s:
                index = waiting.popleft()
                if prompts_s[index]:
                    steps, now_s = steps + 1, now_s + slower * prompts_s[index] + more_s * len(running)
                first_s[index] = now_s
                heapq.heappush(running, (steps + tokens[index] - 1, index))
            else:
                step_s, taken = alone_s + more_s * (len(running) - 1), running[0][0] - steps
                if waiting:
                    taken = min(taken, math.ceil((due_s[waiting[0]] - now_s) / step_s))
                steps, now_s = steps + taken, now_s + taken * step_s
            while running and running[0][0] <= steps:
                last_s[heapq.heappop(running)[1]] = now_s
    return first_s, last_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a pair of rounds costs beside its arrivals, known once the first server was started and measured."""

    starts: float
    """Starts of a deployment in a pair, on average."""
    start_s: float
    beside_arrivals_s: float
    """Seconds of a round before the first arrival and after the last."""
    rounds: int = 2
    """Rounds of a pair, one for each variant."""

    def pair_s(self, requests: int, rate: float) -> float:
        """Return the seconds of a pair with this many requests in a round."""
        return self.starts * self.start_s + self.rounds * (self.beside_arrivals_s + (requests - 1) / rate)

    def requests_within(self, pair_s: float, rate: float) -> int:
        """Return the number of requests in a round of a pair that takes so long."""
        round_s = (pair_s - self.starts * self.start_s) / self.rounds - self.beside_arrivals_s
        return int(round_s * rate) + 1


def beside_arrivals_s(plan: ReplayPlan, trace: Trace, unloaded: Unloaded) -> float:
    """Estimate the seconds of a round's warm-up, of its readings of /metrics, and of its last answers.

    Workers are busy when the last requests arrive, and the round ends with a long answer rather than a mean one.
    """
    warm_up_s = plan.warmup_requests * (unloaded.mean_ttft_s + WARMUP_OUTPUT_TOKENS * unloaded.median_tpot_s)
    return warm_up_s + 4 * plan.settle_s + unloaded.mean_ttft_s + _long_answer_s(trace, unloaded)


def least_requests(rate: float, trace: Trace, unloaded: Unloaded, slo: Slo) -> int:
    """Return the fewest requests of a round.

    A batch fills while the first answers are made, so a round is `ROUND_ANSWERS` long answers long. A queue whose
    arrivals are `SHOWN_EXCESS` above what is served grows by that part of each second, and shows once it is as long as
    the SLO on TTFT.
    """
    shown_s = slo.ttft_ms / 1e3 / SHOWN_EXCESS
    return math.ceil(max(ROUND_ANSWERS * _long_answer_s(trace, unloaded), shown_s) * rate) + 1


def _long_answer_s(trace: Trace, unloaded: Unloaded) -> float:
    lengths = sorted(row.output_tokens for row in trace.rows)
    long_tokens = lengths[round(LONG_ANSWER_QUANTILE * (len(lengths) - 1))]
    return unloaded.mean_ttft_s + long_tokens * unloaded.median_batch_gap_s


def fit_budget(
    plan: ComparePlan, load: Load, most_requests: int, schedule: Schedule, spent_s: float, least: int
) -> tuple[ComparePlan, Load]:
    """Choose requests in a round for the time that is left, and say how many pairs fit and what they can tell.

    With a budget `PLANNED_PAIRS`, or two at each given rate, come first; then longer rounds, up to `most_requests`. A
    round has `least` requests in any case. Without a budget the plan's own rounds and pairs stay.
    """
    if load.rate is None:
        return plan, load
    pairs, requests = plan.most_pairs, most_requests
    if plan.budget_s is not None:
        left_s = plan.budget_s - spent_s
        wanted = min(pairs, max(PLANNED_PAIRS, 2 * len(plan.rates)))
        within = schedule.requests_within(left_s / wanted, load.rate)
        requests = min(most_requests, max(LEAST_REQUESTS, least, within))
        pairs = min(pairs, max(1, int(left_s / schedule.pair_s(requests, load.rate))))
        plan = plan.model_copy(update={"limit": requests})
    pair_s = schedule.pair_s(requests, load.rate)
    notes = [
        f"{'about' if plan.budget_s else 'at most'} {counted(pairs, 'pair')} of {schedule.rounds} rounds, each with "
        f"arrivals for {(requests - 1) / load.rate:.0f} s ({requests} requests at the first rate), about "
        f"{minutes_text(pair_s)} a pair"
    ]
    more = f"--budget-s {math.ceil(spent_s + PLANNED_PAIRS * pair_s)}" if plan.budget_s else f"--pairs {PLANNED_PAIRS}"
    notes.append(power_note(pairs, requests, schedule.rounds, more))
    return plan, msgspec.structs.replace(load, notes=(*load.notes, *notes))


def power_note(pairs: int, requests: int, variants: int, more: str) -> str:
    """Say what so many pairs can tell at best; `more` is the option that allows enough."""
    if pairs < LEAST_PAIRS:
        return f"warning: one pair of rounds is too few for a verdict: give {more} or more"
    least = told_apart(pairs, requests, variants) - 1
    return f"{pairs} pairs of rounds can tell highest rates apart that differ by {least:.0%} or more"


def _given_rate_source(plan: ReplayPlan) -> str:
    if isinstance(plan.rate, float):
        return "as given"
    return "the trace's own" if plan.time_scale == 1 else f"the trace's own, gaps multiplied by {plan.time_scale:g}"


def _given_slo_source(plan: ReplayPlan) -> str:
    return "as given" if {"slo_ttft_ms", "slo_tpot_ms", "slo_gap_ms"} & plan.model_fields_set else "the defaults"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
