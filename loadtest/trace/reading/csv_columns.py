"""Reads CSV by the names of three columns, in any order and with any others beside them: Azure and BurstGPT."""

from collections.abc import Mapping

import polars as pl
from polars.exceptions import PolarsError

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.request_table import MOST_TOKENS, RequestTable, checked_table
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

FORMATS: Mapping[str, tuple[str, str, str]] = {
    "Azure CSV": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "BurstGPT CSV": ("Timestamp", "Request tokens", "Response tokens"),
}
"""The columns of the time, the prompt's length and the output's."""
ROW = "row"
US = 1e6
NOT_SECONDS = 1e11
"""Seconds since 1970 are fewer: they would be thousands of years away."""
DATE = "%Y-%m-%d %H:%M:%S%.f"
TIMES = ("seconds", f"{DATE}%#z", DATE)
"""What the first row's time may be, which those of all others must be too: a number, or a date with or without zone."""
MEANT = "a time is seconds, or 2024-05-10 00:00:07.5 with or without +00:00, all alike; tokens are whole numbers"


def read_csv(file: TraceFile, most_rows: int) -> RequestTable | None:
    """Read up to so many rows; None if the header has not the columns of a known format. Raises TraceError."""
    scan = pl.scan_csv(file.path, infer_schema=False, glob=False)
    try:
        names = set(scan.collect_schema())
    except (PolarsError, OSError):
        return None
    name = next((name for name, columns in FORMATS.items() if names.issuperset(columns)), None)
    if name is None:
        return None
    columns = FORMATS[name]
    is_blank = pl.all_horizontal(pl.col(column).fill_null("").str.strip_chars() == "" for column in columns)
    cells = scan.select(*columns).with_row_index(ROW).filter(~is_blank).head(most_rows)
    time, inputs, outputs = columns
    style = _style_of(file.collected(cells.head(1))[time])
    read = file.collected(
        cells.select(
            pl.col(ROW),
            _time(time, style).alias("arrival_s"),
            _whole_number(inputs).alias("input_tokens"),
            _whole_number(outputs).alias("output_tokens"),
        )
    )
    bad = read.filter(pl.any_horizontal(pl.all().is_null())).head(1)
    if bad.height:
        row = int(bad[ROW][0])
        (found,) = file.collected(cells.filter(pl.col(ROW) == row).select(*columns)).rows()
        shown = ", ".join(f"{column} {str(cell or '')[:40]!r}" for column, cell in zip(columns, found, strict=True))
        raise TraceError(f"{file.where(row + 2)}: {shown}: mend or remove the row ({MEANT})")
    if style == TIMES[0] and read.height and (read["arrival_s"] >= NOT_SECONDS).all():
        raise TraceError(f"{file.path}: {time} is not in seconds, but in a smaller unit: divide it")
    since_first = pl.col("arrival_s") - pl.col("arrival_s").min()
    return checked_table(file, name, read.drop(ROW).with_columns(since_first / (1.0 if style == TIMES[0] else US)))


def _style_of(first: pl.Series) -> str:
    """Return how the first row writes its time; what is no time is told later, with its line."""
    cell = first.to_frame()
    return next((style for style in TIMES if cell.select(_time(first.name, style)).drop_nulls().height), TIMES[0])


def _time(column: str, style: str) -> pl.Expr:
    """Return seconds, or microseconds since 1970 of a date; null for what is not written so."""
    text = pl.col(column).str.strip_chars()
    if style == TIMES[0]:
        number = text.cast(pl.Float64, strict=False)
        return pl.when(number.is_finite()).then(number)
    zone = "UTC" if style == TIMES[1] else None
    usual = text.str.replace("T", " ", literal=True).str.replace("Z$", "+00:00")
    return usual.str.to_datetime(style, time_unit="us", time_zone=zone, strict=False).dt.epoch("us")


def _whole_number(column: str) -> pl.Expr:
    """Return a number of tokens; null for anything else. pandas writes 472.0 in a column that has gaps."""
    number = pl.col(column).str.strip_chars().cast(pl.Float64, strict=False)
    is_whole = number.is_finite() & (number == number.floor()) & number.is_between(0, MOST_TOKENS)
    return pl.when(is_whole).then(number).cast(pl.Int64)
