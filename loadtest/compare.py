"""Runs both arms on the same requests, in pairs of rounds, until they can be told apart or cannot.

Called by `cluster.commands.loadtest`.

The order within a pair is drawn at random, so that a drift of the machine favours no arm. Both rounds of a pair have
the same arrivals and lengths, and each pair has another window of the trace or another seed. No two rounds share a
prompt's beginning, so prefix caches are cold. A round that says nothing of its arm is void and repeated.

What the plan leaves to be measured is measured once, at arm a's server, and holds for both arms and all rounds.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from loadtest.arms import Arm
from loadtest.errors import NotDisaggregatedError, RestartedError, ServerError
from loadtest.plan import DISAGGREGATED, ComparePlan
from loadtest.report.page import write_report
from loadtest.report.pools import disaggregated_fraction, recomputes
from loadtest.report.rounds import ArmLabel, Round, labels_of, summarise_comparison
from loadtest.report.tables import print_comparison
from loadtest.run.calibration import (
    Course,
    Load,
    Workers,
    beside_arrivals_s,
    fit_budget,
    given_load,
    minutes_text,
    settle,
    workers_of,
)
from loadtest.run.machine import Disturbance, disturbance, read_cpu
from loadtest.run.replay import ReplayResult, RoundRequests, run_replay
from loadtest.run.server import first_model, open_http
from loadtest.run.unloaded import measure_unloaded, sizes_of
from loadtest.run.validity import void_reasons
from loadtest.run.warm_up import MOST_REQUESTS, MOST_WAVES, warm_up_workers
from loadtest.statistics.looks import looks_until
from loadtest.statistics.outcome import Conclusion, Side, conclude
from loadtest.statistics.pairs import PairDifference, pair_difference
from loadtest.trace.windows import PairTraces

MIN_DISAGGREGATED_FRACTION = 0.99
MOST_REPEATS = 2
"""Repeats of one round in which a worker was lost; then the comparison ends."""
DISTURBED_REPEATS, CLEAN_ROUNDS_A_REPEAT = 2, 4
"""Repeats of disturbed rounds in a comparison, and rounds without disturbance that earn one more.

After that the machine is taken to be like that, and rounds are kept and marked.
"""
SIDES: tuple[Side, Side] = ("a", "b")
STARTS_IN_A_PAIR = 1.5
"""Of arms that need a start each: with a random order every second pair begins with the arm that is running."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a comparison; `summary` is the content of summary.json."""

    summary: dict[str, Any]
    conclusion: Conclusion
    report: Path


async def compare(
    arms: tuple[Arm, Arm],
    plan: ComparePlan,
    out: Path,
    console: Console,
    *,
    workers: Workers | None = None,
    notes: tuple[str, ...] = (),
    is_alone: bool = True,
    began_s: float | None = None,
) -> Comparison:
    """Run pairs of rounds, write summary.json, records.jsonl and report.html into `out`, print tables and outcome.

    `workers` share the load, in units of the worker of arm a that is measured; without them its server says which.
    `notes` are said with the load. With `is_alone` all work of this machine that this process did not start disturbs.
    The plan's budget counts from `began_s`, on time.monotonic's scale; without it from now.
    Raises LoadTestError, and NotDisaggregatedError after the first round in that mode that did not use both pools.
    """
    run = _Run(arms, plan, out, console, is_alone, time.monotonic() if began_s is None else began_s)
    await run.prepare(workers, notes)
    await run.all_pairs()
    return run.finish()


