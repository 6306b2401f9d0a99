"""Runs rounds of variants until they are valid, and keeps all of them.

The order within a pair is drawn at random, so that a drift of the machine favours no variant. A round that says nothing
of its variant is discarded and repeated.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from rich.console import Console

from ridgeline.loadtest.errors import NotDisaggregatedError, RestartedError, ServerError
from ridgeline.loadtest.plan import DISAGGREGATED, MODES, ComparePlan
from ridgeline.loadtest.preparation import Prepared, prepared_before
from ridgeline.loadtest.report.pools import disaggregated_fraction, recomputes
from ridgeline.loadtest.report.rounds import Interruption, Round, Side, VariantLabel, labels_of
from ridgeline.loadtest.run.machine import Disturbance, disturbance, read_cpu
from ridgeline.loadtest.run.quantities import counted
from ridgeline.loadtest.run.records import RecordFile
from ridgeline.loadtest.run.replay import ReplayResult, RoundRequests, run_replay
from ridgeline.loadtest.run.server import Servers, with_slo_headers
from ridgeline.loadtest.run.server_metrics import until_whole
from ridgeline.loadtest.run.validity import discard_reasons
from ridgeline.loadtest.run.warm_up import warm_up_workers
from ridgeline.loadtest.run_folder import RECORDS, Past, RunFolder
from ridgeline.loadtest.trace.trace import Trace
from ridgeline.loadtest.variants import Variant

MIN_DISAGGREGATED_FRACTION = 0.99
MOST_REPEATS = 2
"""Repeats of one round in which a worker was lost; then the run ends."""
DISTURBED_REPEATS, CLEAN_ROUNDS_A_REPEAT = 2, 4
"""Repeats of disturbed rounds, and rounds without disturbance that earn one more.

