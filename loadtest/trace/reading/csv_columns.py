"""Reads CSV by the names of its columns, in any order and with any others beside them: Azure and BurstGPT."""

import csv
import io
from dataclasses import dataclass
from functools import partial

import polars as pl
from polars.exceptions import PolarsError

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.request_table import MOST_TOKENS, RequestTable, checked_table
from ridgeline.loadtest.trace.reading.times import MEANT, TimeStyle, seconds_since_first, style_of, time_of
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

SEPARATORS = (",", ";", "\t", "|")
SHOWN_CHARACTERS = 40
ROW = "row"


@dataclass(frozen=True, slots=True)
class CsvFormat:
    """The names of the three columns that are read; case, spaces and underscores in them do not matter."""

    name: str
    time: str
    inputs: str
    outputs: str

    @property
    def header(self) -> str:
        """The columns as a header has them."""
        return ",".join((self.time, self.inputs, self.outputs))


FORMATS = (
    CsvFormat("Azure CSV", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    CsvFormat("BurstGPT CSV", "Timestamp", "Request tokens", "Response tokens"),
)


@dataclass(frozen=True, slots=True)
class CsvTable:
    """A CSV whose columns are known."""

    file: TraceFile
    format: CsvFormat
    separator: str
    columns: tuple[str, str, str]
    """What the file calls the time, the prompt's length and the output's."""
    width: int
    """The number of columns."""

    def scan(self) -> pl.LazyFrame:
        """Return all cells as text, with the number of each row; nothing is read yet."""
        return _scan(self.file, self.separator).with_row_index(ROW)


def find_table(file: TraceFile) -> CsvTable | None:
    """Recognise a CSV by the names of its columns; None if it has not those of a known format. Raises TraceError."""
    for separator in SEPARATORS:
        try:
            names = _scan(file, separator).collect_schema().names()
        except (PolarsError, OSError):
            continue
        plain = [_plain(name) for name in names]
        for known in FORMATS:
            wanted = [_plain(name) for name in (known.time, known.inputs, known.outputs)]
            if set(wanted) <= set(plain):
                if any(plain.count(name) > 1 or f"{name}duplicated0" in plain for name in wanted):
                    raise TraceError(f"{file.where(_header_line(file))}: the header names a column twice: rename one")
                time, inputs, outputs = (names[plain.index(name)] for name in wanted)
                return CsvTable(file, known, separator, (time, inputs, outputs), len(names))
    return None


def read_csv(table: CsvTable, most_rows: int) -> RequestTable:
    """Read up to so many rows. Raises TraceError for the first cell that is no time or no number of tokens."""
    time, inputs, outputs = table.columns
    _refuse_short_row(table, most_rows)
    cells = table.scan().filter(~_is_blank(table.columns)).head(most_rows)
    style = _style_of_first(table, cells)
    read = pl.DataFrame()
    for thorough in (False, True):  # almost no file needs the second reading
        read = _collected(
            table,
            cells.select(
                pl.col(ROW).alias("line"),
                time_of(pl.col(time), style, thorough=thorough).alias("arrival_s"),
                _whole_number(inputs).alias("input_tokens"),
                _whole_number(outputs).alias("output_tokens"),
            ),
        )
        if not (missing := read.filter(pl.any_horizontal(pl.all().is_null())).head(1)).height:
            break
    else:
        _refuse_row(table, int(missing["line"][0]), style)
    arrivals_s, note = seconds_since_first(read["arrival_s"], style)
    rows = read.drop("line").with_columns(arrivals_s.cast(pl.Float64))
    return checked_table(table.file, table.format.name, rows, notes=(note,) if note else ())


def _scan(file: TraceFile, separator: str) -> pl.LazyFrame:
    return pl.scan_csv(file.target, infer_schema=False, separator=separator, glob=False)


def _plain(name: str) -> str:
    return "".join(character for character in name.casefold() if character.isalnum())


def _is_blank(columns: tuple[str, ...]) -> pl.Expr:
    """Whether a row has none of the cells, as an empty line has."""
    return pl.all_horizontal(pl.col(name).fill_null("").str.strip_chars() == "" for name in columns)


def _whole_number(column: str) -> pl.Expr:
    """Return a number of tokens; null for anything else. pandas writes 472.0 in a column that has gaps."""
    number = pl.col(column).str.strip_chars().cast(pl.Float64, strict=False)
    is_whole = number.is_finite() & (number == number.floor()) & number.is_between(0, MOST_TOKENS)
    return pl.when(is_whole).then(number).cast(pl.Int64)


def _style_of_first(table: CsvTable, cells: pl.LazyFrame) -> TimeStyle:
    """Return how the first row writes its time, which all others must do too."""
    for row, text in _collected(table, cells.select(ROW, table.columns[0]).head(1)).iter_rows():
        style = None if text is None else style_of(text)
        if style is None:
            _refuse_row(table, row, TimeStyle.ZONED)
        else:
            return style
    raise TraceError(f"{table.file.path} holds no request: it has a header and nothing else")


def _refuse_row(table: CsvTable, row: int, style: TimeStyle) -> None:
    """Raise TraceError for what is wrong with a row."""
    before = table.scan().head(row)
    inside = pl.sum_horizontal(pl.exclude(ROW).str.count_matches("\n", literal=True)).sum()
    breaks = _collected(table, before.select(inside)).item() or 0
    where = table.file.where(_header_line(table.file) + 1 + row + int(breaks))
    cells = _collected(table, table.scan().slice(row, 1)).to_dicts()[0]
    time, inputs, outputs = table.columns
    for column in table.columns:
        if not (cells[column] or "").strip():
            raise TraceError(f"{where}: no {column}: the row is cut off or lacks a cell; mend or remove it")
    found = style_of(cells[time])
    if found is None:
        raise TraceError(f"{where}: {time} is {_shown(cells[time])}, which is not {MEANT}")
    if found is not style:
        raise TraceError(
            f"{where}: {time} is {_shown(cells[time])}, {found}, but the first row's is {style}: write all alike"
        )
    raise TraceError(
        f"{where}: {inputs} and {outputs} are {_shown(cells[inputs])} and {_shown(cells[outputs])}: "
        "both must be whole numbers, of 0 or more"
    )


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= SHOWN_CHARACTERS else f"{cell[:SHOWN_CHARACTERS]}...")


