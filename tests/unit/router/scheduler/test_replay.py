"""What a recording tells is decided again by the same code, and comes out the same."""

import math

import msgspec
import pytest

from ridgeline.router.scheduler.offline_simulation import AdaptiveSimulation, recorded
from ridgeline.router.scheduler.recorded_events import (
    BadRecording,
    Chose,
    Compared,
    FleetSeen,
    ModeBecame,
    Placed,
    Stopped,
    line_of,
    read_recording,
)
from ridgeline.router.scheduler.replay import replay
from tests.support.simulated_serving import fleet_model
from tests.unit.router.scheduler.samples import fleet, poisson


class Recorded(AdaptiveSimulation):
    """A simulated deployment that is recorded from one of its requests on.

    A comparison of policies ends some requests after it has begun, as live, where streams go first.
    """

    def __init__(self, begin_at, compares_for, **of):
        super().__init__(fleet(**of), fleet_model(**of))
        self.begin_at, self.compares_for = begin_at, compares_for
        self.events, self.comparing, self.ends_at = [], None, 0

    def arrives(self, request):
        if request.number == self.begin_at:
            self.events.append(self.adaptive.state("adaptive"))
            self.traffic.listeners.append(self.events.append)
        if self.comparing is not None and request.number >= self.ends_at:
            self._end_comparing()
        super().arrives(request)
        if self.comparing is not None and not self.compares_for:
            self._end_comparing()

    def _compare(self):
        self.comparing, self.ends_at = self.adaptive.compare(), self.traffic.arrived_requests + self.compares_for
        next(self.comparing, None)

    def _end_comparing(self):
        for _ in self.comparing:
            pass
        self.comparing = None


def recording_of(requests, begin_at=0, compares_for=0, **of):
    """The lines that it would have recorded."""
    simulation = Recorded(begin_at, compares_for, **of)
    simulation.run(requests)
    simulation.events.append(Stopped(simulation.now_s, "the time is over"))
    return [line_of(event) for event in simulation.events]


def turning_traffic():
    long = poisson(0.5, 120, ttft_slo_s=1.9, tpot_slo_s=0.05)
    short = poisson(0.6, 150, prompt_tokens=128, output_tokens=128, ttft_slo_s=0.52, tpot_slo_s=0.05)
    for number, one in enumerate(short, 120):
        one.number, one.arrival_s = number, one.arrival_s + long[-1].arrival_s
    return [*long, *short]


@pytest.mark.parametrize("begin_at", [0, 100])
@pytest.mark.parametrize("compares_for", [0, 3])
def test_every_decision_of_a_recording_comes_out_the_same_to_the_last_one(begin_at, compares_for):
    lines = recording_of(turning_traffic(), begin_at, compares_for)
    events = list(read_recording(lines, "a.jsonl"))
    made = replay(events)
    assert made.differences == []
    assert made.placements == sum(isinstance(event, Placed) for event in events) == 270 - begin_at
    assert made.comparisons == sum(isinstance(event, Chose) for event in events) >= 5
    assert len({event.policy for event in events if isinstance(event, Chose)}) > 1


def test_a_decision_that_was_another_one_is_found():
    events = list(read_recording(recording_of(poisson(0.5, 30)), "a.jsonl"))
    place = next(index for index, event in enumerate(events) if isinstance(event, Placed))
    other = "w1" if events[place].prompt_worker == "w0" else "w0"
    events[place] = msgspec.structs.replace(events[place], prompt_worker=other)
    found = replay(events).differences
    assert len(found) == 1
    assert other in found[0].recorded


def test_a_recording_that_begins_during_a_comparison_takes_over_its_result():
    events = list(read_recording(recording_of(turning_traffic()), "a.jsonl"))
    events.remove(next(event for event in events if isinstance(event, Compared)))
    made = replay(events)
    assert made.comparisons == sum(isinstance(event, Chose) for event in events) - 1
    assert made.differences == []


def test_no_limit_and_no_text_are_in_a_line():
    lines = recording_of(poisson(0.5, 3))
    assert b"ttft_slo_s" not in b"".join(lines)
    (event,) = [one for one in read_recording(lines, "a.jsonl") if isinstance(one, Placed)][:1]
    assert event.request.ttft_slo_s == math.inf


def test_the_last_line_may_be_cut_off():
    lines = recording_of(poisson(0.5, 5))
    cut = [*lines[:-1], lines[-1][:-9]]
    assert len(list(read_recording(cut, "a.jsonl"))) == len(lines) - 1


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda lines: [], "a.jsonl is empty"),
        (lambda lines: lines[1:], "does not begin as a recording does"),
        (lambda lines: [lines[0], b"{}\n", *lines[1:]], "a.jsonl, line 2: "),
        (lambda lines: [b"\x00\n"], "a.jsonl, line 1: "),
        (lambda lines: [lines[0], lines[1].replace(b"arrived", b"\xff"), *lines[2:]], "a.jsonl, line 2: "),
        (lambda lines: [lines[0], b"[" * 10_000 + b"\n"], "a.jsonl, line 2: "),
    ],
)
def test_what_is_no_recording_is_refused_with_its_line(spoil, says):
    with pytest.raises(BadRecording, match=says):
        list(read_recording(spoil(recording_of(poisson(0.5, 5))), "a.jsonl"))


def test_a_recording_tells_the_traffic_and_what_served_it():
    lines = recording_of(turning_traffic())
    events = [*read_recording(lines, "a.jsonl")]
    events.insert(-1, ModeBecame(events[-1].at_s, "colocated"))
    known = recorded(events)
    assert len(known.requests) == 270
    assert known.requests[0].arrival_s == 0.0
    assert {(one.prompt_tokens, one.output_tokens) for one in known.requests} == {(512, 64), (128, 128)}
    assert known.policies[0] == known.policies[-1] == "colocated"
    assert len({*known.policies}) > 1


def test_a_recording_without_an_answer_or_without_a_step_model_says_what_to_do():
    events = [*read_recording(recording_of(poisson(0.5, 5)), "a.jsonl")]
    with pytest.raises(BadRecording, match="record for longer"):
        recorded(events[:3])
    with pytest.raises(BadRecording, match="record while the server has traffic"):
        recorded([msgspec.structs.replace(events[0], fleet=None)])


def test_a_moment_without_workers_is_no_fleet_to_ask_about():
    events = [*read_recording(recording_of(poisson(0.5, 5)), "a.jsonl")]
    began = events[0]
    none_left = msgspec.structs.replace(began.fleet, workers=())
    last = FleetSeen(events[-1].at_s, none_left)
    assert recorded([*events, last]).fleet.workers == recorded(events).fleet.workers
    with pytest.raises(BadRecording, match="no engine's steps were known"):
        recorded([msgspec.structs.replace(began, fleet=none_left), last])
