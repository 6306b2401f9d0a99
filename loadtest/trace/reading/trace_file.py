"""Opens the file of a trace: text in UTF-8, as it is or compressed by gzip."""

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import msgspec
import polars as pl
from polars.exceptions import PolarsError

from ridgeline.loadtest.errors import MALFORMED, TraceError

HEAD_BYTES = 65_536
"""Of the file that are looked at: a JSON file may be a single line."""
GZIP = b"\x1f\x8b"
NOT_TEXT = {
    b"PAR1": "a Parquet file: write it as CSV, for instance by pandas.read_parquet(FILE).to_csv(NEW, index=False)",
    b"PK\x03\x04": "a zip archive or an Excel file: unpack it, or save it as CSV",
    b"BZh": "compressed by bzip2: unpack it, or compress it by gzip",
    b"\xfd7zXZ": "compressed by xz: unpack it, or compress it by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, or compress it by gzip",
    b"version https://git-lfs": "only the pointer of Git LFS to the file: run git lfs pull",
}
MEANT = "give a file, 'demo', 'poisson:rate=2,input=512,output=64,n=100,seed=1' or 'agentic:sessions=20,turns=8'"
BYTE = re.compile(r"\(byte (\d+)\)")
_Document = TypeVar("_Document")


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file of text, and its first characters."""

    path: Path
    head: str

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

    def documents(self, kind: type[_Document], most: int | None = None) -> Iterator[tuple[int, _Document]]:
        """Yield each object with the number of its line, or of the first for a file that is one object or array.

        Raises TraceError.
        """
        decoder = msgspec.json.Decoder(kind)
        for number, part in self.raw_documents(most):
            try:
                yield number, decoder.decode(part)
            except MALFORMED as error:
                raise TraceError(f"{self.where(number)}: {error}: mend or remove it") from error

    def raw_documents(self, most: int | None = None) -> Iterator[tuple[int, str | msgspec.Raw]]:
        """Yield what `documents` decodes. Raises TraceError."""
        if self.is_one_document:
            yield from ((1, each) for each in self._parts())
            return
        lines = pl.scan_lines(self.path, row_index_name="number", row_index_offset=1, glob=False)
        text = pl.col("line").str.strip_chars_start("\ufeff").str.strip_chars()
        kept = lines.with_columns(text).filter(pl.col("line") != "")
        yield from self.collected(kept if most is None else kept.head(most)).iter_rows()

    def _parts(self) -> list[msgspec.Raw]:
        """Return the elements of a file that is one array, or the one object that it is. Raises TraceError."""
        with _unpacked(self.path) as file:
            content = file.read().removeprefix(b"\xef\xbb\xbf")
        try:
            if content.lstrip()[:1] == b"[":
                return msgspec.json.decode(content, type=list[msgspec.Raw])
            return [msgspec.json.decode(content, type=msgspec.Raw)]
        except MALFORMED as error:
            place = BYTE.search(str(error))
            line = content.count(b"\n", 0, int(place[1]) if place else len(content)) + 1
            raise TraceError(f"{self.where(line)}: {error}: mend it, or fetch the file again") from error

    def collected(self, frame: pl.LazyFrame) -> pl.DataFrame:
        """Return the rows of a frame of this file. Raises TraceError, with the line if the text is not UTF-8.

        All columns are read: polars would not see that a row has too many cells in those left out.
        """
        try:
            return frame.collect(engine="streaming", optimizations=pl.QueryOptFlags(projection_pushdown=False))
        except (PolarsError, OSError) as error:
            self._refuse_what_is_not_text()
            raise TraceError(f"{self.path}: {str(error).splitlines()[0]}: mend the file") from error

    def _refuse_what_is_not_text(self) -> None:
        """Raise TraceError for the first line that is not UTF-8, if there is one."""
        with _unpacked(self.path) as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise TraceError(
                        f"{self.where(number)}: byte {line[error.start]:#04x} is not UTF-8: save the file as UTF-8"
                    ) from error


def _is_whole(text: str) -> bool:
    try:
        msgspec.json.decode(text.encode(), type=msgspec.Raw)
    except MALFORMED:
        return False
    return True


def open_trace(path: Path) -> TraceFile:
    """Look at the beginning of a file. Raises TraceError if it cannot be read or is no text."""
    try:
        with path.open("rb") as file:
            magic = file.read(32)
    except FileNotFoundError:
        raise TraceError(f"there is no trace '{path}': {MEANT}") from None
    except OSError as error:
        raise TraceError(f"the trace '{path}' cannot be read: {error.strerror}") from error
    for known, what in NOT_TEXT.items():
        if magic.startswith(known):
            raise TraceError(f"{path} is {what}")
    with _unpacked(path) as unpacked:
        return TraceFile(path, unpacked.read(HEAD_BYTES).decode(errors="replace"))


@contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    """Yield what is in a file that may be compressed by gzip. Raises TraceError."""
    with path.open("rb") as file:
        is_packed = file.read(2) == GZIP
        file.seek(0)
        if not is_packed:
            yield file
            return
        try:
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(f"{path} is a damaged gzip file ({error}): fetch it again") from error
