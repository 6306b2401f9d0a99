"""OpenTelemetry spans of sequences that have ended, sent to a collector by OTLP over HTTP.

The router alone makes spans, once per sequence at its end: it knows all stages then, also those that workers report
(`ridgeline.router.observe.timeline`). So nothing is done per token or while steps run, workers need no exporter, and
all spans of a trace are on one clock. Each span names the service of its role, as if that process had sent it.

They are encoded with OpenTelemetry's messages, not with its SDK's spans and exporter: those took four times the CPU,
and a thread that competed with the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Final

import httpx
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBasedTraceIdRatio
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.semconv.attributes.service_attributes import SERVICE_NAME
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ridgeline.router.observe.ended_requests import EndedRequest, Handoff
from ridgeline.router.settings import TracingConfig

MOST_WAITING: Final = 2048
"""Sequences whose spans may wait for the collector, about 2.5 KB each. Above it the oldest ones are dropped."""
MOST_AT_ONCE: Final = 512
"""Sequences in one request to the collector: 1.3 MB, of the 20 MiB that OpenTelemetry's collector takes by default."""
SEND_EVERY_S: Final = 1.0
SEND_WITHIN_S: Final = 5.0
LAST_SPANS_S: Final = 1.0
"""How long the end of a router may wait for the collector."""
_MOVING: Final = frozenset({"wire", "decode"})
"""Stages whose spans tell of the hand-off; with overlap, nothing may be left of the first."""
_SCOPE: Final = InstrumentationScope(name="ridgeline")
_ids: Final = RandomIdGenerator()
_FIELDS: Final = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
"""By the type of an attribute, where `AnyValue` has it."""
Told = Mapping[str, str | bool | int | float | None]
"""Attributes; those that are None are left out."""
logger = logging.getLogger(__name__)


class Traces:
    """Sends the spans of sequences while `run` runs. Neither a slow nor a dead collector delays a request."""

    def __init__(self, config: TracingConfig, model: str) -> None:
        self._url = httpx.URL(config.traces_url)
        self._model = model
        self._sampler = ParentBasedTraceIdRatio(config.sample_ratio)
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        """Encoded requests to the collector. One after the other, they are one request: that is how protobuf merges."""
        self._fails = False

    def send(self, ended: EndedRequest, headers: Mapping[str, str]) -> str:
        """Queue the spans of a sequence and return the id of its trace; empty if it is not sampled.

        `headers` are its client's, of which `traceparent` and `tracestate` name its parent and whether that is sampled.
        """
        above = TraceContextTextMapPropagator().extract(headers)
        parent = trace.get_current_span(above).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else _ids.generate_trace_id()
        if self._sampler.should_sample(above, trace_id, "").decision is not Decision.RECORD_AND_SAMPLE:
            return ""
        self._waiting.append(spans(ended, self._model, trace_id, parent).SerializeToString())
        return trace.format_trace_id(trace_id)

    async def run(self) -> None:
        """Send what waits once a second; when cancelled, the rest, for `LAST_SPANS_S` at most."""
        async with httpx.AsyncClient(timeout=SEND_WITHIN_S, trust_env=False) as client:
            try:
                while True:
                    await asyncio.sleep(0 if len(self._waiting) >= MOST_AT_ONCE and not self._fails else SEND_EVERY_S)
                    await self._post(client)
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_SPANS_S):
                        await self._post(client)
                        while self._waiting and not self._fails:
                            await self._post(client)

    async def _post(self, client: httpx.AsyncClient) -> None:
        """Send a batch. If that fails, it waits again, before what came meanwhile, as far as there is room.

        What the collector refuses as wrong, it would refuse again.
        """
        over = False
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_AT_ONCE))]
        if not batch:
            return
        try:
            headers = {"content-type": "application/x-protobuf"}
            (await client.post(self._url, content=b"".join(batch), headers=headers)).raise_for_status()
            over, self._fails = True, False
        except httpx.HTTPError as error:
            if not self._fails:
                logger.warning("traces do not reach %s (router.tracing.endpoint): %r", self._url, error)
            self._fails = True
            status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 500
            over = status < 500 and status != httpx.codes.TOO_MANY_REQUESTS
        finally:
            room = MOST_WAITING - len(self._waiting)
            if room and not over:  # also if the router ends meanwhile
                self._waiting.extendleft(reversed(batch[-room:]))


