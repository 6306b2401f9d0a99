"""The second part: load that turns from prefill-heavy to decode-heavy and back, and how many requests are in time.

Each block has a round of each mode with the same arrivals, in random order. The limits are the balanced ones of the
prefill-heavy requests. Each phase is as heavy as its share of what both workers together are calculated to hold.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from loadtest.plan import ComparePlan
from loadtest.rate_search import Round, bands
from loadtest.run.calibration import decode_token_s, minutes_text
from loadtest.run.unloaded import Unloaded
from loadtest.run_folder import SUMMARY
from loadtest.statistics.proportions import PairedCounts, paired_score_interval
from loadtest.trace.trace import Trace, TraceRow
from tools.bench.modes.course import Clock, shuffled
from tools.bench.modes.fleet import Fleet, hopeless_after_s, round_plan
from tools.bench.modes.journal import Ended, Journal, Limits, Measured, RoundEnded, RoundSpec
from tools.bench.modes.settings import ADAPTIVE, Settings
from tools.bench.modes.summary import common, round_row, write
from tools.bench.modes.workloads import plan_of

NAME: Final = "shift"
TTFT_FACTOR, TPOT_FACTOR = 5.0, 2.0
LEVEL: Final = 0.05
OVERALL: Final = "overall"


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the load: its name, and the size of its requests."""

    name: str
    input_tokens: int
    output_tokens: int


PHASES: Final = (Phase("prefill-heavy", 768, 16), Phase("decode-heavy", 64, 128), Phase("prefill-heavy again", 768, 16))


def limits_from(unloaded: Unloaded) -> Limits:
    """Return the balanced limits of the prefill-heavy requests, which were measured."""
    ttft_ms, tpot_ms = unloaded.median_ttft_s * 1e3, unloaded.median_tpot_s * 1e3
    return Limits(float(f"{TTFT_FACTOR * ttft_ms:.3g}"), float(f"{TPOT_FACTOR * tpot_ms:.3g}"))


def phase_rate(phase: Phase, unloaded: Unloaded, limits: Limits, share: float, workers: int) -> float:
    """Return the requests/s that take this share of all workers' time.

    A prompt's time is in proportion to its tokens, from the measured prefill-heavy one; decode steps are those of the
    largest batch within the limit.
    """
    prefill_s = unloaded.median_ttft_s * phase.input_tokens / PHASES[0].input_tokens
    decode_s = phase.output_tokens * decode_token_s(unloaded, limits.tpot_ms / 1e3)
    return share * workers / (prefill_s + decode_s)


def shifting_trace(rates: Sequence[float], phase_s: float, seed: int) -> Trace:
    """Return Poisson arrivals of each phase in turn, with as many requests as its rate has in its time."""
    source, rows = random.Random(seed), list[TraceRow]()
    for number, (phase, rate) in enumerate(zip(PHASES, rates, strict=True)):
        count = max(1, round(rate * phase_s))
        at = sorted(source.uniform(0, phase_s) for _ in range(count))
        rows += [TraceRow(number * phase_s + one, phase.input_tokens, phase.output_tokens) for one in at]
    start_s = rows[0].arrival_s
    moved = tuple(TraceRow(row.arrival_s - start_s, row.input_tokens, row.output_tokens) for row in rows)
    return Trace(NAME, moved)


def slices(rates: Sequence[float], phase_s: float) -> dict[str, slice]:
    """Return which requests of a round are of which phase, and of all."""
    counts = [max(1, round(rate * phase_s)) for rate in rates]
    ends = [0, *itertools.accumulate(counts)]
    found = {phase.name: slice(*pair) for phase, pair in zip(PHASES, itertools.pairwise(ends), strict=True)}
    return found | {OVERALL: slice(0, ends[-1])}


def attainments(
    rounds: Sequence[RoundEnded], arms: Sequence[str], limits: Limits, parts: Mapping[str, slice]
) -> dict[str, dict[str, Any]]:
    """Return the share of each arm within the limits, by phase and overall, and adaptive minus the best other arm.

    The difference is over blocks that both arms finished, with the score interval of paired shares.
    """
    found: dict[str, dict[str, Any]] = {}
    for part, where in parts.items():
        met = {
            arm: {
                each.spec.block: [one.meets(limits) for one in each.outcomes[where]]
                for each in rounds
                if each.spec.arm == arm
            }
            for arm in arms
        }
        found[part] = {arm: _share(list(by_block.values())) for arm, by_block in met.items()}
        others = [arm for arm in arms if arm != ADAPTIVE and found[part][arm] is not None]
        if ADAPTIVE in arms and found[part][ADAPTIVE] is not None and others:
            best = max(others, key=lambda arm: found[part][arm]["attainment"])
            found[part]["difference"] = {"from": best} | _difference(met[best], met[ADAPTIVE])
    return found


def _share(met: Sequence[Sequence[bool]]) -> dict[str, Any] | None:
    if not met:
        return None
    (band,) = bands([Round(1.0, sum(one), len(one)) for one in met])
    return {"attainment": band.share, "low": band.low, "high": band.high, "met": band.met, "requests": band.total}