@dataclass
class _Run:
    """A comparison that is going on."""

    arms: tuple[Arm, Arm]
    plan: ComparePlan
    out: Path
    console: Console
    is_alone: bool
    began_s: float
    rounds: list[Round] = field(default_factory=list)
    differences: list[PairDifference] = field(default_factory=list)
    looks: tuple[int, ...] = ()
    conclusion: Conclusion | None = None
    repeats: int = 0
    longest_s: float = 0.0
    """The longest valid round, with its start if it needed one."""
    next_round_index: int = 0
    notes: list[str] = field(default_factory=list)

    async def prepare(self, workers: Workers | None, notes: tuple[str, ...]) -> None:
        """Reach arm a, measure it if the plan asks for it, and settle rate, limits and what fits the budget."""
        self.records_file = _fresh_records_file(self.out)
        self.labels: dict[Side, ArmLabel] = labels_of(*(arm.mode for arm in self.arms))
        self.order = random.Random(self.plan.seed)
        if self.plan.budget_s is not None:
            self.console.print(f"this comparison takes about {minutes_text(self.plan.budget_s)}", highlight=False)
        reached = await self.arms[0].ready()
        base_url = reached.base_url
        self.cold = {"a"} if reached.is_fresh else set[str]()
        async with open_http(base_url) as http:
            card = await first_model(http, self.plan.served_name)
        trace = sizes_of(self.plan)
        load = given_load(self.plan, trace)
        measured_prompts = 0
        if self.plan.measures_first:
            unloaded = await measure_unloaded(base_url, self.plan, self.console, round_index=0)
            measured_prompts = len(trace.rows) + 1024
            self.plan, load = settle(self.plan, trace, unloaded, workers or workers_of(unloaded.workers))
            beside_s = beside_arrivals_s(self._rounds_plan, trace, unloaded)
            course = Course(STARTS_IN_A_PAIR, self.arms[0].start_s, beside_s)
            requests = PairTraces(self.plan, card.max_model_len).requests
            self.plan, load = fit_budget(self.plan, load, requests, course, time.monotonic() - self.began_s)
        self.traces = PairTraces(self.plan, card.max_model_len)
        self.load: Load = msgspec.structs.replace(load, notes=(*notes, *load.notes, self.traces.note))
        most = self.traces.prefix_ids + 1 + self.traces.most_requests
        self.ordinals = most + max(self.plan.warmup_requests, MOST_WAVES * MOST_REQUESTS)
        self.next_round_index = 1 + (self.traces.prefix_ids + measured_prompts) // self.ordinals
        for sentence in self.load.sentences(self.plan.limits):
            self.console.print(sentence, highlight=False, markup=False)

    async def all_pairs(self) -> None:
        """Run pairs until a look settles the outcome, the plan's pairs are done, or the time is up."""
        looks = looks_until(self.plan.pairs)
        for pair in range(self.plan.pairs):
            await self._pair(pair)
            done = len(self.differences)
            if done in looks:
                self._look()
            if done == self.plan.pairs or (self.conclusion is not None and self.conclusion.is_settled):
                break
            if self._is_over():
                if done not in looks:
                    self._look()
                break

    def _look(self) -> None:
        done = len(self.differences)
        self.looks = (*self.looks, done)
        self.conclusion = conclude(self.differences, self.looks, self.plan.pairs, self.plan.margin)
        self.console.print(
            f"after {done} {'pair' if done == 1 else 'pairs'}: {self.conclusion.outcome}", highlight=False
        )

    def finish(self) -> Comparison:
        """Write and print the result."""
        if self.conclusion is None:
            raise ServerError("no pair of rounds was finished, so there is nothing to compare")
        devices = {side: arm.devices for side, arm in zip(SIDES, self.arms, strict=True)}
        summary, records = summarise_comparison(
            self.conclusion, self.differences, self.rounds, self.labels, self.plan, self.load, devices
        )
        for told in ("notes", "sentences"):
            summary["load"][told] = [*summary["load"][told], *self.notes]
        (self.out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        report = write_report(self.out / "report.html", summary, records)
        print_comparison(summary, self.console)
        return Comparison(summary, self.conclusion, report)

    async def _pair(self, pair: int) -> None:
        sides = list(SIDES)
        self.order.shuffle(sides)
        trace = self.traces.of_pair(pair)
        found: dict[Side, ReplayResult] = {}
        for side in sides:
            found[side] = await self._valid_round(pair, side, RoundRequests(trace, self.ordinals))
        self.differences.append(pair_difference(found["a"].records, found["b"].records, self.plan.limits))

    async def _valid_round(self, pair: int, side: Side, requests: RoundRequests) -> ReplayResult:
        """Run a round until it is valid; one that is only disturbed is kept once there were enough repeats."""
        lost = 0
        while True:
            began, began_s = datetime.now(UTC), time.monotonic()
            result, others, reasons = await self._round(pair, side, requests)
            is_kept = (
                result is not None
                and result.fleet_change is None
                and (not reasons or self.repeats >= self._most_repeats)
            )
            self.rounds.append(Round(side, pair, began, result, others, reasons, is_kept))
            if result is not None:
                _append_records(self.records_file, self.rounds[-1], self.labels[side])
            if result is not None and is_kept:
                self.longest_s = max(self.longest_s, time.monotonic() - began_s)
                return result
            verb = "repeated" if lost < MOST_REPEATS else "given up"
            self.console.print(f"void and {verb}: {'; '.join(reasons)}", style="yellow", highlight=False, markup=False)
            if result is None or result.fleet_change is not None:
                lost += 1
                if lost > MOST_REPEATS:
                    raise ServerError(f"a round of {self.labels[side]} was void {lost} times: {'; '.join(reasons)}")
            else:
                self.repeats += 1

    async def _round(
        self, pair: int, side: Side, requests: RoundRequests
    ) -> tuple[ReplayResult | None, Disturbance | None, tuple[str, ...]]:
        arm = self.arms[SIDES.index(side)]
        reached = await arm.ready()
        if reached.is_fresh or side in self.cold:
            self.cold.discard(side)
            await warm_up_workers(reached.base_url, self.plan, requests, self._new_round_index(), self.console)
        label = f"pair {pair + 1} of at most {self.plan.pairs}, {self.labels[side]}"
        before = await asyncio.to_thread(read_cpu)
        try:
            result = await run_replay(
                reached.base_url,
                self._rounds_plan,
                self.console,
                label=label,
                round_index=self._new_round_index(),
                requests=requests,
            )
        except RestartedError as error:
            return None, None, (str(error),)
        others = disturbance(before, await asyncio.to_thread(read_cpu)) if self.is_alone else None
        if arm.mode == DISAGGREGATED:
            require_disaggregated(result)
        return result, others, void_reasons(result, others, self.plan.limits)

    @property
    def _rounds_plan(self) -> ComparePlan:
        """The plan of a round, whose server is warm already."""
        return self.plan.model_copy(update={"warmup_requests": 0})

    def _new_round_index(self) -> int:
        self.next_round_index += 1
        return self.next_round_index - 1

    @property
    def _most_repeats(self) -> int:
        clean = sum(each.is_kept and not each.reasons for each in self.rounds)
        return DISTURBED_REPEATS + clean // CLEAN_ROUNDS_A_REPEAT

    def _is_over(self) -> bool:
        """Return whether another pair of rounds, as long as the longest, would end after the budget."""
        budget_s = self.plan.budget_s
        if budget_s is None or time.monotonic() - self.began_s + 2 * self.longest_s <= budget_s:
            return False
        done = len(self.differences)
        pairs = "1 pair" if done == 1 else f"{done} pairs"
        self.notes.append(f"ended after {pairs}, since another would not fit into the time")
        return True


def _fresh_records_file(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "records.jsonl"
    path.unlink(missing_ok=True)
    return path


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


def _append_records(path: Path, each: Round, label: str) -> None:
    records: Sequence[Any] = each.result.records if each.result else ()
    with path.open("ab") as lines:
        lines.writelines(
            record.as_line(arm=each.side, mode=label, pair=each.pair, valid=each.is_kept) for record in records
        )
