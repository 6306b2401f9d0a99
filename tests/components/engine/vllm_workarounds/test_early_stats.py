"""What the connector says before a step, from the engine core's queue to the handler's notice."""

import math
import queue
from types import SimpleNamespace

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from engine.connector.events import Notice
from engine.connector.messages import FORETOLD, NOTICES
from engine.stall import StallWatch
from engine.vllm_engine import EngineStats
from engine.vllm_workarounds import early_stats
from tests.support.clock import FakeClock


@pytest.fixture
def core(monkeypatch):
    ran = []
    monkeypatch.setattr(EngineCoreProc, "run_busy_loop", EngineCoreProc.run_busy_loop)
    monkeypatch.setattr(early_stats, "_run", ran.append)
    monkeypatch.setattr(early_stats, "_queues", [])
    return SimpleNamespace(output_queue=queue.Queue(), ran=ran)


def test_before_the_loop_runs_nothing_can_be_sent(core):
    early_stats.find_output_queue()
    assert early_stats.send_at_once({NOTICES: []}) is False


async def test_what_is_sent_at_once_reaches_its_handler_and_changes_no_other_statistics(core):
    early_stats.find_output_queue()
    early_stats.find_output_queue()
    EngineCoreProc.run_busy_loop(core)
    assert core.ran == [core], "vLLM's own loop runs, once"
    stats = EngineStats(None)
    with stats.notices.expect("h") as notice:
        plain = msgspec.to_builtins(Notice(handoff_id="h", failed="for example"))
        stats.record(SchedulerStats(num_running_reqs=3, kv_connector_stats={"a": 1.0, NOTICES: []}), None)
        assert early_stats.send_at_once({NOTICES: [plain]}) is True
        front_end, sent = core.output_queue.get_nowait()
        received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
        stats.record(received.scheduler_stats, None)
        assert notice.result().failed == "for example"
    assert (front_end, received.outputs) == (0, [])
    assert (stats.running, stats.counters) == (3, {"a": 1.0})


def test_an_engine_is_given_what_it_foretells_for_the_step_that_runs(core):
    early_stats.find_output_queue()
    EngineCoreProc.run_busy_loop(core)
    stats, clock = EngineStats(None), FakeClock()
    stats.stall = StallWatch(clock)
    stats.stall.work_begins()
    stats.record(SchedulerStats(num_running_reqs=3, kv_connector_stats={"a": 1.0, NOTICES: [], FORETOLD: 0.0}), None)
    for foretold_s, found_after_s in ((8.0, 24.0), (math.inf, 60.0)):
        early_stats.send_at_once({FORETOLD: foretold_s})
        _, sent = core.output_queue.get_nowait()
        stats.record(MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent)).scheduler_stats, None)
        assert (stats.running, stats.counters) == (3, {"a": 1.0})
        clock.now_s += found_after_s - 0.5
        stats.stall.looked(found_after_s - 0.5, "computes")
        assert not stats.stall.is_stalled(60.0, has_work=True)
        clock.now_s += 0.5
        stats.stall.looked(0.5, "computes")
        assert stats.stall.is_stalled(60.0, has_work=True)
