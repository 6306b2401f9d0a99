"""Reads the trace that a name means: a file, the word `demo`, or a specification such as `poisson:rate=2,n=100`."""

import functools
from pathlib import Path
from typing import Any

from ridgeline.loadtest.trace.generated import generated_trace, is_generated
from ridgeline.loadtest.trace.reading.known_formats import read_file
from ridgeline.loadtest.trace.trace import DEMO_FILE, Trace, TraceRow, tick_of

MOST_ROWS = 1_000_000
"""Of a file that are read for a run: more than it sends in hours, and 400 MB of memory."""


def load_trace(name: str, tokenizer: str | None = None, limit: int | None = None) -> Trace:
    """Read the trace called `name`; a format that holds text needs a `tokenizer`. Raises LoadTestError.

    With a `limit` no more of the file is read than so many requests take.
    """
    if is_generated(name):
        return generated_trace(name)
    path = path_of(name)
    try:
        changed = path.stat()
        mark = changed.st_mtime_ns, changed.st_size
    except OSError:
        mark = 0, 0  # to read it says what is wrong
    return _load(name, path, mark, tokenizer, limit)


def path_of(name: str) -> Path:
    """Return the file that a trace's name means."""
    return DEMO_FILE if name == "demo" else Path(name)


@functools.lru_cache(maxsize=2)
def _load(name: str, path: Path, _mark: tuple[int, int], tokenizer: str | None, limit: int | None) -> Trace:
    """Read a file, once for all the rounds of a comparison."""
    table = read_file(path, tokenizer, limit, MOST_ROWS)
    rows = tuple(TraceRow(**_as_tuples(columns)) for columns in table.rows.iter_rows(named=True))
    return Trace(name, rows, table.block_tokens, (*table.notes, *table.drop_notes, *_tick_notes(rows)))


def _as_tuples(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in columns.items()}


def _tick_notes(rows: tuple[TraceRow, ...]) -> tuple[str, ...]:
    tick_s = tick_of(rows)
    if tick_s is None:
        return ()
    return (f"arrivals are quantised (most gaps are 0 s, ticks of about {tick_s:.2f} s): --spread-ticks spreads them",)
