"""Reads JSON lines that have lengths: Mooncake, Bailian, and sessions as AIPerf writes them."""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from ridgeline.loadtest.errors import MALFORMED, TraceError
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
Hashes = tuple[int | str, ...] | None
_Line = TypeVar("_Line")


class _MooncakeLine(msgspec.Struct):
    """A request, or a turn of a session: then the lengths are those that the turn adds."""

    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: Hashes = None
    session_id: str | int | None = None
    delay: float | None = None


class _BailianLine(msgspec.Struct):
    """A request of Qwen's traces. Its length is that of the whole prompt, also in a later turn of a chat."""

    chat_id: int | str
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Hashes = None


def read_mooncake(file: TraceFile, most_rows: int) -> RequestTable:
    """Read requests with times in milliseconds, and sessions, a turn a line. Raises TraceError."""
    rows = frame_of(file, _Sessions(file).requests(most_rows))
    block_tokens, note = block_tokens_of(rows, MOONCAKE_BLOCK_TOKENS)
    notes = [note] if note else []
    if block_tokens == BAILIAN_BLOCK_TOKENS and ((1e3 * rows["arrival_s"]) % 1 > 0).any():
        notes.append("times were taken for milliseconds; with these blocks and fractions they may be seconds")
    name = "sessions JSONL" if rows["session"].is_not_null().any() else "Mooncake JSONL"
    return checked_table(file, name, rows, block_tokens=block_tokens, notes=tuple(notes))


def read_bailian(file: TraceFile, most_rows: int) -> RequestTable:
    """Read Qwen's traces of Bailian: times in seconds, hashes of 16 tokens. Raises TraceError.

    A later turn of a chat has a time and the hashes of its whole prompt, so it is a request of its own.
    """
    numbers = HashNumbers()

    def requests() -> Iterator[ReadRequest]:
        for number, each in _decoded(file, _BailianLine, most_rows):
            hashes = numbers.numbered(each.hash_ids or ())
            yield ReadRequest(number, each.timestamp, each.input_length, each.output_length, hashes)

    rows = frame_of(file, requests())
    block_tokens, note = block_tokens_of(rows, BAILIAN_BLOCK_TOKENS)
    return checked_table(file, "Bailian JSONL", rows, block_tokens=block_tokens, notes=(note,) if note else ())


class _Sessions:
    """Reads lines in order, and knows the last turn of each session."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._numbers = HashNumbers()
        self._last: dict[str, ReadRequest] = {}

    def requests(self, most_rows: int) -> Iterator[ReadRequest]:
        for number, line in _decoded(self._file, _MooncakeLine, most_rows):
            hashes = self._numbers.numbered(line.hash_ids or ())
            if line.session_id is not None:
                yield self._turn(number, line, str(line.session_id), hashes)
            elif line.timestamp is None:
                raise TraceError(f"{self._file.where(number)}: no timestamp: give one, in milliseconds")
            else:
                yield ReadRequest(number, line.timestamp / 1e3, line.input_length, line.output_length, hashes)

    def _turn(self, number: int, line: _MooncakeLine, session: str, hashes: tuple[int, ...]) -> ReadRequest:
        """Return a turn, whose prompt is the conversation so far, answers included, and its own tokens."""
        where, delay_ms = self._file.where(number), line.delay or 0.0
        if line.input_length < 1 or line.output_length < 1 or delay_ms < 0:
            raise TraceError(f"{where}: a turn adds at least 1 input and 1 output token, and its delay is 0 or more")
        if delay_ms > 1e3 * MOST_DELAY_S:
            raise TraceError(
                f"{where}: a delay of {delay_ms / 1e3:g} s: give milliseconds, of a day ({1000 * MOST_DELAY_S}) at most"
            )
        before = self._last.get(session)
        if before is None:
            if line.timestamp is None:
                raise TraceError(f"{where}: the first turn of session {session} needs a timestamp, in milliseconds")
            turn = ReadRequest(
                number, line.timestamp / 1e3, line.input_length, line.output_length, hashes, session=session
            )
        else:
            offset_s = 0.0 if line.timestamp is None else line.timestamp / 1e3 - before.arrival_s
            if offset_s < before.offset_s and line.timestamp is not None:
                raise TraceError(f"{where}: this turn of session {session} is earlier than the one before: sort them")
            turn = before._replace(
                line=number,
                input_tokens=before.input_tokens + before.output_tokens + line.input_length,
                output_tokens=line.output_length,
                prefix_ids=hashes,
                think_s=delay_ms / 1e3,
                offset_s=max(offset_s, before.offset_s),
            )
        self._last[session] = turn
        return turn


def _decoded(file: TraceFile, kind: type[_Line], most_rows: int) -> Iterator[tuple[int, _Line]]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in file.numbered_lines(most_rows):
        try:
            yield number, decoder.decode(line)
        except MALFORMED as error:
            raise TraceError(f"{file.where(number)}: {error}: mend or remove the line") from error
