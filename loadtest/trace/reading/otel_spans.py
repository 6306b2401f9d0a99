"""Reads OpenTelemetry's spans of LLM calls, as OTLP's JSON has them: start, and tokens by the GenAI conventions."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import msgspec

from ridgeline.loadtest.errors import TraceError
from ridgeline.loadtest.trace.reading.json_documents import documents
from ridgeline.loadtest.trace.reading.request_table import ReadRequest, RequestTable, checked_table, frame_of
from ridgeline.loadtest.trace.reading.times import NS
from ridgeline.loadtest.trace.reading.trace_file import TraceFile

INPUTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUTS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
"""The present name, and the one before."""
OTHER = "spans without gen_ai.usage.input_tokens and output_tokens, so no calls of a model"


class _Value(msgspec.Struct, frozen=True, rename="camel"):
    int_value: int | str | None = None
    double_value: float | None = None

    @property
    def number(self) -> int | None:
        """The value as a whole number; OTLP writes integers of 64 bits as text."""
        if self.int_value is not None:
            return int(self.int_value)
        return None if self.double_value is None else int(self.double_value)


class _Attribute(msgspec.Struct):
    key: str
    value: _Value = _Value()


class _Span(msgspec.Struct, rename="camel"):
    start_time_unix_nano: int | str
    attributes: list[_Attribute] = []

    def tokens(self, names: tuple[str, ...]) -> int | None:
        """Return the first of these attributes that the span has."""
        found = {each.key: each.value.number for each in self.attributes}
        return next((found[name] for name in names if found.get(name) is not None), None)


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct, rename="camel"):
    scope_spans: list[_Scope] = []


class _Export(msgspec.Struct, rename="camel"):
    resource_spans: list[_Resource]


def read_otel_spans(file: TraceFile, most_rows: int) -> RequestTable:
    """Read up to so many spans, those of calls of a model as requests at their starts. Raises TraceError."""
    dropped: Counter[str] = Counter()
    rows = frame_of(file, _requests(file, most_rows, dropped))
    return checked_table(file, "OpenTelemetry GenAI spans", rows, dropped=dropped)


def _requests(file: TraceFile, most_rows: int, dropped: Counter[str]) -> Iterator[ReadRequest]:
    first_ns: int | None = None
    for number, span in islice(_spans(file), most_rows):
        try:
            inputs, outputs, at_ns = span.tokens(INPUTS), span.tokens(OUTPUTS), int(span.start_time_unix_nano)
        except ValueError as error:
            raise TraceError(f"{file.where(number)}: {error}: mend or remove the span") from error
        if inputs is None or outputs is None:
            dropped[OTHER] += 1
            continue
        first_ns = at_ns if first_ns is None else first_ns
        yield ReadRequest(number, (at_ns - first_ns) / NS, inputs, outputs)


def _spans(file: TraceFile) -> Iterator[tuple[int, _Span]]:
    for number, export in documents(file, _Export):
        for resource in export.resource_spans:
            yield from ((number, span) for scope in resource.scope_spans for span in scope.spans)