After that, disturbance is taken to be the machine's normal state: rounds are kept and marked.
"""


@dataclass
class RoundRunner:
    """Runs rounds of the variants, all with the same settled plan, and no prompt's beginning twice."""

    variants: Mapping[Side, Variant]
    plan: ComparePlan
    ordinals_per_round: int
    """Prompts set apart for each round."""
    next_round_index: int
    cold: set[Side]
    """Variants whose server must be warmed up although nothing says that it has only just started."""
    is_alone: bool
    """Whether any work on this machine that this process did not start counts as a disturbance."""
    records_file: Path
    console: Console
    folder: RunFolder | None = None
    """Where each round is noted as it begins and ends; None for a run that cannot be resumed."""
    began_s: float = 0.0
    """The start, on time.monotonic's scale; what an interrupted comparison had spent counts."""
    rounds: list[Round] = field(default_factory=list)
    """All rounds so far, discarded ones included."""
    next_number: int = 0

    @property
    def labels(self) -> dict[Side, VariantLabel]:
        """The names of the variants."""
        return labels_of(*(variant.mode for variant in self.variants.values()))

    def take_up(self, past: Past) -> None:
        """Keep the rounds of an interrupted run, and use none of its numbers and prompts again."""
        self.rounds = list(past.rounds)
        self.next_number, self.next_round_index = past.next_number, past.next_round_index
        self.cold = set(self.variants)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest valid round, with its start if it needed one; of the first pair's only while alone.

        The servers are warmed up in the first pair, and later rounds start none unless they all do.
        """
        kept = [each.took_s for each in self.rounds if each.is_kept]
        return max(kept[len(self.variants) :] or kept, default=0.0)

    async def pair(self, pair: int, trace: Trace, title: str) -> dict[Side, ReplayResult]:
        """Run one valid round of each variant with these requests, in the order drawn for this pair.

        A round of this pair that was valid before an interruption is not run again.
        Raises LoadTestError, and NotDisaggregatedError after a round in that mode that did not use both pools.
        """
        requests = RoundRequests(trace, self.ordinals_per_round)
        return {
            side: self._done(pair, side) or await self._valid_round(pair, side, requests, title)
            for side in order_of(tuple(self.variants), self.plan.seed, pair)
        }

    def has_begun(self, pair: int) -> bool:
        """Return whether a valid round of this pair exists."""
        return any(each.pair == pair and each.is_kept for each in self.rounds)

    def _done(self, pair: int, side: Side) -> ReplayResult | None:
        found = (each.result for each in self.rounds if (each.pair, each.side) == (pair, side) and each.is_kept)
        return next(found, None)

    async def _valid_round(self, pair: int, side: Side, requests: RoundRequests, title: str) -> ReplayResult:
        """Run a round until it is valid; one that is only disturbed is kept once the repeats are used up."""
        lost = 0
        while True:
            began, began_s = datetime.now(UTC), time.monotonic()
            number = self.next_number
            self.next_number += 1
            label = self.labels[side]
            record_file = RecordFile(self.records_file, variant=side, mode=label, pair=pair, round=number)
            if self.folder is not None:  # a warm-up and a round take an index each
                self.folder.add_began(number, self.next_round_index + 2)
            result, others, reasons = await self._round(side, requests, f"{title}, {label}", record_file)
            is_kept = (
                result is not None
                and result.fleet_change is None
                and (not reasons or self._repeats >= self._most_repeats)
            )
            ended_s = time.monotonic()
            self.rounds.append(
                Round(side, pair, began, result, others, reasons, is_kept, number=number, took_s=ended_s - began_s)
            )
            if self.folder is not None:
                self.folder.add_ended(self.rounds[-1], ended_s - self.began_s)
            if result is not None and is_kept:
                return result
            verb = "repeated" if lost < MOST_REPEATS else "given up"
            self.console.print(
                f"{title}, {label}, discarded and {verb}: {'; '.join(reasons)}",
                style="yellow",
                highlight=False,
                markup=False,
            )
            if result is None or result.fleet_change is not None:
                lost += 1
                if lost > MOST_REPEATS:
                    raise ServerError(
                        f"a round of {self.labels[side]} was discarded {lost} times: {'; '.join(reasons)}"
                    )
                self.cold |= set(self.variants)

    def _told_slos(self, variant: Variant, server: str | Servers) -> str | Servers:
        """Return the server, told the plan's SLOs unless it is a running server.

        The pure modes do not serve by them, but mode adaptive goes by what came before its turn: requests without SLOs
        would have it look for the least latency.
        """
        slos = self.plan.slos
        return with_slo_headers(server, slos.ttft_ms, slos.tpot_ms) if variant.mode in MODES else server

    async def _round(
        self, side: Side, requests: RoundRequests, title: str, record_file: RecordFile
    ) -> tuple[ReplayResult | None, Disturbance | None, tuple[str, ...]]:
        variant = self.variants[side]
        reached = await variant.ready()
        server = self._told_slos(variant, reached.server)
        if reached.is_fresh or side in self.cold:
            self.cold.discard(side)
            asked = self.plan.model_copy(update=dict(reached.plan_changes))
            await until_whole(reached.server)
            await warm_up_workers(server, asked, requests, self._new_round_index(), self.console)
        before = await asyncio.to_thread(read_cpu, reached.processes)
        try:
            result = await run_replay(
                server,
                self.plan.model_copy(update=dict(reached.plan_changes)),
                self.console,
                label=title,
                round_index=self._new_round_index(),
                requests=requests,
                record_file=record_file,
            )
        except RestartedError as error:
            return None, None, (str(error),)
        after = await asyncio.to_thread(read_cpu, reached.processes)
        others = disturbance(before, after) if self.is_alone and reached.is_watched else None
        if variant.mode == DISAGGREGATED and any(record.ok for record in result.records):
            require_disaggregated(result)
        return result, others, discard_reasons(result, others, self.plan.slos)

    def _new_round_index(self) -> int:
        self.next_round_index += 1
        return self.next_round_index - 1

    @property
    def _repeats(self) -> int:
        """The number of rounds that were discarded only because of a disturbance."""
        return sum(
            not each.is_kept and each.result is not None and each.result.fleet_change is None for each in self.rounds
        )

    @property
    def _most_repeats(self) -> int:
        clean = sum(each.is_kept and not each.reasons for each in self.rounds)
        return DISTURBED_REPEATS + clean // CLEAN_ROUNDS_A_REPEAT


def new_runner(
    variants: Sequence[Variant],
    prepared: Prepared,
    records_file: Path,
    console: Console,
    *,
    is_alone: bool,
    began_s: float,
    folder: RunFolder | None = None,
) -> RoundRunner:
    """Return a runner of the prepared rounds of the variants, none of which has run."""
    return RoundRunner(
        variants=dict(zip(get_args(Side), variants, strict=False)),
        plan=prepared.plan,
        ordinals_per_round=prepared.ordinals_per_round,
        next_round_index=prepared.first_round_index,
        cold={"a"} if prepared.is_a_cold else set(),
        is_alone=is_alone,
        records_file=records_file,
        console=console,
        folder=folder,
        began_s=began_s,
    )


def taken_up(
    variants: Sequence[Variant], past: Past, console: Console, *, is_alone: bool, began_s: float | None
) -> tuple[RoundRunner, RunFolder, Interruption]:
    """Return a runner that goes on after the valid rounds of an interrupted run, its folder, and the interruption.

    The budget counts the time that it ran, and not the interruption.
    """
    folder = RunFolder(past.folder, past.settled.setup)
    interruption = Interruption(past.stopped, datetime.now(UTC))
    folder.add_resumed(interruption)
    valid = sum(each.is_kept for each in past.rounds)
    console.print(
        f"going on after {counted(valid, 'valid round')}; it was interrupted at {past.stopped:%Y-%m-%d %H:%M:%S} UTC",
        highlight=False,
    )
    runner = new_runner(
        variants,
        prepared_before(past),
        folder.path / RECORDS,
        console,
        is_alone=is_alone,
        began_s=(time.monotonic() if began_s is None else began_s) - past.spent_s,
        folder=folder,
    )
    runner.take_up(past)
    return runner, folder, interruption


def order_of(variants: Sequence[Side], seed: int, pair: int) -> tuple[Side, ...]:
    """Draw the order of a pair's rounds; the same one for the same seed and pair."""
    sides = list(variants)
    random.Random(f"order {seed} {pair}").shuffle(sides)
    return tuple(sides)


def require_disaggregated(result: ReplayResult) -> None:
    """Raise NotDisaggregatedError if too few requests went through both pools."""
    if result.metrics is None:
        raise NotDisaggregatedError(
            "the server publishes no ridgeline_ metrics on /metrics, so nothing shows that this run was disaggregated"
        )
    fraction = disaggregated_fraction(result.metrics)
    if fraction is None:
        raise NotDisaggregatedError("no request finished in a disaggregated run, so there is nothing to report")
    if fraction < MIN_DISAGGREGATED_FRACTION:
        raise NotDisaggregatedError(
            f"only {fraction:.1%} of the eligible requests went through both pools and "
            f"{MIN_DISAGGREGATED_FRACTION:.0%} must: this run was not disaggregated and is not reported as such "
            f"(recomputed, by reason: {recomputes(result.metrics) or 'none'})"
        )
