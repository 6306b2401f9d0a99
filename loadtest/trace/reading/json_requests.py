"""Reads JSON lines that have lengths: Mooncake, Bailian, and sessions as AIPerf writes them.

Formats: Mooncake's FAST25 traces; for `session_id` and `delay`, `docs/benchmark-modes/trace-replay.md` of
ai-dynamo/aiperf.
"""

from collections.abc import Iterator

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.request_table import (
    HashNumbers,
    ReadRequest,
    RequestTable,
    block_tokens_of,
    checked_table,
    frame_of,
)
from ridgeline.loadtest.trace.reading.trace_file import TraceFile
from ridgeline.loadtest.trace.trace import MOONCAKE_BLOCK_TOKENS

BAILIAN_BLOCK_TOKENS = 16
MOST_DELAY_S = 86_400
"""No rate and no time scale shortens a delay: a run waits for a turn as long as its line says."""


class _Line(msgspec.Struct):
    """A request, or a turn of a session: then the lengths are those that the turn adds."""

    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: tuple[int | str, ...] | None = None
    session_id: str | int | None = None
    delay: float | None = None
    chat_id: int | str | None = None
    """Of Bailian, whose times are seconds. Its length is that of the whole prompt, also in a later turn of a chat."""


def read_requests(file: TraceFile, most_rows: int, *, is_bailian: bool) -> RequestTable:
    """Read requests and sessions, a turn a line; times are milliseconds, or Bailian's seconds. Raises TraceError."""
    rows = frame_of(file, _Sessions(file, 1.0 if is_bailian else 1e3).requests(most_rows))
    usual_tokens = BAILIAN_BLOCK_TOKENS if is_bailian else MOONCAKE_BLOCK_TOKENS
    block_tokens, note = block_tokens_of(rows, usual_tokens)
    notes = (note,) if note else ()
    name = "sessions JSONL" if rows["session"].is_not_null().any() else "Mooncake JSONL"
    return checked_table(file, "Bailian JSONL" if is_bailian else name, rows, block_tokens=block_tokens, notes=notes)


class _Sessions:
    """Reads lines in order, and knows the last turn of each session and its place."""

    def __init__(self, file: TraceFile, units_per_s: float) -> None:
        self._file, self._units_per_s = file, units_per_s
        self._numbers = HashNumbers()
        self._last: dict[str, tuple[int, ReadRequest]] = {}

    def requests(self, most_rows: int) -> Iterator[ReadRequest]:
        for place, (number, line) in enumerate(self._file.documents(_Line, most_rows)):
            hashes = self._numbers.numbered(line.hash_ids or ())
            if line.session_id is not None:
                turn = self._turn(number, line, str(line.session_id), hashes)
                self._last[str(line.session_id)] = place, turn
                yield turn
            elif line.timestamp is None:
                raise TraceError(f"{self._file.where(number)}: no timestamp: give one, in milliseconds")
            else:
                yield self._first(number, line, hashes, line.timestamp)

    def _first(
        self, number: int, line: _Line, hashes: tuple[int, ...], timestamp: float, session: str | None = None
    ) -> ReadRequest:
        at_s = timestamp / self._units_per_s
        return ReadRequest(number, at_s, line.input_length, line.output_length, hashes, session)

    def _turn(self, number: int, line: _Line, session: str, hashes: tuple[int, ...]) -> ReadRequest:
        """Return a turn, whose prompt is the conversation so far, answers included, and its own tokens."""
        where, delay_ms = self._file.where(number), line.delay or 0.0
        if line.input_length < 1 or line.output_length < 1 or delay_ms < 0:
            raise TraceError(f"{where}: a turn adds at least 1 input and 1 output token, and its delay is 0 or more")
        if delay_ms > 1e3 * MOST_DELAY_S:
            raise TraceError(
                f"{where}: a delay of {delay_ms / 1e3:g} s: give milliseconds, of a day ({1000 * MOST_DELAY_S}) at most"
            )
        if session not in self._last:
            if line.timestamp is None:
                raise TraceError(f"{where}: the first turn of session {session} needs a timestamp, in milliseconds")
            return self._first(number, line, hashes, line.timestamp, session)
        place, before = self._last[session]
        offset_s = 0.0 if line.timestamp is None else line.timestamp / self._units_per_s - before.arrival_s
        if offset_s < before.offset_s and line.timestamp is not None:
            raise TraceError(f"{where}: this turn of session {session} is earlier than the one before: sort them")
        return before._replace(
            line=number,
            input_tokens=before.input_tokens + before.output_tokens + line.input_length,
            output_tokens=line.output_length,
            prefix_ids=hashes,
            think_s=delay_ms / 1e3,
            offset_s=max(offset_s, before.offset_s),
            after=(place,),
        )