def spans(ended: EndedRequest, model: str, trace_id: int, parent: SpanContext) -> ExportTraceServiceRequest:
    """Return the span of a sequence and one for each stage. `dispatch`, when nobody works on it, is a gap."""
    sent = ExportTraceServiceRequest()
    by_role: dict[str, ScopeSpans] = {}
    state = parent.trace_state.to_header()

    def add(role: str, name: str, start_s: float, duration_s: float, above: bytes, told: Told) -> Span:
        """Add a span where it stays, since what is assigned to a message is copied."""
        if role not in by_role:
            by_role[role] = sent.resource_spans.add(resource=_service(role)).scope_spans.add(scope=_SCOPE)
        begin_s = ended.arrived_unix_s + start_s
        span: Span = by_role[role].spans.add(
            trace_id=trace_id.to_bytes(16),
            span_id=_ids.generate_span_id().to_bytes(8),
            parent_span_id=above,
            trace_state=state,
            flags=TraceFlags.SAMPLED,
            name=name,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=int(begin_s * 1e9),
            end_time_unix_nano=int((begin_s + duration_s) * 1e9),
        )
        for key, value in told.items():
            if value is not None:
                setattr(span.attributes.add(key=key).value, _FIELDS[type(value)], value)
        return span

    operation = "chat" if ended.request_id.startswith(("chatcmpl-", "resp_")) else "text_completion"
    above = parent.span_id.to_bytes(8) if parent.is_valid else b""
    told = _told(ended, operation, model)
    whole = add("router", f"{operation} {model}", 0.0, ended.latency_s, above, told)
    whole.kind = Span.SPAN_KIND_SERVER
    if ended.outcome == "failed":
        whole.status.code = Status.STATUS_CODE_ERROR
    for stage in ended.stages:
        if stage.name != "dispatch":
            moved = _moved(ended.handoff) if ended.handoff is not None and stage.name in _MOVING else {}
            told = {"ridgeline.worker": stage.worker or None, **moved}
            add(stage.pool or "router", stage.name, stage.start_s, stage.duration_s, whole.span_id, told)
    return sent


@cache
def _service(role: str) -> Resource:
    return Resource(attributes=[KeyValue(key=SERVICE_NAME, value=AnyValue(string_value=f"ridgeline-{role}"))])


def _told(ended: EndedRequest, operation: str, model: str) -> Told:
    """Return the attributes of a sequence: those of GenAI where there are any. Texts are not among them."""
    return {
        gen_ai.GEN_AI_OPERATION_NAME: operation,
        gen_ai.GEN_AI_PROVIDER_NAME: "ridgeline",
        gen_ai.GEN_AI_REQUEST_MODEL: model,
        gen_ai.GEN_AI_RESPONSE_ID: ended.request_id,
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: ended.prompt_tokens,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: ended.output_tokens,
        gen_ai.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: ended.ttft_s,
        "ridgeline.tpot_s": ended.tpot_s,
        "ridgeline.ttft_limit_s": ended.ttft_limit_s,
        "ridgeline.tpot_limit_s": ended.tpot_limit_s,
        "ridgeline.sequence_id": ended.sequence_id,
        "ridgeline.http_request_id": ended.http_request_id,
        "ridgeline.outcome": ended.outcome,
        ERROR_TYPE: ended.error or None,
        "ridgeline.path": ended.path,
        "ridgeline.placements": ended.placements,
        "ridgeline.policy": None if ended.decision is None else ended.decision.policy,
        "ridgeline.reason": None if ended.decision is None else ended.decision.reason,
    }


def _moved(handoff: Handoff) -> Told:
    return {
        "ridgeline.handoff.transport": handoff.transport,
        "ridgeline.handoff.bytes": handoff.num_bytes,
        "ridgeline.handoff.source": handoff.source,
        "ridgeline.handoff.outcome": handoff.outcome,
        "ridgeline.handoff.overlapped": handoff.overlapped,
    }
