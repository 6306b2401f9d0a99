"""What has been measured so far: a line of rounds.jsonl for each thing that was found, in its file when it is told.

A run that is resumed reads them, and does nothing again that has a line. A line that was cut when the process was
killed is left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.loadtest.run.machine import describe_machine
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.unloaded import Unloaded
from ridgeline.loadtest.run_folder import ROUNDS, SUMMARY
from tools.bench.modes.settings import Settings

Place = tuple[int, int]
"""A cell of the map: places of its TTFT and of its TPOT limit."""


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


class Limits(msgspec.Struct, frozen=True):
    """The limits of a cell, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


def limits_of(unloaded: Unloaded, ttft_factor: float, tpot_factor: float) -> Limits:
    """Return multiples of what the idle server took, with three digits."""
    ttft_ms, tpot_ms = ttft_factor * unloaded.median_ttft_s * 1e3, tpot_factor * unloaded.median_tpot_s * 1e3
    return Limits(float(f"{ttft_ms:.3g}"), float(f"{tpot_ms:.3g}"))


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """How one request ended; times in milliseconds, the first token's from the time at which it should be sent."""

    ttft_ms: float | None
    """None for a request that failed, was refused or was given up."""
    tpot_ms: float | None = None
    """None for an answer of one token, which has no TPOT to miss."""

    def meets(self, limits: Limits) -> bool:
        """Return whether it finished within both limits."""
        return (
            self.ttft_ms is not None
            and self.ttft_ms <= limits.ttft_ms
            and (self.tpot_ms is None or self.tpot_ms <= limits.tpot_ms)
        )


def outcome_of(record: RequestRecord) -> Outcome:
    """Return what a record says of the limits; whatever did not finish is missed."""
    if not record.ok or record.ttft_scheduled_s is None:
        return Outcome(None)
    tpot_s = record.tpot_s
    return Outcome(record.ttft_scheduled_s * 1e3, None if tpot_s is None else tpot_s * 1e3)


class RoundSpec(msgspec.Struct, frozen=True):
    """A round that is to be run; rounds with the same window, rate and number of requests have the same arrivals."""

    workload: str
    block: int
    variant: str
    rate: float
    window: int
    requests: int
    cell: Place | None = None
    """The cell whose limits the mode is told; None for a mode that knows none."""


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """What an idle server took for a workload's requests."""

    workload: str
    unloaded: Unloaded
    spent_s: float


class RoundEnded(msgspec.Struct, frozen=True, tag="round"):
    """A round, and how each of its requests ended, in the order of the trace."""

    number: int
    spec: RoundSpec
    began: datetime
    took_s: float
    outcomes: tuple[Outcome, ...]
    disturbed: tuple[str, ...]
    """What disturbed it; it is kept all the same, and marked."""
    void: str | None
    """Why it says nothing; it was repeated then."""
    spent_s: float
    next_ordinal: int
    """The first prompt that no request had yet."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A workload has had its time; `note` says what was left out."""

    workload: str
    note: str | None
    spent_s: float


Line = Measured | RoundEnded | Ended


@dataclass
class Journal:
    """The lines of a run; `add` appends one to the file."""

    folder: Path
    lines: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Append a line; it is on the disk when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / ROUNDS
        cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        with path.open("ab") as lines:
            lines.write((b"\n" if cut else b"") + msgspec.json.encode(line) + b"\n")
            lines.flush()
            os.fsync(lines.fileno())
        self.lines.append(line)

    def measured(self, workload: str) -> Measured | None:
        """Return what the idle server took for this workload, if it was measured."""
        return next((line for line in self.lines if isinstance(line, Measured) and line.workload == workload), None)

    def ended(self, workload: str) -> Ended | None:
        """Return the end of this workload, if it was reached."""
        return next((line for line in self.lines if isinstance(line, Ended) and line.workload == workload), None)

    def rounds(self, workload: str | None = None) -> list[RoundEnded]:
        """Return the rounds that count, of one workload or of all."""
        found = (line for line in self.lines if isinstance(line, RoundEnded) and line.void is None)
        return [line for line in found if workload in (None, line.spec.workload)]

    def done(self, spec: RoundSpec) -> RoundEnded | None:
        """Return the round of this specification, if it was run."""
        return next((line for line in self.rounds(spec.workload) if line.spec == spec), None)

    @property
    def spent_s(self) -> float:
        """Seconds of the run so far, without interruptions."""
        return max((line.spent_s for line in self.lines), default=0.0)

    @property
    def next_number(self) -> int:
        """The number of the next round."""
        return 1 + max((line.number for line in self.lines if isinstance(line, RoundEnded)), default=-1)

    @property
    def next_ordinal(self) -> int:
        """The first prompt that no finished round had."""
        return max((line.next_ordinal for line in self.lines if isinstance(line, RoundEnded)), default=0)

    def write_summary(self, found: dict[str, Any], settings: Settings, setup: Any) -> None:
        """Write summary.json; records.jsonl has the requests of each round under its number."""
        rounds = [msgspec.to_builtins(line) for line in self.lines if isinstance(line, RoundEnded)]
        summary = {
            **found,
            "rounds": [row | {"outcomes": len(row["outcomes"])} for row in rounds],
            "settings": msgspec.to_builtins(settings),
            "setup": dict(setup),
            "machine": describe_machine(),
            "spent_s": self.spent_s,
        }
        (self.folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read_journal(folder: Path) -> Journal:
    """Read the lines of a run that was interrupted; a folder without any has none."""
    path = folder / ROUNDS
    return Journal(folder, list(_whole_lines(path.read_bytes().splitlines() if path.exists() else [])))


def _whole_lines(lines: list[bytes]) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    for line in lines:
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError:
            continue  # cut when the process was killed
