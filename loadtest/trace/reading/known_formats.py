"""Recognises the format of a trace by its content, and reads it."""

import re
from dataclasses import replace
from pathlib import Path

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading import csv_columns
from ridgeline.loadtest.trace.reading.agent_traces import read_agent_traces
from ridgeline.loadtest.trace.reading.csv_columns import find_table, read_csv
from ridgeline.loadtest.trace.reading.json_requests import read_bailian, read_mooncake
from ridgeline.loadtest.trace.reading.otel_spans import read_otel_spans
from ridgeline.loadtest.trace.reading.request_table import RequestTable
from ridgeline.loadtest.trace.reading.sharegpt import read_sharegpt
from ridgeline.loadtest.trace.reading.trace_file import TraceFile, open_trace

ALL_ROWS = 2**31
LEAST_ROWS = 30_000
"""That are read whatever the limit, so that a file in disorder is sorted first unless it is large."""
SPARE = 4
"""Rows read for each that is wanted, since some are left out."""
KEY = re.compile(r'"(\w+)"\s*:')
KEYS_OF_LINES = frozenset({"timestamp", "input_length", "output_length", "session_id", "chat_id"})
SHOWN_CHARACTERS = 60
FORMATS = (
    *(f"{each.name} (columns {each.header})" for each in csv_columns.FORMATS),
    "Mooncake JSONL (objects with timestamp, input_length, output_length)",
    "Bailian JSONL (the same with chat_id)",
    "sessions JSONL (the same with session_id)",
    "ShareGPT JSON (objects with conversations)",
    "WEKA agentic JSON (objects with requests and block_size)",
    "OpenTelemetry spans (objects with resourceSpans)",
)


def read_file(
    path: Path, tokenizer: str | None = None, limit: int | None = None, most_rows: int = ALL_ROWS
) -> RequestTable:
    """Read up to so many rows of a file; a format that holds text needs a `tokenizer`. Raises LoadTestError.

    With a `limit` no more is read than so many requests take.
    """
    few_rows = most_rows if limit is None else min(most_rows, max(LEAST_ROWS, SPARE * limit))
    table = _read(open_trace(path), tokenizer, limit, few_rows)
    if table.rows.height + sum(table.dropped.values()) < few_rows:
        return table
    if few_rows < most_rows and table.has_sessions:
        return read_file(path, tokenizer, most_rows=most_rows)  # later turns may be anywhere
    return replace(table, notes=(*table.notes, f"no more than the first {few_rows:,} rows of the file were read"))


def _read(file: TraceFile, tokenizer: str | None, limit: int | None, most_rows: int) -> RequestTable:
    if not file.text:
        raise TraceError(f"{file.path} holds no request: it is empty")
    if file.text[0] in "[{":
        return _read_json(file, tokenizer, limit, most_rows)
    table = find_table(file)
    if table is None:
        raise _unknown(file)
    return read_csv(table, most_rows)


def _read_json(file: TraceFile, tokenizer: str | None, limit: int | None, most_rows: int) -> RequestTable:
    """Choose by the keys of the first object, of which only the beginning may be known."""
    first = file.text.partition("\n")[0]
    keys = set(KEY.findall(file.text if file.is_one_document else first))
    if "conversations" in keys:
        return read_sharegpt(file, tokenizer, most_rows if limit is None else limit)
    if "resourceSpans" in keys:
        return read_otel_spans(file, most_rows)
    if "requests" in keys and "input_length" not in keys:
        return read_agent_traces(file, most_rows)
    if not keys & KEYS_OF_LINES:
        raise _unknown(file)
    if file.text[0] == "[":
        raise TraceError(f"{file.where(1)}: an array of requests: write one a line, for instance by jq -c '.[]'")
    if first.strip() == "{":
        raise TraceError(f"{file.where(1)}: a request over several lines: write one a line, for instance by jq -c .")
    if "chat_id" in keys:
        return read_bailian(file, most_rows)
    return read_mooncake(file, most_rows)


def _unknown(file: TraceFile) -> TraceError:
    line = file.head.count("\n", 0, len(file.head) - len(file.text)) + 1
    begins = file.text.partition("\n")[0].strip()[:SHOWN_CHARACTERS]
    return TraceError(f"{file.where(line)}: {begins!r} begins none of the formats that are read: {'; '.join(FORMATS)}")