def _difference(one: Mapping[int, Sequence[bool]], other: Mapping[int, Sequence[bool]]) -> dict[str, float | None]:
    """Return other minus one, in shares of requests, with its interval; None if no block has both."""
    pairs = [pair for block in one if block in other for pair in zip(one[block], other[block], strict=True)]
    if not pairs:
        return {"mean": None, "low": None, "high": None}
    cases = ((True, True), (True, False), (False, True), (False, False))
    counts = PairedCounts(*(pairs.count(case) for case in cases))
    low, high = paired_score_interval(counts, LEVEL)
    return {"mean": (counts.only_b - counts.only_a) / counts.total, "low": low, "high": high}


async def run_shift(fleet: Fleet, settings: Settings, journal: Journal, clock: Clock, console: Console) -> None:
    """Run blocks until there are enough or the time is up; write and print what was found after each."""
    first = PHASES[0]
    spec = f"poisson:rate=1,input={first.input_tokens},output={first.output_tokens},n=32,seed={settings.seed}"
    plan = plan_of(spec, settings)
    measured = journal.measured(NAME)
    if measured is None:
        unloaded = await fleet.measure(settings.pure_arms[0], plan)
        measured = Measured(NAME, "three phases", unloaded, clock.spent_s)
        journal.add(measured)
    unloaded = measured.unloaded
    limits, workers = limits_from(unloaded), sum(unloaded.workers.values()) or 1
    rates = [phase_rate(phase, unloaded, limits, settings.share, workers) for phase in PHASES]
    told = "; ".join(
        f"{phase.name} {phase.input_tokens}/{phase.output_tokens} at {rate:.3g} requests/s"
        for phase, rate in zip(PHASES, rates, strict=True)
    )
    console.print(f"{told}; limits TTFT {limits.ttft_ms:g} ms, TPOT {limits.tpot_ms:g} ms", highlight=False)
    longest = max(phase.output_tokens for phase in PHASES)
    of_round = round_plan(plan, limits, hopeless_after_s(limits, longest))
    for arm in settings.pure_arms:
        await fleet.warm_up(arm, shifting_trace(rates, settings.phase_s, settings.seed), of_round)
    note: str | None = None
    for block in range(1, settings.most_blocks + 1):
        trace = shifting_trace(rates, settings.phase_s, settings.seed + block)
        for arm in shuffled(settings.arms, f"{settings.seed} shift {block}"):
            each = RoundSpec(NAME, block, arm, trace.mean_rate or 0.0, block, len(trace.rows))
            if journal.done(each) is not None:
                continue
            if trace.span_s > clock.left_s:
                note = f"the time was up within block {block}: the rounds after it were left out"
                break
            ended = await _one_round(fleet, journal, clock, each, trace, of_round, limits)
            left = minutes_text(max(0.0, clock.left_s))
            met = sum(one.meets(limits) for one in ended.outcomes)
            why = f"; VOID: {ended.void}" if ended.void else ""
            console.print(
                f"[{left} left] block {block} {arm}: {met} of {len(trace.rows)} in time{why}",
                highlight=False,
                markup=False,
            )
        if note is not None:
            console.print(note, style="yellow", highlight=False)
            break
        _write(fleet, settings, journal, limits, rates)
    journal.add(Ended(NAME, note, clock.spent_s))
    summary = _write(fleet, settings, journal, limits, rates)
    console.print(_table(summary["phases"], settings.arms))


async def _one_round(
    fleet: Fleet,
    journal: Journal,
    clock: Clock,
    spec: RoundSpec,
    trace: Trace,
    plan: ComparePlan,
    limits: Limits,
) -> RoundEnded:
    number = journal.next_number
    told = limits if spec.arm == ADAPTIVE else None
    found = await fleet.round(spec.arm, trace, plan, told, {"round": number, "workload": NAME, "block": spec.block})
    ended = found.ended(number, spec, clock.spent_s, fleet.next_ordinal)
    journal.add(ended)
    return ended


def _write(
    fleet: Fleet, settings: Settings, journal: Journal, limits: Limits, rates: Sequence[float]
) -> dict[str, Any]:
    parts = slices(rates, settings.phase_s)
    path: Path = fleet.folder / SUMMARY
    summary = {
        "phases": attainments(journal.rounds(NAME), settings.arms, limits, parts),
        "limits": {"ttft_ms": limits.ttft_ms, "tpot_ms": limits.tpot_ms},
        "rates": {phase.name: rate for phase, rate in zip(PHASES, rates, strict=True)},
        "rounds": [round_row(each) for each in journal.lines if isinstance(each, RoundEnded)],
        **common(journal, settings, fleet.setup),
    }
    write(path, summary)
    return summary


def _table(phases: Mapping[str, Mapping[str, Any]], arms: Sequence[str]) -> Table:
    table = Table("phase", *arms, "adaptive - best other, points", title="requests within both limits")
    for phase, found in phases.items():
        difference = found.get("difference")
        shown = "-"
        if difference is not None and difference["mean"] is not None:
            shown = (
                f"{100 * difference['mean']:+.1f} ({100 * difference['low']:+.1f} to {100 * difference['high']:+.1f}) "
                f"from {difference['from']}"
            )
        table.add_row(phase, *(_share_text(found[arm]) for arm in arms), shown)
    return table


def _share_text(share: Mapping[str, Any] | None) -> str:
    if share is None:
        return "-"
    return f"{share['attainment']:.0%} ({share['low']:.0%} to {share['high']:.0%}) of {share['requests']}"
