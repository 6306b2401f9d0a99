"""Which spans a sequence becomes, and what a collector that does not answer can cost."""

import asyncio
from contextlib import ExitStack, asynccontextmanager

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext, TraceFlags, TraceState

from ridgeline.router.observe import tracing
from ridgeline.router.observe.ended_requests import EndedRequests
from ridgeline.router.observe.tracing import Traces, spans
from ridgeline.router.settings import TracingConfig
from tests.support.clock import FakeClock
from tests.support.collector import collecting, read
from tests.support.ended_requests import ended, handed_over
from tests.support.free_port import free_port
from tests.support.patience import PATIENCE_S, eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
NOT_SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}


def record(timeline, outcome="finished"):
    recent = EndedRequests(FakeClock(), wall_clock=FakeClock(1000.0))
    recent.add(timeline, outcome)
    return recent.latest(1)[0]


def made(one, parent=INVALID_SPAN_CONTEXT):
    return list(read(spans(one, "m", 7, parent)))


@asynccontextmanager
async def running(endpoint, ratio=1.0):
    traces = Traces(TracingConfig(endpoint=endpoint, sample_ratio=ratio), "m")
    task = asyncio.create_task(traces.run())
    await asyncio.sleep(0)
    try:
        yield traces
    finally:
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()


def test_a_sequence_becomes_a_span_of_the_router_and_one_for_each_stage_of_the_service_that_did_it():
    all_of_it = made(record(handed_over()))
    arrived_s = 1000.0 - 3.375
    [whole] = [one for one in all_of_it if one.name == "text_completion m"]
    assert (whole.service, whole.parent_id, whole.kind) == ("ridgeline-router", "", Span.SPAN_KIND_SERVER)
    assert (whole.start_ns, whole.end_ns) == (int(arrived_s * 1e9), 1000 * 10**9)
    assert {one.trace_id for one in all_of_it} == {f"{7:032x}"}
    assert len({one.span_id for one in all_of_it}) == len(all_of_it)
    stages = sorted((one for one in all_of_it if one is not whole), key=lambda one: one.start_ns)
    assert {one.parent_id for one in stages} == {whole.span_id}
    assert [
        (one.service, one.name, one.start_ns / 1e9 - arrived_s, one.end_ns / 1e9 - arrived_s) for one in stages
    ] == [
        ("ridgeline-router", "preprocess", 0.0, 0.125),
        ("ridgeline-router", "queue", 0.125, 0.375),
        ("ridgeline-prefill", "engine_queue", 0.5, 0.75),
        ("ridgeline-prefill", "prefill", 0.75, 1.25),
        ("ridgeline-decode", "handoff_wait", 1.375, 1.5),
        ("ridgeline-decode", "wire", 1.5, 1.75),
        ("ridgeline-decode", "decode_queue", 1.75, 2.125),
        ("ridgeline-decode", "decode", 2.125, 3.375),
    ]


def test_attributes_follow_the_conventions_for_genai_and_have_no_text():
    told = {one.name: one.attributes for one in made(record(handed_over(http_request_id="h")))}
    assert told["text_completion m"] == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "ridgeline",
        "gen_ai.request.model": "m",
        "gen_ai.response.id": "cmpl-1",
        "gen_ai.usage.input_tokens": 512,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.time_to_first_chunk": 1.25,
        "ridgeline.tpot_s": 1.0625,
        "ridgeline.sequence_id": "r-1",
        "ridgeline.http_request_id": "h",
        "ridgeline.outcome": "finished",
        "ridgeline.path": "disaggregated",
        "ridgeline.placements": 1,
    }
    assert (told["queue"], told["prefill"]) == ({}, {"ridgeline.worker": "worker-0"})
    assert told["handoff_wait"] == told["decode_queue"] == {"ridgeline.worker": "worker-1"}
    moved = {
        "ridgeline.worker": "worker-1",
        "ridgeline.handoff.transport": "shm",
        "ridgeline.handoff.bytes": 4096,
        "ridgeline.handoff.source": "worker-0",
        "ridgeline.handoff.outcome": "ok",
        "ridgeline.handoff.overlapped": False,
    }
    assert [told[name] for name in ("wire", "decode")] == [moved] * 2


@pytest.mark.parametrize(
    ("request_id", "outcome", "name", "error"),
    [
        ("chatcmpl-1", "finished", "chat m", None),
        ("resp_1", "cancelled", "chat m", None),
        ("cmpl-1-0", "failed", "text_completion m", "WorkerLost"),
    ],
)
def test_the_operation_and_the_outcome_are_told(request_id, outcome, name, error):
    [whole, *_] = made(record(ended(None, 0.5, request_id=request_id, error=error or ""), outcome))
    assert (whole.name, whole.attributes.get("error.type")) == (name, error)
    assert whole.status == (Status.STATUS_CODE_ERROR if error else Status.STATUS_CODE_UNSET)
    assert whole.attributes["ridgeline.outcome"] == outcome


