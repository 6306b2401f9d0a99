"""The engine core's loop: what the connector says before a step, and the wait after one without work."""

import ast
import inspect
import math
import queue
import textwrap
import threading
from types import SimpleNamespace

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from ridgeline.engine.connector.events import TransferEvent
from ridgeline.engine.connector.messages import FORETOLD, TRANSFER_EVENTS
from ridgeline.engine.stall import StallWatch
from ridgeline.engine.vllm_engine import EngineStats
from ridgeline.engine.vllm_workarounds import core_loop
from tests.support.clock import FakeClock

VLLMS_OWN = EngineCoreProc._process_engine_step
FOR_EVER_S = 60.0
SOON_S = 20.0
"""A limit for a thread that must end at once; it is reached only by one that never would."""


@pytest.fixture
def core(monkeypatch):
    ran, handled = [], []
    monkeypatch.setattr(EngineCoreProc, "run_busy_loop", EngineCoreProc.run_busy_loop)
    monkeypatch.setattr(EngineCoreProc, "_process_engine_step", VLLMS_OWN)
    monkeypatch.setattr(core_loop, "_run", ran.append)
    monkeypatch.setattr(core_loop, "_cores", [])
    return SimpleNamespace(
        input_queue=queue.Queue(),
        output_queue=queue.Queue(),
        ran=ran,
        step_fn=lambda: (None, False),
        post_step=lambda executed: None,
        scheduler=SimpleNamespace(has_requests=lambda: True, requests={"a": None, "b": None}),
        handled=handled,
        _handle_client_request=lambda *message: handled.append(message),
    )


def test_before_the_loop_runs_nothing_can_be_sent(core):
    core_loop.join_loop(lambda requests: 0.0)
    assert core_loop.send_at_once({TRANSFER_EVENTS: []}) is False


async def test_what_is_sent_at_once_reaches_its_handler_and_changes_no_other_statistics(core):
    core_loop.join_loop(lambda requests: 0.0)
    core_loop.join_loop(lambda requests: 0.0)
    EngineCoreProc.run_busy_loop(core)
    assert core.ran == [core], "vLLM's own loop runs, once"
    stats = EngineStats(None)
    with stats.transfer_events.expect("h") as event:
        plain = msgspec.to_builtins(TransferEvent(handoff_id="h", failed="for example"))
        stats.record(SchedulerStats(num_running_reqs=3, kv_connector_stats={"a": 1.0, TRANSFER_EVENTS: []}), None)
        assert core_loop.send_at_once({TRANSFER_EVENTS: [plain]}) is True
        front_end, sent = core.output_queue.get_nowait()
        received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
        stats.record(received.scheduler_stats, None)
        assert event.result().failed == "for example"
    assert (front_end, received.outputs) == (0, [])
    assert (stats.running, stats.counters) == (3, {"a": 1.0})


def test_an_engine_is_given_what_it_foretells_for_the_step_that_runs(core):
    core_loop.join_loop(lambda requests: 0.0)
    EngineCoreProc.run_busy_loop(core)
    stats, clock = EngineStats(None), FakeClock()
    stats.stall = StallWatch(clock)
    stats.stall.work_begins()
    stats.record(
        SchedulerStats(num_running_reqs=3, kv_connector_stats={"a": 1.0, TRANSFER_EVENTS: [], FORETOLD: 0.0}), None
    )
    for foretold_s, found_after_s in ((8.0, 24.0), (math.inf, 60.0)):
        core_loop.send_at_once({FORETOLD: foretold_s})
        _, sent = core.output_queue.get_nowait()
        stats.record(MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent)).scheduler_stats, None)
        assert (stats.running, stats.counters) == (3, {"a": 1.0})
        clock.now_s += found_after_s - 0.5
        stats.stall.looked(found_after_s - 0.5, "computes")
        assert not stats.stall.is_stalled(60.0, has_work=True)
        clock.now_s += 0.5
        stats.stall.looked(0.5, "computes")
        assert stats.stall.is_stalled(60.0, has_work=True)


def step_of(core, wait_s=lambda requests: FOR_EVER_S):
    """Begin a step on a thread; the event says that it waits."""
    waits = threading.Event()

    def idle_wait_s(requests):
        waits.set()
        return wait_s(requests)

    core_loop.join_loop(idle_wait_s)
    EngineCoreProc.run_busy_loop(core)
    stepping = threading.Thread(target=EngineCoreProc._process_engine_step, args=(core,), daemon=True)
    stepping.start()
    return stepping, waits


def ended(stepping):
    stepping.join(SOON_S)
    return not stepping.is_alive()


def test_vllms_own_step_sleeps_when_it_had_no_work_and_does_otherwise_what_its_replacement_does():
    [method] = ast.parse(textwrap.dedent(inspect.getsource(VLLMS_OWN))).body
    assert ast.unparse(method.body[1:]) == textwrap.dedent("""\
        outputs, model_executed = self.step_fn()
        for output in outputs.items() if outputs else ():
            self.output_queue.put_nowait(output)
        self.post_step(model_executed)
        if not model_executed and self.scheduler.has_requests():
            time.sleep(0.001)
        return model_executed""")


def test_news_of_a_transfer_ends_the_wait_at_once(core):
    stepping, waits = step_of(core)
    assert waits.wait(SOON_S)
    core_loop.wake()
    assert ended(stepping)


def test_a_message_of_the_front_end_ends_the_wait_and_is_handled_before_the_next_step(core):
    stepping, waits = step_of(core)
    assert waits.wait(SOON_S)
    core.input_queue.put_nowait((EngineCoreRequestType.ADD, "request"))
    assert ended(stepping)
    assert core.handled == [(EngineCoreRequestType.ADD, "request")]


def test_news_that_comes_while_the_step_runs_is_not_waited_for(core):
    core.step_fn = lambda: (core_loop.wake(), False)
    stepping, _ = step_of(core)
    assert ended(stepping)


def test_news_is_told_once_however_much_there_is(core):
    core_loop.wake()  # before the loop runs there is nobody to be woken
    stepping, _ = step_of(core, lambda requests: 0.0)
    assert ended(stepping)
    for _ in range(3):
        core_loop.wake()
    assert core.input_queue.qsize() == 1


def test_how_long_to_wait_is_asked_with_the_number_of_requests(core):
    asked = []
    stepping, _ = step_of(core, lambda requests: asked.append(requests) or 0.0)
    assert ended(stepping)
    assert asked == [2]


@pytest.mark.parametrize(("executed", "has_requests"), [(True, True), (False, False)])
def test_a_step_that_computed_something_or_left_nothing_to_do_passes_its_outputs_on_and_waits_for_nothing(
    core, executed, has_requests
):
    posted = []
    core.step_fn, core.post_step = lambda: ({0: "outputs"}, executed), posted.append
    core.scheduler.has_requests = lambda: has_requests
    stepping, waits = step_of(core)
    assert ended(stepping)
    assert not waits.is_set()
    assert core.output_queue.get_nowait() == (0, "outputs")
    assert posted == [executed]
