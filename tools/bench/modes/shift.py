"""The second part: load that turns from prefill-heavy to decode-heavy and back, and how many requests are in time.

Each block has a round of each mode with the same arrivals, in random order. The limits are the balanced ones of the
prefill-heavy requests. Each phase is as heavy as its share of what both workers together are calculated to hold.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from ridgeline.loadtest.rate_search import Round, bands
from ridgeline.loadtest.run.calibration import decode_token_s, minutes_text
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.statistics.proportions import PairedCounts, paired_score_interval
from ridgeline.loadtest.trace.trace import Trace, TraceRow
from tools.bench.modes.fleet import Fleet, hopeless_after_s, round_plan, shuffled
from tools.bench.modes.journal import Clock, Ended, Journal, Limits, Measured, RoundEnded, RoundSpec, limits_of
from tools.bench.modes.settings import ADAPTIVE, Settings

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
    rounds: Sequence[RoundEnded], variants: Sequence[str], limits: Limits, parts: Mapping[str, slice]
) -> dict[str, dict[str, Any]]:
    """Return the share of each variant within the limits, by phase and overall, and adaptive minus the best other.

    The difference is over blocks that both variants finished, with the score interval of paired shares.
    """
    found: dict[str, dict[str, Any]] = {}
    for part, where in parts.items():
        met = {
            variant: {
                each.spec.block: [one.meets(limits) for one in each.outcomes[where]]
                for each in rounds
                if each.spec.variant == variant
            }
            for variant in variants
        }
        found[part] = {variant: _share(list(by_block.values())) for variant, by_block in met.items()}
        others = [variant for variant in variants if variant != ADAPTIVE and found[part][variant] is not None]
        if ADAPTIVE in variants and found[part][ADAPTIVE] is not None and others:
            best = max(others, key=lambda variant: found[part][variant]["attainment"])
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
    """Run blocks until there are enough or the time is up; write what was found after each, and print it."""
    first = PHASES[0]
    plan = settings.plan_of(
        f"poisson:rate=1,input={first.input_tokens},output={first.output_tokens},n=32,seed={settings.seed}"
    )
    measured = journal.measured(NAME)
    if measured is None:
        measured = Measured(NAME, await fleet.measure(settings.pure_variants[0], plan), clock.spent_s)
        journal.add(measured)
    unloaded = measured.unloaded
    limits, workers = limits_of(unloaded, TTFT_FACTOR, TPOT_FACTOR), sum(unloaded.workers.values()) or 1
    rates = [phase_rate(phase, unloaded, limits, settings.share, workers) for phase in PHASES]
    told = "; ".join(
        f"{phase.name} {phase.input_tokens}/{phase.output_tokens} at {rate:.3g} requests/s"
        for phase, rate in zip(PHASES, rates, strict=True)
    )
    console.print(f"{told}; limits TTFT {limits.ttft_ms:g} ms, TPOT {limits.tpot_ms:g} ms", highlight=False)
    of_round = round_plan(plan, limits, hopeless_after_s(limits, max(phase.output_tokens for phase in PHASES)))
    for variant in settings.pure_variants:
        await fleet.warm_up(variant, shifting_trace(rates, settings.phase_s, settings.seed), of_round)
    note: str | None = None
    for block in range(1, settings.most_blocks + 1):
        trace = shifting_trace(rates, settings.phase_s, settings.seed + block)
        for variant in shuffled(settings.variants, f"{settings.seed} shift {block}"):
            spec = RoundSpec(NAME, block, variant, trace.mean_rate or 0.0, block, len(trace.rows))
            if journal.done(spec) is not None:
                continue
            if trace.span_s > clock.left_s:
                note = f"the time was up within block {block}: the rounds after it were left out"
                break
            ended = await fleet.round(spec, trace, of_round, limits if variant == ADAPTIVE else None, journal, clock)
            met = sum(one.meets(limits) for one in ended.outcomes)
            sentence = f"block {block} {variant}: {met} of {len(trace.rows)} in time"
            sentence += f"; VOID: {ended.void}" if ended.void else ""
            left = minutes_text(max(0.0, clock.left_s))
            console.print(f"[{left} left] {sentence}", highlight=False, markup=False)
        phases = attainments(journal.rounds(NAME), settings.variants, limits, slices(rates, settings.phase_s))
        found = {"phases": phases, "limits": limits, "rates": rates}
        journal.write_summary(found, settings, fleet.setup)
        if note is not None:
            console.print(note, style="yellow", highlight=False)
            break
    journal.add(Ended(NAME, note, clock.spent_s))
    console.print(_table(phases, settings.variants))


def _table(phases: Mapping[str, Mapping[str, Any]], variants: Sequence[str]) -> Table:
    table = Table("phase", *variants, "adaptive - best other, points", title="requests within both limits")
    for phase, found in phases.items():
        difference = found.get("difference")
        shown = "-"
        if difference is not None and difference["mean"] is not None:
            shown = (
                f"{100 * difference['mean']:+.1f} ({100 * difference['low']:+.1f} to {100 * difference['high']:+.1f}) "
                f"from {difference['from']}"
            )
        table.add_row(phase, *(_share_text(found[variant]) for variant in variants), shown)
    return table


def _share_text(share: Mapping[str, Any] | None) -> str:
    if share is None:
        return "-"
    return f"{share['attainment']:.0%} ({share['low']:.0%} to {share['high']:.0%}) of {share['requests']}"
