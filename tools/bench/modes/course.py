"""Runs the rounds of one workload: the idle server, the knee, then blocks of rounds until its time is up.

A whole block has rounds of every mode, in random order. It is followed by climbs: rounds of the adaptive mode alone, in
cells where another rate may serve more, with the arrivals that the other modes had at that rate in the whole block.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from rich.console import Console

from loadtest.rate_search import Round
from loadtest.run.calibration import beside_arrivals_s, minutes_text, most_rate, workers_of
from loadtest.run.unloaded import sizes_of
from tools.bench.modes.budget import block_s, plan_blocks
from tools.bench.modes.cells import counted, limits_of
from tools.bench.modes.fleet import Fleet, RoundResult, hopeless_after_s, round_plan
from tools.bench.modes.journal import (
    SEARCH,
    BlockPlanned,
    Chosen,
    Ended,
    Journal,
    Limits,
    Measured,
    Place,
    RoundEnded,
    RoundSpec,
)
from tools.bench.modes.rates import better_knee, next_cell_rate, next_search_rate
from tools.bench.modes.settings import ADAPTIVE, Settings
from tools.bench.modes.workloads import Workload

T = TypeVar("T")
LEAST_SEARCH_REQUESTS: Final = 10
SEARCH_SPAN: Final = 4.0
"""Arrivals of a round of the search last this many limits of TTFT: a shorter burst is over before a queue at a rate
beyond the knee has grown to the limit."""
FIRST_SHARE: Final = 0.8
"""The search begins at this share of what the workers are calculated to hold."""
CLIMBS: Final = 1.4
"""The other rates that a cell is expected to have to try after a block."""
MOST_REPEATS: Final = 2
"""Repeats of a round in which a worker was lost; then the run goes on without it."""


@dataclass
class Clock:
    """The time of the run, interruptions left out."""

    began_s: float
    """On time.monotonic's scale; earlier by what was spent before an interruption."""
    budget_s: float

    @property
    def spent_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.began_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget_s - self.spent_s