@pytest.mark.parametrize(
    ("ratio", "headers", "trace_id", "parent_id"),
    [
        pytest.param(1.0, SAMPLED, TRACE, PARENT, id="the client's span is the parent"),
        pytest.param(0.0, SAMPLED, TRACE, PARENT, id="the client decides, whatever the ratio"),
        pytest.param(1.0, NOT_SAMPLED, "", None, id="also against it"),
        pytest.param(1.0, {}, None, "", id="a trace of its own"),
        pytest.param(1.0, {"traceparent": "00-nonsense"}, None, "", id="what nobody can read is no parent"),
        pytest.param(0.0, {}, "", None, id="none"),
    ],
)
async def test_the_client_s_context_is_continued_and_decides_what_is_sampled(ratio, headers, trace_id, parent_id):
    with collecting() as collector:
        async with running(collector.url, ratio) as traces:
            given = traces.send(record(handed_over()), headers)
        assert (trace_id is None and len(given) == 32) or given == trace_id
        assert {one.trace_id for one in collector.spans} == ({given} - {""})
        assert {one.parent_id for one in collector.spans if one.name.endswith(" m")} == ({parent_id} - {None})


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
async def test_spans_go_where_collectors_expect_them_and_those_of_many_sequences_together(path):
    with collecting() as collector:
        async with running(f"{collector.url}{path}") as traces:
            ids = {traces.send(record(handed_over()), {}) for _ in range(50)}
        assert collector.paths == ["/v1/traces"]
        assert ({one.trace_id for one in collector.spans}, len(collector.spans)) == (ids, 50 * 9)


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://c:4317", "http://", "http://c/?a=1", ""])
def test_what_is_no_url_of_a_collector_is_refused_with_the_form_of_one(endpoint):
    with pytest.raises(ValueError, match="write it as http://collector:4318"):
        TracingConfig(endpoint=endpoint)


async def test_what_a_collector_does_not_take_waits_up_to_a_bound_and_the_oldest_goes_first(monkeypatch, caplog):
    monkeypatch.setattr(tracing, "MOST_WAITING", 20)
    monkeypatch.setattr(tracing, "SEND_EVERY_S", 0.01)
    monkeypatch.setattr(tracing, "LAST_SPANS_S", PATIENCE_S)
    port = free_port()
    with ExitStack() as until_all_is_sent:
        async with running(f"http://127.0.0.1:{port}") as traces:
            ids = [traces.send(record(handed_over()), {}) for _ in range(10)]
            await eventually(lambda: "router.tracing.endpoint" in caplog.text)
            ids += [traces.send(record(handed_over()), {}) for _ in range(20)]
            collector = until_all_is_sent.enter_context(collecting(port=port))
            await eventually(lambda: len(collector.spans) >= 20 * 9)
            last = traces.send(record(handed_over()), {})
    assert {one.trace_id for one in collector.spans} == {*ids[-20:], last}
    assert caplog.text.count("router.tracing.endpoint") == 1


@pytest.mark.parametrize(("status", "again"), [(400, False), (404, False), (413, False), (429, True), (503, True)])
async def test_what_a_collector_refuses_is_sent_again_only_if_it_may_take_it_then(monkeypatch, status, again, caplog):
    monkeypatch.setattr(tracing, "SEND_EVERY_S", 0.01)
    with collecting() as collector:
        async with running(collector.url) as traces:
            collector.status = status
            first = traces.send(record(handed_over()), {})
            await eventually(lambda: str(status) in caplog.text)
            collector.status = 200
            second = traces.send(record(handed_over()), {})
        assert {one.trace_id for one in collector.spans} == ({first, second} if again else {second})


@pytest.mark.parametrize("begun", [False, True], ids=["before it was sent", "while it is sent"])
async def test_the_end_does_not_wait_for_a_collector_that_never_answers(monkeypatch, begun):
    monkeypatch.setattr(tracing, "LAST_SPANS_S", 0.01)
    monkeypatch.setattr(tracing, "SEND_EVERY_S", 0.0 if begun else PATIENCE_S)
    with collecting(answers=False) as collector:
        async with asyncio.timeout(PATIENCE_S), running(collector.url) as traces:
            traces.send(record(handed_over()), {})
            await eventually(lambda: not begun or collector.asked)
        assert collector.spans == []


def test_a_parent_with_a_state_passes_it_on():
    parent = SpanContext(7, 8, True, TraceFlags(1), TraceState([("vendor", "x")]))
    got = made(record(handed_over()), parent)
    assert {one.state for one in got} == {"vendor=x"}
    assert {one.parent_id for one in got if one.name == "text_completion m"} == {f"{8:016x}"}
