"""A collector of traces: speaks OTLP over HTTP, and keeps the spans that it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SeenSpan:
    """A span as a collector reads it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    state: str
    kind: int
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What came, and whether it answers."""

    url: str
    spans: list[SeenSpan] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """Of the requests that it has taken."""
    asked: int = 0
    """Requests that it has begun to read."""
    status: int = 200
    """Its answer; with another one it keeps nothing."""
    answers: threading.Event = field(default_factory=threading.Event)
    """Until it is set, what was sent is neither kept nor answered."""


def read(sent: ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    """Yield the spans of a request."""
    for one in sent.resource_spans:
        service = _attributes(one.resource)["service.name"]
        for scope in one.scope_spans:
            yield from (_seen(service, span) for span in scope.spans)


def _attributes(told: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in told.attributes}


def _seen(service: str, span: Any) -> SeenSpan:
    ids = (one.hex() for one in (span.trace_id, span.span_id, span.parent_span_id))
    times_ns = span.start_time_unix_nano, span.end_time_unix_nano
    told = span.status.code, _attributes(span)
    return SeenSpan(service, span.name, *ids, span.trace_state, span.kind, *times_ns, *told)


@contextmanager
def collecting(*, answers: bool = True, port: int = 0) -> Iterator[Collector]:
    """Run a collector. If it does not answer, what it was asked is lost when it ends."""
    ends = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.asked += 1
            body = self.rfile.read(int(self.headers["content-length"]))
            while not collector.answers.wait(0.01):
                if ends.is_set():
                    return
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.paths.append(self.path)
            if collector.status == 200:
                collector.spans += read(ExportTraceServiceRequest.FromString(body))
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    if answers:
        collector.answers.set()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        ends.set()
        server.shutdown()
        server.server_close()
        thread.join()