@dataclass
class Course:
    """The rounds of one workload; what the journal has is not run again."""

    workload: Workload
    settings: Settings
    fleet: Fleet
    journal: Journal
    clock: Clock
    ends_s: float
    """The time of the clock at which this workload has had its share."""
    console: Console

    async def run(self) -> None:
        """Measure, search, and run blocks. Raises LoadTestError if the server cannot be reached."""
        measured = self.journal.measured(self.workload.name) or await self._measure()
        limits = limits_of(self.settings, measured.unloaded)
        beside_s = beside_arrivals_s(
            self.workload.plan.of_warm_round(), sizes_of(self.workload.plan), measured.unloaded
        )
        rounds = _Rounds(self, limits)
        await rounds.warm_up()
        chosen = self.journal.chosen(self.workload.name) or await self._choose(measured, rounds)
        self._say(f"rates {', '.join(f'{rate:.3g}' for rate in chosen.rates)} requests/s; knee {chosen.source}")
        note = await self._blocks(chosen, rounds, beside_s)
        self.journal.add(Ended(self.workload.name, note, self.clock.spent_s))

    async def _measure(self) -> Measured:
        self._say(f"{self.workload.note}; measuring the idle server")
        unloaded = await self.fleet.measure(self.settings.pure_arms[0], self.workload.plan)
        found = Measured(self.workload.name, self.workload.note, unloaded, self.clock.spent_s)
        self.journal.add(found)
        self._say(f"unloaded TTFT {unloaded.median_ttft_s:.3g} s, step {unloaded.median_tpot_s * 1e3:.3g} ms")
        return found

    async def _choose(self, measured: Measured, rounds: _Rounds) -> Chosen:
        """Find the knee of the better pure mode, unless it is given."""
        name, settings = self.workload.name, self.settings
        if name in settings.knees:
            knee, source = settings.knees[name], "as given"
        else:
            tpot_s = rounds.limits[settings.balanced].tpot_ms / 1e3
            most, _ = most_rate(measured.unloaded, workers_of(measured.unloaded.workers), tpot_s)
            knee, source = await self._search(float(f"{FIRST_SHARE * most:.3g}"), rounds)
        rates = tuple(float(f"{knee * factor:.3g}") for factor in settings.rate_factors)
        found = Chosen(name, knee, f"{knee:.3g}: {source}", tuple(sorted(set(rates))), self.clock.spent_s)
        self.journal.add(found)
        return found

    async def _search(self, start: float, rounds: _Rounds) -> tuple[float, str]:
        """Run small rounds of each pure mode at rates that bracket the knee of the better one."""
        found: dict[str, list[Round]] = {arm: [] for arm in self.settings.pure_arms}
        balanced = self.settings.balanced
        limits = rounds.limits[balanced]
        while (rate := next_search_rate({arm: each for arm, each in found.items() if each}, start)) is not None:
            tried = len(next(iter(found.values())))
            for arm in shuffled(self.settings.pure_arms, f"{self.settings.seed} search {tried}"):
                spec = RoundSpec(self.workload.name, SEARCH, arm, rate, tried, search_requests(rate, limits))
                ended = await rounds.run(spec)
                if ended is not None:
                    found[arm] += counted([ended], arm, balanced, limits)
            if not all(found.values()):
                break
        return better_knee({arm: each for arm, each in found.items() if each})

    async def _blocks(self, chosen: Chosen, rounds: _Rounds, beside_s: float) -> str | None:
        """Run blocks while there is time, each whole one followed by climbs; return a sentence if one was cut."""
        name = self.workload.name
        while True:
            for block in self.journal.blocks(name):
                if not await self._run_block(block, rounds):
                    return f"the time was up within block {block.block}: its other rounds were left out"
            before = self.journal.blocks(name)
            if before and (before[-1].rounds or not before[-1].is_climb):
                planned: BlockPlanned | None = self._plan_climb(before, chosen, rounds)
            else:
                planned = self._plan_block(before, chosen, rounds, self._beside_s(beside_s))
            if planned is None:
                return None if before else "the time is too short for one block of rounds: give a larger --budget-s"
            self.journal.add(planned)

    def _plan_block(
        self, before: Sequence[BlockPlanned], chosen: Chosen, rounds: _Rounds, beside_s: float
    ) -> BlockPlanned | None:
        """Draw the rounds of the next whole block and their order; None if there were enough, or there is no time."""
        number, whole = len(before) + 1, sum(not block.is_climb for block in before)
        if whole == self.settings.most_blocks:
            return None
        name, rates = self.workload.name, chosen.rates
        cells = self.settings.cells if ADAPTIVE in self.settings.arms else ()
        at = {place: next_cell_rate(rates, chosen.knee, *rounds.counted_at(place)) for place in cells}
        of_rounds = [rate for _ in self.settings.pure_arms for rate in rates] + list(at.values())
        climbing = [statistics.fmean(rates)] * math.ceil(CLIMBS * len(at))
        left_s = self.ends_s - self.clock.spent_s
        most = self.settings.most_blocks - whole
        plan = plan_blocks([*of_rounds, *climbing], left_s, beside_s, most, self.settings.requests)
        if plan.blocks == 0:
            return None
        windows = {rate: whole * len(rates) + place for place, rate in enumerate(rates)}
        specs = [
            RoundSpec(name, number, arm, rate, windows[rate], plan.requests)
            for arm in self.settings.pure_arms
            for rate in rates
        ]
        specs += [
            RoundSpec(name, number, ADAPTIVE, rate, windows[rate], plan.requests, place) for place, rate in at.items()
        ]
        expected_s = block_s(of_rounds, plan.requests, beside_s)
        self._say(
            f"block {number}: {len(specs)} rounds of {plan.requests} requests, about {minutes_text(expected_s)} of the "
            f"{minutes_text(left_s)} that this workload has left"
        )
        order = shuffled(specs, f"{self.settings.seed} {name} {number}")
        return BlockPlanned(name, number, False, tuple(order), self.clock.spent_s)

    def _plan_climb(self, before: Sequence[BlockPlanned], chosen: Chosen, rounds: _Rounds) -> BlockPlanned:
        """Draw rounds of the adaptive mode for cells with a rate to try, with the arrivals of the last whole block."""
        number, name = len(before) + 1, self.workload.name
        whole = [block for block in before if not block.is_climb][-1]
        windows = {each.rate: each.window for each in whole.rounds}
        tried = {(each.cell, each.rate) for block in before for each in block.rounds}
        cells = self.settings.cells if ADAPTIVE in self.settings.arms else ()
        at = {place: next_cell_rate(chosen.rates, chosen.knee, *rounds.counted_at(place)) for place in cells}
        specs = [
            RoundSpec(name, number, ADAPTIVE, rate, windows[rate], whole.rounds[0].requests, place)
            for place, rate in at.items()
            if (place, rate) not in tried
        ]
        if specs:
            self._say(f"block {number}: {len(specs)} rounds of adaptive, where it has a rate still to try")
        order = shuffled(specs, f"{self.settings.seed} {name} {number}")
        return BlockPlanned(name, number, True, tuple(order), self.clock.spent_s)

    async def _run_block(self, block: BlockPlanned, rounds: _Rounds) -> bool:
        """Run what is left of a block; return False if a round would end after this workload's time."""
        for number, spec in enumerate(block.rounds, start=1):
            if self.journal.done(spec) is not None:
                continue
            if self.clock.spent_s + spec.requests / spec.rate > self.ends_s:
                return False
            await rounds.run(spec, f"{number}/{len(block.rounds)}")
        return True

    def _beside_s(self, estimated_s: float) -> float:
        """Return what a round took beside its arrivals so far; before the first, what was estimated."""
        took = [each.took_s - each.spec.requests / each.spec.rate for each in self.journal.rounds(self.workload.name)]
        return max(0.0, statistics.fmean(took)) if took else estimated_s

    def _say(self, sentence: str) -> None:
        left = minutes_text(max(0.0, self.clock.left_s))
        self.console.print(f"[{left} left] {self.workload.name}: {sentence}", highlight=False, markup=False)


