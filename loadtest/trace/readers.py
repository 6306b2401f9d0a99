"""Reads traces, one reader per format; an error about a malformed row names file and line.

Called by `loadtest.run.replay` and `loadtest.run.unloaded`.

A trace is named by a file (Azure CSV or Mooncake JSONL, distinguished by content), by the word `demo`, or by a
specification such as `poisson:rate=2,input=512,output=64,n=100,seed=1`.
"""

import csv
import itertools
import random
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import msgspec

from loadtest.errors import TraceError
from loadtest.trace.trace import DEMO_FILE, Trace, TraceRow

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MICROSECOND_DIGITS = 26  # Azure writes seven fractional digits and Python reads six
POISSON_DEFAULTS = {"rate": 1.0, "input": 512.0, "output": 64.0, "n": 100.0, "seed": 0.0}


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def load_trace(name: str) -> Trace:
    """Read the trace called `name`. Raises TraceError."""
    if name.startswith("poisson:"):
        return Trace(name, tuple(poisson_rows(name)))
    path = DEMO_FILE if name == "demo" else Path(name)
    reader = detect_reader(path)
    rows = sorted(reader(path), key=lambda row: row.arrival_s)
    if not rows:
        raise TraceError(f"{path} holds no request: a trace needs at least one row")
    start_s = rows[0].arrival_s
    shifted = tuple(
        TraceRow(row.arrival_s - start_s, row.input_tokens, row.output_tokens, row.prefix_ids) for row in rows
    )
    return Trace(name, shifted, notes=_tick_notes(shifted))


def detect_reader(path: Path) -> Callable[[Path], Iterator[TraceRow]]:
    """Choose the reader by the content of the first line, whatever the file's name. Raises TraceError."""
    try:
        with path.open(encoding="utf-8") as lines:
            first = next((line.strip() for line in lines if line.strip()), "")
    except FileNotFoundError:
        raise TraceError(
            f"there is no trace '{path}': give a file, 'demo', or 'poisson:rate=2,input=512,output=64,n=100,seed=1'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"the trace '{path}' cannot be read: {error}") from error
    if first.startswith("{"):
        return mooncake_rows
    if first.lower().startswith("timestamp,"):
        return azure_rows
    raise TraceError(
        f"{path}, line 1: neither an Azure CSV (header TIMESTAMP,ContextTokens,GeneratedTokens) nor a Mooncake JSONL "
        "(objects with timestamp, input_length, output_length)"
    )


def azure_rows(path: Path) -> Iterator[TraceRow]:
    """Read Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`; arrivals are relative to the first row."""
    first: datetime | None = None
    with path.open(encoding="utf-8", newline="") as lines:
        table = csv.reader(lines)
        header = [name.strip().lower() for name in next(table)]
        try:
            time_column, input_column, output_column = (header.index(name.lower()) for name in AZURE_COLUMNS)
        except ValueError:
            raise TraceError(f"{path}, line 1: the header must name {', '.join(AZURE_COLUMNS)}") from None
        for cells in table:
            if not cells:
                continue
            try:
                moment = datetime.fromisoformat(cells[time_column].strip()[:MICROSECOND_DIGITS])
                first = first or moment
                arrival_s = (moment - first).total_seconds()
                row = TraceRow(arrival_s, int(cells[input_column]), int(cells[output_column]))
            except (ValueError, IndexError, TypeError) as error:
                raise TraceError(f"{path}, line {table.line_num}: {error}") from error
            yield _checked(row, f"{path}, line {table.line_num}")


def mooncake_rows(path: Path) -> Iterator[TraceRow]:
    """Read Mooncake's JSONL: milliseconds, lengths, and optional `hash_ids`, one per 512-token block of the prompt."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                read = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"{path}, line {number}: {error}") from error
            row = TraceRow(read.timestamp / 1e3, read.input_length, read.output_length, read.hash_ids)
            yield _checked(row, f"{path}, line {number}")


def poisson_rows(spec: str) -> Iterator[TraceRow]:
    """Generate `poisson:rate=..,input=..,output=..,n=..,seed=..`: n requests of one size with exponential gaps."""
    values = dict(POISSON_DEFAULTS)
    for item in filter(None, spec.removeprefix("poisson:").split(",")):
        key, _, text = item.partition("=")
        try:
            if key not in values:
                raise ValueError(f"unknown key '{key}', the keys are {', '.join(values)}")
            values[key] = float(text)
            if key != "rate" and not values[key].is_integer():
                raise ValueError(f"{key} must be a whole number")
        except ValueError as error:
            raise TraceError(f"the trace '{spec}' is not understood: {error}") from error
    if values["rate"] <= 0 or values["n"] < 1:
        raise TraceError(f"the trace '{spec}' is not understood: rate must be above 0 and n at least 1")
    source = random.Random(int(values["seed"]))
    arrival_s = 0.0
    for _ in range(int(values["n"])):
        yield _checked(TraceRow(arrival_s, int(values["input"]), int(values["output"])), f"the trace '{spec}'")
        arrival_s += source.expovariate(values["rate"])


def _checked(row: TraceRow, where: str) -> TraceRow:
    if row.input_tokens < 1 or row.output_tokens < 1:
        raise TraceError(f"{where}: a request needs at least 1 input and 1 output token")
    return row


def _tick_notes(rows: tuple[TraceRow, ...]) -> tuple[str, ...]:
    gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(rows)]
    if len(gaps) < 10 or sum(gap == 0 for gap in gaps) < len(gaps) / 2:
        return ()
    tick_s = min(gap for gap in gaps if gap > 0) if any(gaps) else 0.0
    return (
        f"arrivals are quantised (most gaps are 0 s, ticks of about {tick_s:.2f} s): a jitter of one tick spreads them",
    )
