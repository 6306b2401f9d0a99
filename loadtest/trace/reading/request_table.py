"""What was read of a file, in columns: checked, sorted by arrival, with what was left out counted by reason."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import polars as pl

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.trace_file import TraceFile
from ridgeline.loadtest.trace.trace import MOONCAKE_BLOCK_TOKENS

NO_OUTPUT = "0 output tokens, so they had failed when recorded"
NO_PROMPT = "0 prompt tokens"
NO_TIMES = "conversations have no times: they begin as a Poisson process of 1 a second; --rate changes that"
MOST_TOKENS = 2**53
"""The largest whole number up to which floating point has all."""
MOST_SPAN_S = 10 * 365 * 86_400.0
"""Requests farther apart have times of different units, or wrong ones."""
BLOCK_SIZES = tuple(2**power for power in range(13))
SCHEMA: Mapping[str, pl.DataType] = {
    "line": pl.Int64(),
    "arrival_s": pl.Float64(),
    "input_tokens": pl.Int64(),
    "output_tokens": pl.Int64(),
    "prefix_ids": pl.List(pl.UInt32()),
    "session": pl.String(),
    "think_s": pl.Float64(),
    "offset_s": pl.Float64(),
    "after": pl.List(pl.UInt32()),
    "fresh": pl.Boolean(),
}
"""All columns that a table may have; that of a CSV has times and lengths only."""


class ReadRequest(NamedTuple):
    """One request as a reader of JSON yields it, in the order of SCHEMA.

    `after` names requests by their place among those that the reader yields, which are before this one.
    """

    line: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    session: str | None = None
    think_s: float = 0.0
    offset_s: float = 0.0
    after: tuple[int, ...] = ()
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class RequestTable:
    """The requests of a trace, sorted by arrival, the first at 0 s."""

    format: str
    rows: pl.DataFrame
    """The columns of SCHEMA that this format has, without `line`."""
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Requests that were left out, by reason."""
    notes: tuple[str, ...] = ()

    @property
    def has_sessions(self) -> bool:
        """Whether some requests are turns of sessions."""
        return "session" in self.rows.columns and bool(self.rows["session"].is_not_null().any())

    @property
    def drop_notes(self) -> tuple[str, ...]:
        """Say how many requests were left out, a sentence for each reason."""
        read = self.rows.height + sum(self.dropped.values())
        return tuple(f"{count} of {read} requests dropped: {reason}" for reason, count in self.dropped.items())


class HashNumbers:
    """Numbers the hashes of a trace from 0 on, in the order in which they come.

    Recorded hashes may have 64 bits or be text. A prompt maker counts blocks, and has no use for such numbers.
    """

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def numbered(self, hashes: Iterable[object]) -> tuple[int, ...]:
        """Return the number of each hash."""
        return tuple(self._numbers.setdefault(each, len(self._numbers)) for each in hashes)


def poisson_arrivals() -> Iterator[float]:
    """Yield the arrivals that NO_TIMES tells of, in seconds."""
    source, arrival_s = random.Random(0), 0.0
    while True:
        yield arrival_s
        arrival_s += source.expovariate(1.0)


def frame_of(file: TraceFile, requests: Iterable[ReadRequest]) -> pl.DataFrame:
    """Return requests as columns. Raises TraceError for lengths that cannot be."""
    return pl.DataFrame(list(_possible(file, requests)), schema=dict(SCHEMA), orient="row")


def _possible(file: TraceFile, requests: Iterable[ReadRequest]) -> Iterator[ReadRequest]:
    for request in requests:
        if min(request.input_tokens, request.output_tokens) < 0:
            raise TraceError(f"{file.where(request.line)}: a negative length: it is 0 tokens or more, so mend the line")
        if max(request.input_tokens, request.output_tokens) > MOST_TOKENS:
            raise TraceError(f"{file.where(request.line)}: a length of more than 2^53 tokens: mend or remove the line")
        yield request


