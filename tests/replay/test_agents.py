"""Agents' traffic against a real local HTTP server: what waits, what goes out together, what counts."""

import io
import json

import pytest
from rich.console import Console

from ridgeline.loadtest.plan import ReplayPlan
from ridgeline.loadtest.run.records import RecordFile, RequestRecord, counted
from ridgeline.loadtest.run.replay import ReplayResult, run_replay
from ridgeline.loadtest.trace.readers import load_trace
from tests.support.openai_server import Behaviour, running
from tests.support.patience import PATIENCE_S

TOGETHER_S = 0.05
SLOW_S = 0.15
TIMER_S = 0.002
"""By which an event loop may wake too early."""


pytestmark = pytest.mark.usefixtures("plain_tokens")


async def replayed(behaviour: Behaviour, trace: str, record_file: RecordFile | None = None, **more) -> ReplayResult:
    plan = ReplayPlan(trace=trace, settle_s=0.02, tokenizer="unused", warmup_requests=0, **more)
    with running(behaviour) as url:
        return await run_replay(url, plan, Console(file=io.StringIO()), record_file=record_file)


def ended_s(record: RequestRecord) -> float:
    return record.sent_s + record.latency_s


@pytest.fixture
def family(tmp_path) -> str:
    """An agent's turn, two sub-agents of one and two turns, and a turn 60 ms after both."""
    call = {"type": "n", "in": 200, "out": 3}
    subagents = [
        {"t": 1, "type": "subagent", "requests": [call | {"t": 1, "in": 80}]},
        {
            "t": 1,
            "type": "subagent",
            "requests": [call | {"t": 1, "in": 90}, call | {"t": 2, "in": 120, "think_time": 0}],
        },
    ]
    calls = [call | {"t": 0}, *subagents, call | {"t": 9, "in": 300, "think_time": 0.06}]
    (tmp_path / "trace").write_text(json.dumps({"requests": calls}))
    return str(tmp_path / "trace")


async def test_a_turn_leaves_after_the_last_of_its_sub_agents_and_these_leave_together(family):
    behaviour = Behaviour(ttft_s=SLOW_S, tpot_s=0.005)
    first, one, other, later, join = (await replayed(behaviour, family)).records
    assert ended_s(first) <= min(one.sent_s, other.sent_s)
    assert abs(one.sent_s - other.sent_s) < TOGETHER_S, "a sub-agent does not wait for the one beside it"
    assert one.sent_s < ended_s(other)
    assert ended_s(other) <= later.sent_s
    assert 0.06 <= join.scheduled_s - ended_s(later) < PATIENCE_S, "never before the last answer and the think time"
    assert join.send_lag_s >= -TIMER_S
    by_size = {len(prompt): prompt for prompt in behaviour.prompts}
    assert by_size[300][:200] == by_size[200]
    assert by_size[120][:90] == by_size[90]
    assert len({tuple(by_size[size][:16]) for size in (200, 80, 90)}) == 3


async def test_what_waits_for_a_request_that_failed_is_not_sent_and_has_failed(family):
    behaviour = Behaviour(ttft_s=0.01, tpot_s=0.001, faults={1: "refuse"})
    records = (await replayed(behaviour, family)).records
    assert len(behaviour.bodies) in (3, 4), "the sub-agent beside the one that failed goes on"
    assert [record.ok for record in records].count(True) == len(behaviour.bodies) - 1
    assert records[-1].error == "not sent: a request that it waits for failed"
    assert records[-1].scheduled_s >= records[0].scheduled_s + 0.06


async def test_every_request_of_a_generated_trace_leaves_after_those_that_it_waits_for():
    spec = "agentic:sessions=4,rate=40,turns=4,every=1,agents=3,system=64,input=16,added=8,output=2,tool_s=0.01,seed=2"
    trace = load_trace(spec)
    records = (await replayed(Behaviour(ttft_s=0.02, tpot_s=0.001), spec)).records
    assert all(record.ok for record in records)
    for row, record in zip(trace.rows, records, strict=True):
        last_s = max((ended_s(records[parent]) for parent in row.after), default=row.arrival_s - row.think_s)
        assert record.sent_s >= last_s + row.think_s - TIMER_S


async def test_requests_that_are_due_after_the_last_session_began_are_sent_and_not_counted(tmp_path):
    turns = [
        {"session_id": name, "timestamp": at, "input_length": 20, "output_length": 2}
        for name, at in (("a", 0), ("b", 300))
    ]
    later = [turn | {"delay": delay, "timestamp": None} for turn in turns for delay in (0, 500)]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, turns + later)))
    file = RecordFile(tmp_path / "records.jsonl")
    result = await replayed(Behaviour(ttft_s=0.01, tpot_s=0.005), str(tmp_path / "trace"), file)
    assert [record.ok for record in result.records] == [True] * 6
    kept = counted(result.records)
    assert [record.index for record in kept] == [0, 1, 3], "both first turns, and the one that soon follows the first"
    assert max(record.scheduled_s for record in kept) == 0.3
    assert result.window_s == pytest.approx(0.3 * 3 / 2)
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {line["index"]: line["in_window"] for line in lines} == {
        record.index: record in kept for record in result.records
    }


async def test_where_all_sessions_begin_at_once_all_requests_count(family):
    result = await replayed(Behaviour(ttft_s=0.001, tpot_s=0.001), family)
    assert counted(result.records) == result.records
