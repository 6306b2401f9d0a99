"""Runs rounds of variants until they are valid, and keeps all of them.

The order within a pair is drawn at random, so that a drift of the machine favours no variant. A round that says nothing
of its variant is discarded and repeated.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import get_args

from rich.console import Console

from ridgeline.loadtest.errors import NotDisaggregatedError, RestartedError, ServerError
from ridgeline.loadtest.plan import DISAGGREGATED, MODES, Slo
from ridgeline.loadtest.report.pools import disaggregated_fraction, recomputes
from ridgeline.loadtest.report.rounds import Round, Side, labels_of
from ridgeline.loadtest.run.machine import Disturbance, disturbance, read_cpu
from ridgeline.loadtest.run.records import RecordFile
from ridgeline.loadtest.run.replay import ReplayResult, RoundRequests, run_replay
from ridgeline.loadtest.run.server import Servers, with_slo_headers
from ridgeline.loadtest.run.server_metrics import until_whole
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
P99_LAG_SHARE, MAX_LAG_SHARE = 0.02, 0.10
"""Of the TTFT SLO, since lateness adds to the TTFT that is judged: they change few requests' fate.

A fixed 5 ms would discard most rounds on a machine of two busy cores, where 20 ms mean nothing against seconds.
"""
MOST_STOLEN, MOST_OTHER = 0.05, 0.10
"""Shares of all cores' time; the scatter between rounds is about as large as the second."""


class RoundRunner:
    """Runs rounds of the variants, all with the same settled plan, and no prompt's beginning twice."""

    def __init__(
        self, variants: Sequence[Variant], past: Past, console: Console, *, is_alone: bool, began_s: float
    ) -> None:
        """Go on after the rounds of `past`. `began_s` is the start on time.monotonic's scale, without interruptions.

        With `is_alone` any work on this machine that this process did not start counts as a disturbance.
        """
        self.variants: dict[Side, Variant] = dict(zip(get_args(Side), variants, strict=False))
        self.labels = labels_of(*(variant.mode for variant in variants))
        self.plan, self.console, self.began_s = past.settled.settled_plan(), console, began_s
        self.rounds = list(past.rounds)
        """All rounds so far, discarded ones included."""
        self._settled, self._folder, self._is_alone = past.settled, RunFolder(past.folder), is_alone
        self._next_number = past.next_number
        self._cold = set(self.variants)
        """Variants that must be warmed up although nothing says that their server has only just started."""

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
        requests = RoundRequests(trace, self._settled.ordinals_per_round)
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
            number, label = self._next_number, self.labels[side]
            self._next_number += 1
            records = RecordFile(self._folder.path / RECORDS, variant=side, mode=label, pair=pair, round=number)
            result, others, reasons = await self._round(side, requests, f"{title}, {label}", number, records)
            is_kept = (
                result is not None
                and result.fleet_change is None
                and (not reasons or self._repeats >= self._most_repeats)
            )
            ended_s = time.monotonic()
            self.rounds.append(
                Round(side, pair, began, result, others, reasons, is_kept, number=number, took_s=ended_s - began_s)
            )
            self._folder.add_ended(self.rounds[-1], ended_s - self.began_s)
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
                self._cold |= set(self.variants)

    def _told_slos(self, variant: Variant, server: str | Servers) -> str | Servers:
        """Return the server, told the plan's SLOs unless it is a running server.

        The pure modes do not serve by them, but mode adaptive goes by what came before its turn: requests without SLOs
        would have it look for the least latency.
        """
        slos = self.plan.slos
        return with_slo_headers(server, slos.ttft_ms, slos.tpot_ms) if variant.mode in MODES else server

    async def _round(
        self, side: Side, requests: RoundRequests, title: str, number: int, record_file: RecordFile
    ) -> tuple[ReplayResult | None, Disturbance | None, tuple[str, ...]]:
        variant, index = self.variants[side], self._settled.first_round_index + 2 * number  # a warm-up and a round
        reached = await variant.ready(f"compare: {title}")
        server = self._told_slos(variant, reached.server)
        if reached.is_fresh or side in self._cold:
            self._cold.discard(side)
            asked = self.plan.model_copy(update=dict(reached.plan_changes))
            await until_whole(reached.server)
            await warm_up_workers(server, asked, requests, index, self.console)
        before = await asyncio.to_thread(read_cpu, reached.processes)
        try:
            result = await run_replay(
                server,
                self.plan.model_copy(update=dict(reached.plan_changes)),
                self.console,
                label=title,
                round_index=index + 1,
                requests=requests,
                record_file=record_file,
            )
        except RestartedError as error:
            return None, None, (str(error),)
        after = await asyncio.to_thread(read_cpu, reached.processes)
        others = disturbance(before, after) if self._is_alone and reached.is_watched else None
        if variant.mode == DISAGGREGATED and any(record.ok for record in result.records):
            require_disaggregated(result)
        return result, others, discard_reasons(result, others, self.plan.slos)

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


def discard_reasons(result: ReplayResult, others: Disturbance | None, limits: Slo) -> tuple[str, ...]:
    """Return why the round is discarded, a sentence each; empty if it is valid."""
    reasons = [result.fleet_change] if result.fleet_change else []
    p99_ms, max_ms = result.p99_send_lag_s * 1e3, result.max_send_lag_s * 1e3
    if p99_ms > P99_LAG_SHARE * limits.ttft_ms or max_ms > MAX_LAG_SHARE * limits.ttft_ms:
        reasons.append(
            f"requests left late: p99 {p99_ms:.0f} ms, the latest {max_ms:.0f} ms; the TTFT SLO allows "
            f"{P99_LAG_SHARE * limits.ttft_ms:.0f} and {MAX_LAG_SHARE * limits.ttft_ms:.0f} ms"
        )
    if others is not None and others.stolen > MOST_STOLEN:
        reasons.append(f"the host gave {others.stolen:.0%} of this machine's CPU time to other guests")
    if others is not None and others.other > MOST_OTHER:
        reasons.append(f"other work took {others.other:.0%} of this machine's CPU time")
    return tuple(reasons)
