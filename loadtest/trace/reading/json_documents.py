"""Reads JSON objects that may span lines: one whole file, an array of them, or one a line."""

import re
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from ridgeline.loadtest.errors import MALFORMED, TraceError
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

_Document = TypeVar("_Document")
BYTE = re.compile(r"\(byte (\d+)\)")


def documents(file: TraceFile, kind: type[_Document]) -> Iterator[tuple[int, _Document]]:
    """Yield each object with the number of a line: its own, or the first of a file that is one object or array.

    Raises TraceError.
    """
    decoder = msgspec.json.Decoder(kind)
    parts = objects(file) if file.is_one_document else list(file.numbered_lines())
    for number, part in parts:
        try:
            yield number, decoder.decode(part)
        except MALFORMED as error:
            raise TraceError(f"{file.where(number)}: {error}: mend or remove it") from error


def objects(file: TraceFile) -> list[tuple[int, msgspec.Raw]]:
    """Return what a file is that holds one array, or one object. Raises TraceError."""
    content = file.content().removeprefix(b"\xef\xbb\xbf")
    is_array = content.lstrip()[:1] == b"["
    try:
        if is_array:
            return [(1, each) for each in msgspec.json.decode(content, type=list[msgspec.Raw])]
        return [(1, msgspec.json.decode(content, type=msgspec.Raw))]
    except MALFORMED as error:
        place = BYTE.search(str(error))
        line = content.count(b"\n", 0, int(place[1]) if place else len(content)) + 1
        raise TraceError(f"{file.where(line)}: {error}: mend it, or fetch the file again") from error
