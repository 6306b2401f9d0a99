"""Regret on engines: of 100 requests, how many fewer are in time than by the best of the modes, which were all tried.

A cell is a shape, SLOs and a load: the rounds of `tools.bench.modes` that have the same arrivals, one in each mode.
`plan` sees the shape's recording, of other requests, and these arrivals; it recommends a mode for as many workers, and
says what TTFT and TPOT each mode will have.

usage: python -m tools.bench.regret_on_engines runs/bench-modes.jsonl runs/recordings --machine zen4 --commit COMMIT
    [--out docs/results/regret-engines.json]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from ridgeline.cluster.commands.whatif import Layout, doubt
from ridgeline.router.scheduler.offline_simulation import (
    Served,
    calibrated,
    fleet_of,
    percentiles,
    ranked,
    recorded,
)
from ridgeline.router.scheduler.recorded_events import read_recording
from tools.bench.modes import MODES, Measured
from tools.bench.regret import GOAL, summary
from tools.docs.measurements import RESULTS, Record, Section, Value

COMMAND: Final = (
    "python -m tools.bench.modes --slos 2.5:1.5,5:2 --loads 0.6,0.9,1.2 --rounds 1 --record DIR --out OUT; "
    "python -m tools.bench.regret_on_engines OUT DIR"
)
INTRO: Final = (
    "Two workers of SmolLM2-135M, a core each. Regret: of 100 requests, how many fewer are in time than by the best of "
    "the three modes. The three figures are median, mean and worst over cells. A cell is a shape, SLOs and a load, "
    "with 28 requests in each mode: within one, some 10 of 100 may be chance. "
    "Tight SLOs are x2.5 TTFT and x1.5 TPOT of a request "
    "alone, balanced ones x5 and x2. Loads are parts of the rate that 32 requests at once have in `colocated`. `plan` "
    "sees a recording of 84 other requests in `colocated`, 28 at each load; plan (N) is over the N cells in which it "
    "answered. Its errors are the median and the 90th percentile over predictions of one mode in one cell. That it "
    "simulates `adaptive` as on a warm server was decided after these cells had been seen: before, its mean regret was "
    "7.0. `e2642911` served; its engines and router are those of the commit named."
)
TIMES: Final = ("TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90")


class EngineCell(msgspec.Struct, frozen=True):
    """What became of the requests of one cell."""

    shape: str
    slos: str
    load: float
    in_time: dict[str, float]
    """The part of the requests, by mode."""
    recommended: str
    doubt: str
    """Why `plan` says that it does not know, or nothing."""
    errors: dict[str, tuple[float, ...]]
    """By mode, of `TIMES`: what `plan` says over what was seen, less one."""

    def regret(self, mode: str) -> float:
        """Return what is lost in a mode, in requests of 100."""
        return 100 * (max(self.in_time.values()) - self.in_time[mode])

    @property
    def named(self) -> str:
        """All that it is."""
        return f"{self.shape}, {self.slos} SLOs, load {self.load:g}"


def cell_of(rounds: Sequence[Measured], recording: Path, slos: str) -> EngineCell:
    """Return the cell of these rounds, one for each mode, and of what `plan` says before them."""
    spec, first = rounds[0].spec, rounds[0]
    slos_s = spec.ttft_slo_s, spec.tpot_slo_s
    served = [
        Served(arrival_s, *lengths, *slos_s)
        for arrival_s, lengths in sorted(zip(first.arrival_s, first.lengths, strict=True))
    ]
    with recording.open("rb") as lines:
        known = recorded(read_recording(lines, str(recording)))
    calibration = calibrated(known, *slos_s)
    planned = ranked(served, fleet_of(known.fleet, len(known.fleet.workers)), GOAL, (), calibration)
    predicted = {one.policy.partition(" ")[0]: (*one.ttft_s, *one.tpot_s) for one in planned}
    errors = {}
    for one in rounds:
        seen_s = *percentiles(one.ttft_s), *percentiles([tpot_s for tpot_s in one.tpot_s if tpot_s])
        pairs = zip(predicted[one.spec.mode], seen_s, strict=True)
        errors[one.spec.mode] = tuple(round(said_s / really_s - 1, 3) for said_s, really_s in pairs)
    return EngineCell(
        shape=spec.shape,
        slos=slos,
        load=spec.load,
        in_time={one.spec.mode: one.in_time / one.requests for one in rounds},
        recommended=next(iter(predicted)),
        doubt=doubt(planned[0], Layout(known.fleet, (), calibration)),
        errors=errors,
    )


def cells_of(rounds: Iterable[Measured], recordings: Path) -> list[EngineCell]:
    """Return the cells of which all modes are there; the level of SLOs with the lower TTFT is the tight one."""
    levels = defaultdict[str, set[float]](set)
    by_cell = defaultdict[tuple[str, float, float, int], list[Measured]](list)
    for one in rounds:
        levels[one.spec.shape].add(one.spec.ttft_slo_s)
        if one.spec.mode in MODES:
            by_cell[one.spec.shape, one.spec.ttft_slo_s, one.spec.load, one.spec.round].append(one)
    if strange := [shape for shape, slos in levels.items() if len(slos) != 2]:
        raise ValueError(f"{', '.join(strange)}: give the rounds of one run, with two levels of SLOs")
    return [
        cell_of(
            those,
            recordings / f"{shape.replace('/', '-')}.jsonl",
            "tight" if ttft_slo_s == min(levels[shape]) else "balanced",
        )
        for (shape, ttft_slo_s, *_), those in by_cell.items()
        if {one.spec.mode for one in those} == {*MODES}
    ]


def section(found: Sequence[EngineCell], machine: str, commit: str) -> Section:
    """Return regret over all cells, by load and by shape, and the errors of `plan`."""
    known = [one for one in found if not one.doubt]

    def record(what: str, shape: str, unit: str, figure: Value, beside: Sequence[Value], note: str = "") -> Record:
        today = datetime.now(UTC).date().isoformat()
        return Record(what, shape, unit, figure, tuple(beside), machine, today, commit, COMMAND, note=note)

    def regret(name: str, those: Sequence[EngineCell]) -> Record:
        sure = [one for one in those if not one.doubt]
        worst = max(those, key=lambda one: one.regret("adaptive"))
        beside = [summary(mode, [one.regret(mode) for one in those]) for mode in ("colocated", "disaggregated")]
        if sure:
            beside.insert(0, summary(f"plan ({len(sure)})", [one.regret(one.recommended) for one in sure]))
        if sure and len(sure) < len(those):
            beside.insert(1, summary("adaptive there", [one.regret("adaptive") for one in sure]))
        figure = summary("adaptive", [one.regret("adaptive") for one in those])
        shape = f"{name}{len(those)} cells"
        note = f"Adaptive is worst at {worst.named}" if worst.regret("adaptive") >= 1 else ""
        return record("regret on engines", shape, "of 100", figure, beside, note)

    def off(index: int, mode: str) -> Value:
        return Value(
            mode, tuple(round(100 * size) for size in percentiles(abs(one.errors[mode][index]) for one in known))
        )

    groups = {"": [*found]}
    for one in found:
        groups.setdefault(f"load {one.load:g}, ", []).append(one)
    for one in found:
        groups.setdefault(f"{one.shape}, ", []).append(one)
    figures = [regret(name, those) for name, those in groups.items()]
    for index, time in enumerate(TIMES):
        colocated, *others = (off(index, mode) for mode in MODES)
        figures.append(record("error of `plan`", f"{time}, {len(known)} cells", "%", colocated, others))
    raw = {"cells": [msgspec.structs.asdict(one) for one in found]}
    return Section("Regret on engines", INTRO, tuple(figures), raw=raw)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=Path)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "regret-engines.json")
    parser.add_argument("--machine", required=True, help="a key of docs/results/machines.json")
    parser.add_argument("--commit", required=True, help="that served")
    asked = parser.parse_args(arguments)
    rounds = [msgspec.json.decode(line, type=Measured) for line in asked.rounds.read_bytes().splitlines()]
    made = section(cells_of(rounds, asked.recordings), asked.machine, asked.commit)
    asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")


if __name__ == "__main__":
    main()
