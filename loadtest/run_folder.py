"""The folder of a comparison while it runs: what was settled, each round as it ends, each record as its request ends.

run.json holds what was settled before the first round, rounds.jsonl a line for each round that ended and for each time
that the run was resumed. A line is whole or is not read: whoever stops the process may cut the last one.
"""

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from ridgeline.loadtest.errors import MALFORMED, LoadTestError
from ridgeline.loadtest.plan import ComparePlan
from ridgeline.loadtest.report.rounds import Interruption, Round, Side
from ridgeline.loadtest.run.calibration import Load
from ridgeline.loadtest.run.client.process import ClientLoad
from ridgeline.loadtest.run.machine import Disturbance
from ridgeline.loadtest.run.records import RequestRecord
from ridgeline.loadtest.run.replay import ReplayResult
from ridgeline.loadtest.run.server_metrics import Level, MetricsDelta, SampleKey
from ridgeline.loadtest.trace.windows import PairTraces

RUN, ROUNDS, RECORDS, SUMMARY, REPORT = "run.json", "rounds.jsonl", "records.jsonl", "summary.json", "report.html"
RECORD_TABLE = "records.parquet"
Setup = Mapping[str, Any]
"""The configuration without secrets, and the versions of the software; `setup` in summary.json."""


class Settled(msgspec.Struct, frozen=True):
    """What holds for all rounds of a comparison; run.json."""

    given: dict[str, Any]
    """The plan's fields that were given, as on the command line."""
    plan: dict[str, Any]
    """The plan with numbers in place of `auto`."""
    load: Load
    setup: dict[str, Any]
    max_model_tokens: int | None
    ordinals_per_round: int
    first_round_index: int
    least_prompt_tokens: int = 1

    @property
    def traces(self) -> PairTraces:
        """The requests of each pair."""
        return PairTraces(self.settled_plan(), self.max_model_tokens, self.least_prompt_tokens)

    def settled_plan(self) -> ComparePlan:
        """Return the plan with which rounds go on."""
        return ComparePlan().model_copy(update=self.plan | {"rates": tuple(self.plan["rates"])})


class _Counted(msgspec.Struct, frozen=True):
    """A `MetricsDelta` as JSON, which has no mappings by name and labels."""

    counters: list[tuple[SampleKey, float]]
    gauges: list[tuple[SampleKey, float]]
    levels: list[tuple[SampleKey, Level]]
    wall_s: float


class _Replayed(msgspec.Struct, frozen=True):
    duration_s: float
    warnings: tuple[str, ...]
    fleet_change: str | None
    client: ClientLoad | None
    deltas: dict[str, _Counted]
    rate: float
    """Mean arrivals a second; with the number of requests, what differs between pairs."""
    requests: int


class _Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A `Round`, with what its result takes that is not in other files."""

    number: int
    side: Side
    pair: int
    began: datetime
    took_s: float
    others: Disturbance | None
    reasons: tuple[str, ...]
    is_kept: bool
    replayed: _Replayed | None
    spent_s: float
    """Seconds of the whole comparison so far, without interruptions."""


_OF_ROUND = tuple(name for name in Round.__struct_fields__ if name != "result")


_Line = _Ended | Interruption


class Past(msgspec.Struct, frozen=True):
    """What a comparison was when it stopped, or before its first round."""

    folder: Path
    stopped: datetime
    """The time at which its files last changed."""
    settled: Settled
    rounds: tuple[Round, ...]
    spent_s: float
    interruptions: tuple[Interruption, ...]
    """After each of which it went on."""

    @property
    def next_number(self) -> int:
        """The number of the next round; each interruption has cut a round, whose number is in the records."""
        return len(self.rounds) + len(self.interruptions)

    def refuse_another(self, given: Mapping[str, Any], setup: Setup) -> None:
        """Raise LoadTestError if a field of the plan that is given now, or the set-up, is not what it was."""
        plan = self.settled.given
        named = {name: value for name, value in given.items() if value != plan.get(name)}
        changed = [f"{name} is {value}, was {plan.get(name, 'the default')}" for name, value in named.items()]
        changed += [f"{path} is {now}, was {was}" for path, was, now in differences_of(self.settled.setup, setup)]
        if changed:
            raise LoadTestError(
                f"{self.folder} cannot go on with what differs from its first rounds: {'; '.join(changed)}. Leave it "
                "as it was, or begin anew with --out"
            )


class RunFolder:
    """Appends to the files of a comparison; a line is in its file when the call returns."""

    def __init__(self, path: Path, setup: Setup | None = None) -> None:
        self.path = path
        self.setup: Setup = {} if setup is None else setup

    def start(self, settled: Settled) -> None:
        """Write down what was settled. The folder must hold no run."""
        self.path.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(settled), indent=2)
        (self.path / RUN).write_bytes(encoded + b"\n")

    def add_resumed(self, interruption: Interruption) -> None:
        """Note that the comparison goes on."""
        self._append(interruption)

    def add_ended(self, each: Round, spent_s: float) -> None:
        """Add a round that has ended, valid or discarded."""
        of_round = {name: getattr(each, name) for name in _OF_ROUND}
        self._append(_Ended(**of_round, replayed=_as_replayed(each.result), spent_s=spent_s))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, which says that the comparison is finished: after all other files, and whole or not."""
        unfinished = self.path / f"{SUMMARY}.tmp"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        unfinished.replace(self.path / SUMMARY)

    def past(self) -> Past:
        """Return what an interrupted comparison has left here.

        Raises LoadTestError if there is none, or it was finished.
        """
        if not (self.path / RUN).exists():
            raise LoadTestError(
                f"{self.path} holds no comparison that could go on, which has a {RUN}: give the folder that compare "
                "named, or --out for a new comparison"
            )
        if (self.path / SUMMARY).exists():
            raise LoadTestError(f"the comparison in {self.path} is finished: ridgeline report {self.path} shows it")
        try:
            settled = msgspec.json.decode((self.path / RUN).read_bytes(), type=Settled)
        except MALFORMED as error:
            raise LoadTestError(f"{self.path / RUN} is not of this version ({error}): begin anew with --out") from error
        lines = list(_whole_lines(self.path / ROUNDS, _Line))
        ended = [line for line in lines if isinstance(line, _Ended)]
        records, traces = self.records_by_round(), settled.traces
        files = [file for name in (RUN, ROUNDS, RECORDS) if (file := self.path / name).exists()]
        return Past(
            folder=self.path,
            stopped=datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC),
            settled=settled,
            rounds=tuple(_as_round(line, records, traces) for line in ended),
            spent_s=max((line.spent_s for line in ended), default=0.0),
            interruptions=tuple(line for line in lines if isinstance(line, Interruption)),
        )

    def records_by_round(self) -> dict[int, list[RequestRecord]]:
        """Return the records of each round, by its number, in the order of the trace."""
        found: dict[int, list[RequestRecord]] = {}
        for line in self.record_lines():
            found.setdefault(line["round"], []).append(msgspec.convert(line, RequestRecord, strict=False))
        return {number: sorted(records, key=lambda record: record.index) for number, records in found.items()}

    def record_lines(self) -> Iterator[dict[str, Any]]:
        """Yield each record with the labels of its round, in the order in which requests ended."""
        yield from _whole_lines(self.path / RECORDS, dict[str, Any])

    def _append(self, line: msgspec.Struct) -> None:
        path = self.path / ROUNDS
        cut = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("ab") as lines:
            lines.write((b"\n" if cut else b"") + msgspec.json.encode(line) + b"\n")
            lines.flush()
            os.fsync(lines.fileno())


