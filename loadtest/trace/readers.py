"""Reads traces, one reader per format; an error about a malformed row names file and line.

A trace is named by a file (Azure or BurstGPT CSV, Mooncake JSONL, sessions or ShareGPT JSON, by content), by
the word `demo`, or by a specification such as `poisson:rate=2,input=512,output=64,n=100,seed=1`.
"""

import csv
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.conversations import session_rows, sharegpt_rows
from ridgeline.loadtest.trace.trace import DEMO_FILE, Trace, TraceRow, tick_of

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MICROSECOND_DIGITS = 26  # Azure writes seven fractional digits and Python reads six
MOST_CHARACTERS = 65_536
"""Of the first line that are looked at: a ShareGPT file may be a single line."""
POISSON_DEFAULTS = {"rate": 1.0, "input": 512.0, "output": 64.0, "n": 100.0, "seed": 0.0}


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


Reader = Callable[[Path], Iterator[TraceRow]]


def load_trace(name: str, tokenizer: str | None = None) -> Trace:
    """Read the trace called `name`; a format that holds text needs a `tokenizer`. Raises LoadTestError."""
    if name.startswith("poisson:"):
        return Trace(name, tuple(poisson_rows(name)))
    path = DEMO_FILE if name == "demo" else Path(name)
    first = _first_line(path)
    notes: list[str] = []
    if first.startswith("["):
        rows = list(sharegpt_rows(path, tokenizer))
        notes.append("first exchanges of conversations, which have no times: Poisson arrivals of 1 request/s")
    else:
        read = list(detect_reader(path, first)(path))
        rows = [row for row in read if row.output_tokens]
        if len(rows) < len(read):
            notes.append(f"{len(read) - len(rows)} of {len(read)} requests dropped: they had failed when recorded")
    rows.sort(key=lambda row: row.arrival_s)
    if not rows:
        raise TraceError(f"{path} holds no request: a trace needs at least one row")
    start_s = rows[0].arrival_s
    shifted = tuple(replace(row, arrival_s=row.arrival_s - start_s) for row in rows)
    return Trace(name, shifted, notes=(*notes, *_tick_notes(shifted)))


def _first_line(path: Path) -> str:
    """Return the first line that is not empty, or the beginning of it. Raises TraceError if there is no such file."""
    try:
        with path.open(encoding="utf-8") as lines:
            parts = iter(lambda: lines.readline(MOST_CHARACTERS), "")
            return next((part.strip() for part in parts if part.strip()), "")
    except FileNotFoundError:
        raise TraceError(
            f"there is no trace '{path}': give a file, 'demo', or 'poisson:rate=2,input=512,output=64,n=100,seed=1'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"the trace '{path}' cannot be read: {error}") from error


def detect_reader(path: Path, first: str) -> Reader:
    """Choose the reader by the content of the first line, whatever the file's name. Raises TraceError."""
    if first.startswith("{"):
        return session_rows if '"session_id"' in first else mooncake_rows
    names = {name.strip().lower() for name in first.split(",")}
    if {name.lower() for name in BURSTGPT_COLUMNS} <= names:
        return burstgpt_rows
    if first.lower().startswith("timestamp,"):
        return azure_rows
    raise TraceError(
        f"{path}, line 1: none of the formats that are read: Azure CSV (header {','.join(AZURE_COLUMNS)}), "
        f"BurstGPT CSV (header with {', '.join(BURSTGPT_COLUMNS)}), Mooncake JSONL (objects with timestamp, "
        "input_length, output_length), sessions (the same with session_id), ShareGPT JSON (a list of objects with "
        "conversations)"
    )


def burstgpt_rows(path: Path) -> Iterator[TraceRow]:
    """Read BurstGPT's CSV: seconds and tokens; a request that had failed has 0 output tokens."""
    with path.open(encoding="utf-8", newline="") as lines:
        for cells in (table := csv.DictReader(lines, skipinitialspace=True)):
            try:
                arrival, inputs, outputs = (cells[name] for name in BURSTGPT_COLUMNS)
                row = TraceRow(float(arrival), int(inputs), int(outputs))
            except (ValueError, KeyError, TypeError) as error:
                raise TraceError(f"{path}, line {table.line_num}: {error}") from error
            if row.input_tokens < 1 or row.output_tokens < 0:
                raise TraceError(f"{path}, line {table.line_num}: a request needs at least 1 input token")
            yield row


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
    tick_s = tick_of(rows)
    if tick_s is None:
        return ()
    return (f"arrivals are quantised (most gaps are 0 s, ticks of about {tick_s:.2f} s): --spread-ticks spreads them",)