class _Rounds:
    """Runs single rounds of a course, and counts them."""

    def __init__(self, course: Course, limits: Mapping[Place, Limits]) -> None:
        self._course = course
        self.limits = limits
        loosest = limits[max(limits)]
        deadline_s = hopeless_after_s(loosest, course.workload.longest_output_tokens())
        self._plan = round_plan(course.workload.plan, limits[min(limits)], deadline_s)

    async def warm_up(self) -> None:
        """Let every worker make steps in each pure mode."""
        trace = self._course.workload.round_trace(0, LEAST_SEARCH_REQUESTS, 1.0, self._course.fleet.max_model_tokens)
        for arm in self._course.settings.pure_arms:
            await self._course.fleet.warm_up(arm, trace, self._plan)

    async def run(self, spec: RoundSpec, place: str = "search") -> RoundEnded | None:
        """Run a round, again if it is void, and write it down; None if it stayed void."""
        if (done := self._course.journal.done(spec)) is not None:
            return done
        for _ in range(1 + MOST_REPEATS - self._course.journal.void_rounds(spec)):
            ended = await self._once(spec)
            self._tell(ended, place)
            if ended.void is None:
                return ended
        return None

    def counted_at(self, place: Place) -> tuple[list[Round], dict[str, list[Round]]]:
        """Return what the adaptive mode and the others met of a cell; of the others, before their first block, in the
        search."""
        course = self._course
        done = course.journal.rounds(course.workload.name)
        judged = [each for each in done if each.spec.block != SEARCH] or done
        limits = self.limits[place]
        others = {arm: counted(judged, arm, place, limits) for arm in course.settings.pure_arms}
        return counted(judged, ADAPTIVE, place, limits), {arm: each for arm, each in others.items() if each}

    async def _once(self, spec: RoundSpec) -> RoundEnded:
        course, journal = self._course, self._course.journal
        trace = course.workload.round_trace(spec.window, spec.requests, spec.rate, course.fleet.max_model_tokens)
        limits = None if spec.cell is None else self.limits[spec.cell]
        number = journal.next_number
        labels: dict[str, str | int] = {"round": number, "workload": spec.workload, "block": spec.block}
        if limits is not None:
            labels |= {"ttft_limit_ms": f"{limits.ttft_ms:g}", "tpot_limit_ms": f"{limits.tpot_ms:g}"}
        found: RoundResult = await course.fleet.round(spec.arm, trace, self._plan, limits, labels)
        ended = found.ended(number, spec, course.clock.spent_s, course.fleet.next_ordinal)
        journal.add(ended)
        return ended

    def _tell(self, ended: RoundEnded, place: str) -> None:
        spec, course = ended.spec, self._course
        cell = course.settings.balanced if spec.cell is None else spec.cell
        limits = self.limits[cell]
        met = sum(one.meets(limits) for one in ended.outcomes)
        failed = sum(one.ttft_ms is None for one in ended.outcomes)
        words = [
            f"{place} {spec.arm} at {spec.rate:.3g} requests/s: {met} of {len(ended.outcomes)} within "
            f"{limits.ttft_ms:g} and {limits.tpot_ms:g} ms",
            f"{failed} failed or given up" if failed else "",
            f"{ended.took_s:.0f} s",
            f"VOID: {ended.void}" if ended.void else "",
            f"disturbed: {'; '.join(ended.disturbed)}" if ended.disturbed and not ended.void else "",
        ]
        course._say(", ".join(word for word in words if word))


def search_requests(rate: float, limits: Limits) -> int:
    """Return the requests of a round of the search at this rate, in requests/s."""
    return max(LEAST_SEARCH_REQUESTS, math.ceil(rate * SEARCH_SPAN * limits.ttft_ms / 1e3))


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """Return the items in an order drawn from the seed."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order