def checked_table(
    file: TraceFile,
    name: str,
    rows: pl.DataFrame,
    *,
    block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    dropped: Mapping[str, int] | None = None,
    notes: tuple[str, ...] = (),
) -> RequestTable:
    """Leave out and count requests of 0 tokens, and sort by arrival. Raises TraceError if none is left.

    Requests of sessions have tokens: their readers see to that.
    """
    reasons = Counter(dropped or {})
    rows = rows.with_row_index("place")
    for reason, column in ((NO_OUTPUT, "output_tokens"), (NO_PROMPT, "input_tokens")):
        kept = rows.filter(pl.col(column) > 0)
        reasons[reason] += rows.height - kept.height
        rows = kept
    reasons = +reasons
    if rows.is_empty():
        left_out = ", ".join(f"{count} dropped: {reason}" for reason, count in reasons.items())
        raise TraceError(f"{file.path} holds no request{f' ({left_out})' if left_out else ''}: a trace needs one")
    if not rows["arrival_s"].is_sorted():
        rows = rows.sort("arrival_s", maintain_order=True)
    _refuse_absurd_span(file, rows)
    notes = (*notes, *_hash_notes(file, rows, block_tokens))
    if "after" in rows.columns and (rows["after"].list.len() > 0).any():
        places = {place: now for now, place in enumerate(rows["place"])}
        after = [[places[each] for each in before] for before in rows["after"]]
        rows = rows.with_columns(pl.Series("after", after, SCHEMA["after"]))
    rows = rows.drop("line", "place", strict=False).with_columns(pl.col("arrival_s") - rows["arrival_s"][0])
    return RequestTable(name, rows, block_tokens, dict(reasons), notes)


def _refuse_absurd_span(file: TraceFile, rows: pl.DataFrame) -> None:
    """Raise TraceError if a request, or a later turn by its own time, is years after the first."""
    first_s, last_s = rows["arrival_s"][0], rows["arrival_s"][-1]
    if "offset_s" in rows.columns:
        last_s = rows.select((pl.col("arrival_s") + pl.col("offset_s")).max()).item()
    if not last_s - first_s <= MOST_SPAN_S:
        years = (last_s - first_s) / (365 * 86_400)
        raise TraceError(
            f"{file.path}: {years:.3g} years from the first arrival to the last: give all times in one unit"
        )


def block_tokens_of(rows: pl.DataFrame, usual: int) -> tuple[int, str | None]:
    """Return the tokens of a block of the prompt: the usual number, unless all hashes say another; then with a note."""
    hashed = _hashed(rows)
    if _agreeing(hashed, usual) == hashed.height:
        return usual, None
    fitting = [size for size in BLOCK_SIZES if _agreeing(hashed, size) == hashed.height]
    if len(fitting) != 1:
        return usual, None
    return fitting[0], f"blocks of {fitting[0]} tokens, as lengths and hash_ids agree on; {usual} is usual"


def _hashed(rows: pl.DataFrame) -> pl.DataFrame:
    """Return length, number of blocks and line of requests whose hashes stand for their whole prompt."""
    if "prefix_ids" not in rows.columns:
        return pl.DataFrame(schema=dict.fromkeys(("tokens", "blocks", "line"), pl.Int64()))
    whole = rows.filter(pl.col("prefix_ids").list.len() > 0, pl.col("session").is_null())
    return whole.select(
        tokens=pl.col("input_tokens"), blocks=pl.col("prefix_ids").list.len().cast(pl.Int64), line=pl.col("line")
    )


def _agree(block_tokens: int) -> pl.Expr:
    """Whether the number of blocks is that of the length; the last block may be part of one, and be left out."""
    return pl.col("blocks").is_between(pl.col("tokens") // block_tokens, -(-pl.col("tokens") // block_tokens))


def _agreeing(hashed: pl.DataFrame, block_tokens: int) -> int:
    return hashed.filter(_agree(block_tokens)).height


def _hash_notes(file: TraceFile, rows: pl.DataFrame, block_tokens: int) -> tuple[str, ...]:
    """Say that lengths and hashes disagree, if they do."""
    hashed = _hashed(rows)
    unlike = hashed.filter(~_agree(block_tokens))
    if unlike.is_empty():
        return ()
    tokens, blocks, line = unlike.row(0)
    return (
        f"{unlike.height} of {hashed.height} requests have not the hash_ids of their length, at {block_tokens} tokens "
        f"each: line {line} has {blocks} for {tokens} tokens; the length counts, so prefixes may be shared wrongly",
    )