def _header_line(file: TraceFile) -> int:
    lines = file.head.lstrip("\ufeff").split("\n")
    return next(number for number, line in enumerate(lines, start=1) if line.strip())


def _collected(table: CsvTable, frame: pl.LazyFrame) -> pl.DataFrame:
    """Return rows. All columns are read: polars would not see that a row has too many cells in those left out."""
    whole_rows = pl.QueryOptFlags(projection_pushdown=False)
    return table.file.collected(frame, partial(_refuse_uneven_row, table), whole_rows)


def _refuse_short_row(table: CsvTable, most_rows: int) -> None:
    """Raise TraceError for the first row that lacks cells, such as a last one that is cut off within a number.

    polars takes them for empty. Where there are quotes, a line is not always a row, and none is looked at.
    """
    if table.width == len(table.columns):
        return  # then it is one of the three that are read
    line = pl.col("line")
    found = table.file.lines().head(_header_line(table.file) + most_rows).filter(line.str.strip_chars() != "")
    has_quotes = line.str.contains('"', literal=True).any()
    lacks = line.str.count_matches(table.separator, literal=True) < table.width - 1
    short, quoted = _collected(table, found.select(pl.col("number").filter(lacks).first(), has_quotes)).row(0)
    if short is not None and not quoted:
        raise TraceError(
            f"{table.file.where(short)}: fewer cells than the {table.width} that the header names: the row is cut off; "
            "mend or remove it"
        )


def _refuse_uneven_row(table: CsvTable) -> None:
    """Raise TraceError for the first row with more cells than the header, or for a quote that is out of place.

    polars says that there is one and not where, so this looks again, line by line.
    """
    names, quoted, began = 0, 0, 1
    with table.file.opened() as file:
        text = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
        rows = csv.reader(text, delimiter=table.separator, strict=True)
        try:
            for cells in rows:
                names = names or len(cells)
                if len(cells) > names:
                    raise TraceError(
                        f"{table.file.where(began)}: {len(cells)} cells, but the header names {names} columns: "
                        "put quotes around cells that contain the separator"
                    )
                if any('"' in cell for cell in cells):
                    quoted = quoted or began
                began = rows.line_num + 1
        except csv.Error as error:
            raise TraceError(f"{table.file.where(began)}: {error}: look for a quote that is never closed") from error
    if quoted:
        raise TraceError(
            f"{table.file.where(quoted)}: a quote inside a cell: put quotes around the cell, and double it"
        )