def differences_of(
    one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str, str]]:
    """Yield path and both values of each leaf that differs; a dash stands for one that is not there."""
    for key in dict.fromkeys((*one, *other)):
        path, a, b = f"{prefix}{key}", one.get(key, "-"), other.get(key, "-")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from differences_of(a, b, f"{path}.")
        elif a != b:
            yield path, str(a), str(b)


def _whole_lines(path: Path, kind: Any) -> Iterator[Any]:
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            yield msgspec.json.decode(line, type=kind)
        except MALFORMED:
            continue  # cut when the process was killed


def _as_round(line: _Ended, records: Mapping[int, list[RequestRecord]], traces: PairTraces) -> Round:
    result, replayed = None, line.replayed
    if replayed is not None:
        trace = traces.at_rate(line.pair, replayed.rate, replayed.requests)
        kept = tuple(records.get(line.number, ()))
        deltas = {url: _as_delta(one) for url, one in replayed.deltas.items()}
        if len(kept) != len(trace.rows):
            raise LoadTestError(
                f"round {line.number} has {len(kept)} of {len(trace.rows)} records: its files were changed, or the "
                "trace was; begin anew with --out"
            )
        result = ReplayResult(
            trace, kept, replayed.duration_s, deltas, replayed.warnings, replayed.fleet_change, replayed.client
        )
    return Round(result=result, **{name: getattr(line, name) for name in _OF_ROUND})


def _as_replayed(result: ReplayResult | None) -> _Replayed | None:
    if result is None:
        return None
    deltas = {
        url: _Counted(list(one.counters.items()), list(one.gauges.items()), list(one.levels.items()), one.wall_s)
        for url, one in result.deltas.items()
    }
    told = result.duration_s, result.warnings, result.fleet_change, result.client
    return _Replayed(*told, deltas, result.trace.mean_rate or 0.0, len(result.trace.rows))


def _as_delta(found: _Counted) -> MetricsDelta:
    return MetricsDelta(dict(found.counters), dict(found.gauges), found.wall_s, dict(found.levels))


def make_folder(path: Path) -> None:
    """Make the folder of a run that is to begin. Raises LoadTestError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"no right to write into {path}")
    except OSError as error:
        raise LoadTestError(f"a run cannot be kept in {path}: {error}. Give another --out") from error


def new_folder(wanted: RunFolder, console: Console) -> RunFolder:
    """Return the folder if it holds no run, else the next one that does not, DIR-2, DIR-3 and so on; then say so."""
    path, number = wanted.path, 1
    while any((path / name).exists() for name in (RUN, ROUNDS, RECORDS, SUMMARY, REPORT)):
        number += 1
        path = wanted.path.with_name(f"{wanted.path.name}-{number}")
    if number > 1:
        console.print(f"{wanted.path} holds a run, which is kept: this one goes to {path}", markup=False)
    return RunFolder(path, wanted.setup)
