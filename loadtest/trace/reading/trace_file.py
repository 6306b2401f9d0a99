"""Opens the file of a trace, whatever wrote it: gzip, Zstandard, byte order marks, UTF-16, carriage returns."""

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
import polars as pl
from polars.exceptions import PolarsError

from ridgeline.loadtest.errors import MALFORMED, TraceError

HEAD_BYTES, HEAD_LINES = 65_536, 64
"""Of the file that are looked at: a JSON file may be a single line."""
USUAL = pl.QueryOptFlags()
GZIP, ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
NOT_TEXT = {
    b"PAR1": "a Parquet file: write it as CSV, for instance by pandas.read_parquet(FILE).to_csv(NEW, index=False)",
    b"PK\x03\x04": "a zip archive or an Excel file: unpack it, or save it as CSV",
    b"BZh": "compressed by bzip2: unpack it, or compress it by gzip or zstd",
    b"\xfd7zXZ": "compressed by xz: unpack it, or compress it by gzip or zstd",
    b"version https://git-lfs": "only the pointer of Git LFS to the file: run git lfs pull",
}
MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""The encoding that a byte order mark names; UTF-32 before UTF-16, which begins alike."""
MEANT = "give a file, 'demo', or 'poisson:rate=2,input=512,output=64,n=100,seed=1'"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file whose text polars can read: as it lies on the disk, or as bytes where it had to be converted."""

    path: Path
    target: Path | bytes
    head: str
    """Its first characters."""

    @property
    def text(self) -> str:
        """Its first characters, without what may come before the first that counts."""
        return self.head.lstrip("\ufeff \r\n\t")

    @property
    def is_one_document(self) -> bool:
        """Whether this is one array or object of JSON, not an object a line."""
        first, _, rest = self.text.partition("\n")
        return first.startswith("[") or (first.startswith("{") and not _is_whole(first) and bool(rest))

    def where(self, line: int) -> str:
        """Name a line of it, for errors."""
        return f"{self.path}, line {line}"

    def lines(self) -> pl.LazyFrame:
        """Return the lines with their numbers, from 1 on, in the columns `number` and `line`."""
        return pl.scan_lines(self.target, row_index_name="number", row_index_offset=1, glob=False)

    def numbered_lines(self, most: int | None = None) -> Iterator[tuple[int, str]]:
        """Yield each line that is not blank, with its number. Raises TraceError."""
        text = pl.col("line").str.strip_chars_start("\ufeff").str.strip_chars()
        lines = self.lines().with_columns(text).filter(pl.col("line") != "")
        yield from self.collected(lines if most is None else lines.head(most)).iter_rows()

    def collected(
        self,
        frame: pl.LazyFrame,
        refuse: Callable[[], None] = lambda: None,
        optimizations: pl.QueryOptFlags = USUAL,
    ) -> pl.DataFrame:
        """Return the rows of a frame of this file. Raises TraceError, with the line if the text is not UTF-8.

        polars does not say where an error is: `refuse` looks for it, and raises if it finds it.
        """
        try:
            return frame.collect(engine="streaming", optimizations=optimizations)
        except (PolarsError, OSError) as error:
            self.refuse_what_is_not_text()
            refuse()
            raise TraceError(f"{self.path}: {str(error).splitlines()[0]}") from error

    def refuse_what_is_not_text(self) -> None:
        """Raise TraceError for the first line that is not UTF-8, if there is one."""
        with self.opened() as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise TraceError(
                        f"{self.where(number)}: byte {line[error.start]:#04x} is not UTF-8: save the file as UTF-8"
                    ) from error

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Yield the text as UTF-8, for what polars does not do. Raises TraceError."""
        with io.BytesIO(self.target) if isinstance(self.target, bytes) else _unpacked(self.path) as file:
            yield file

    def content(self) -> bytes:
        """Return the whole text as UTF-8. Raises TraceError."""
        with self.opened() as file:
            return file.read()


def _is_whole(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode(), type=msgspec.Raw)
    except MALFORMED:
        return False
    return True


def open_trace(path: Path) -> TraceFile:
    """Look at the beginning of a file, and convert it where polars would not read it. Raises TraceError."""
    try:
        with path.open("rb") as file:
            packed = file.read(HEAD_BYTES)
    except FileNotFoundError:
        raise TraceError(f"there is no trace '{path}': {MEANT}") from None
    except OSError as error:
        raise TraceError(f"the trace '{path}' cannot be read: {error.strerror}") from error
    for magic, what in NOT_TEXT.items():
        if packed.startswith(magic):
            raise TraceError(f"{path} is {what}")
    with _unpacked(path, HEAD_LINES) as file:
        head = file.read(HEAD_BYTES)
    encoding = _encoding(head)
    if encoding in ("utf-8", "utf-8-sig") and not _has_only_carriage_returns(head):
        return TraceFile(path, path, head.decode(encoding, errors="replace"))
    try:
        with _unpacked(path) as file:
            text = file.read().decode(encoding)
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not the {encoding.upper()} that it begins as: save it as UTF-8") from error
    converted = text.replace("\r\n", "\n").replace("\r", "\n").encode()
    return TraceFile(path, converted, converted[:HEAD_BYTES].decode(errors="replace"))


@contextmanager
def _unpacked(path: Path, most_lines: int | None = None) -> Iterator[BinaryIO]:
    """Yield what is in a file that may be compressed; of zstd, only so many lines. Raises TraceError."""
    with path.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        if magic == ZSTANDARD:
            yield io.BytesIO(_zstandard(path, most_lines))
        elif magic.startswith(GZIP):
            try:
                with gzip.open(file) as unpacked:
                    yield cast(BinaryIO, unpacked)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise TraceError(f"{path} is a damaged gzip file ({error}): fetch it again") from error
        else:
            yield file


def _zstandard(path: Path, most_lines: int | None) -> bytes:
    """Unpack by polars, since Python does so from 3.14 on only."""
    lines = pl.scan_lines(path, n_rows=most_lines, glob=False)
    try:
        return b"\n".join(line.encode() for line in lines.collect(engine="streaming").to_series())
    except (PolarsError, OSError) as error:
        raise TraceError(
            f"{path} is damaged, or not UTF-8, inside its compression by zstd: unpack it by zstd -d, and look there"
        ) from error


def _encoding(head: bytes) -> str:
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    if len(head) > 3:  # as all formats begin: with characters of ASCII
        if head[1:4:2] == b"\0\0" and head[0] and head[2]:
            return "utf-16-le"
        if head[0:4:2] == b"\0\0" and head[1] and head[3]:
            return "utf-16-be"
    return "utf-8"


def _has_only_carriage_returns(head: bytes) -> bool:
    return b"\r" in head and b"\n" not in head
