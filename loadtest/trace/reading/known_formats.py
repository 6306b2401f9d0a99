"""Recognises the format of a trace by its content, and reads it."""

import re
from dataclasses import replace
from pathlib import Path

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.agent_traces import read_agent_traces
from ridgeline.loadtest.trace.reading.conversation_trees import read_conversation_trees
from ridgeline.loadtest.trace.reading.csv_columns import FORMATS as CSV_FORMATS
from ridgeline.loadtest.trace.reading.csv_columns import read_csv
from ridgeline.loadtest.trace.reading.json_requests import read_requests
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
    *(f"{name} (columns {','.join(columns)})" for name, columns in CSV_FORMATS.items()),
    "Mooncake JSONL (objects with timestamp, input_length, output_length)",
    "Bailian JSONL (the same with chat_id)",
    "sessions JSONL (the same with session_id)",
    "ShareGPT JSON (objects with conversations)",
    "WEKA agentic JSON (objects with requests)",
    "AIPerf DAG JSONL (objects with session_id and turns)",
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
    table = read_csv(file, most_rows)
    if table is None:
        raise _unknown(file)
    return table


def _read_json(file: TraceFile, tokenizer: str | None, limit: int | None, most_rows: int) -> RequestTable:
    """Choose by the keys of the first object, of which only the beginning may be known."""
    first = file.text.partition("\n")[0]
    keys = set(KEY.findall(file.text if file.is_one_document else first))
    if "conversations" in keys:
        return read_sharegpt(file, tokenizer, most_rows if limit is None else limit)
    if "turns" in keys:
        return read_conversation_trees(file, tokenizer, most_rows)
    if "requests" in keys and "input_length" not in keys:
        return read_agent_traces(file, most_rows)
    if not keys & KEYS_OF_LINES:
        raise _unknown(file)
    return read_requests(file, most_rows, is_bailian="chat_id" in keys)


def _unknown(file: TraceFile) -> TraceError:
    line = file.head.count("\n", 0, len(file.head) - len(file.text)) + 1
    begins = file.text.partition("\n")[0].strip()[:SHOWN_CHARACTERS]
    return TraceError(f"{file.where(line)}: {begins!r} begins none of the formats that are read: {'; '.join(FORMATS)}")
