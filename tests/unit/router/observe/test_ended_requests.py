"""What operators are told of sequences that have ended, and of the decisions of mode adaptive."""

import json
import math

import msgspec
import pytest

from ridgeline.cluster.commands.decisions import sentences
from ridgeline.router.observe.ended_requests import KEPT, EndedRequest, EndedRequests, Handoff
from ridgeline.router.scheduler.features import Assignment, RequestFeatures
from tests.support.clock import FakeClock
from tests.support.ended_requests import ended, handed_over


def an_assignment(prompt_worker="w0", decode_worker="w1", reason="in_shape", **values):
    request = RequestFeatures(700, 60, waited_s=0.25)
    predicted = {"ttft_s": 0.4, "tpot_s": 0.05}
    return Assignment(prompt_worker, decode_worker, reason, policy="1 of 2", request=request, **predicted, **values)


def told(timeline, outcome="finished", after_s=3.0):
    """What went over HTTP, and what is printed."""
    clock = FakeClock()
    recent = EndedRequests(clock)
    recent.add(timeline, outcome)
    clock.now_s += after_s
    (row,) = json.loads(json.dumps(msgspec.to_builtins(recent.latest(10)), allow_nan=False))
    return row, list(sentences(msgspec.convert(row, EndedRequest)))


def test_a_decision_is_told_with_its_policy_its_reason_and_what_was_predicted_and_seen():
    row, lines = told(ended(an_assignment(), 0.5, 0.06, 0.06))
    chosen = row["decision"]
    assert (chosen["prompt_worker"], chosen["decode_worker"], chosen["policy"]) == ("w0", "w1", "1 of 2")
    assert (row["ttft_s"], row["tpot_s"]) == (0.5, pytest.approx(0.06))
    assert lines == [
        "cmpl-1: 512 tokens in, 3 out (60 expected), finished 3.0 s ago",
        "  w0 -> w1: policy '1 of 2', one worker for prompts, another for decode; placed 250 ms after arrival",
        "  TTFT 400 ms predicted, 500 ms seen, limit 2.00 s; TPOT 50 ms predicted, 60 ms seen, limit 100 ms",
    ]


LIMITS, NONE = (0.2, 0.02), math.inf


@pytest.mark.parametrize(
    ("gaps_s", "outcome", "limits", "met"),
    [
        ((0.1, 0.01), "finished", LIMITS, {"ttft": True, "tpot": True, "all": True}),
        ((0.3, 0.01), "finished", LIMITS, {"ttft": False, "tpot": True, "all": False}),
        ((0.1, 0.03), "finished", LIMITS, {"ttft": True, "tpot": False, "all": False}),
        ((0.1, 0.03), "finished", (0.2, NONE), {"ttft": True, "all": True}),
        ((0.1, 0.03), "finished", (NONE, 0.02), {"tpot": False, "all": False}),
        ((0.1, 0.03), "finished", (NONE, NONE), {}),
        ((0.1,), "finished", LIMITS, {"ttft": True, "all": True}),
        ((0.1,), "finished", (NONE, 0.02), {"all": True}),
        ((0.1, 0.01), "failed", LIMITS, {"ttft": False, "tpot": False, "all": False}),
        ((), "failed", (NONE, 0.02), {"tpot": False, "all": False}),
        ((), "failed", (NONE, NONE), {}),
        ((0.1, 0.03), "cancelled", LIMITS, {"ttft": True, "tpot": False, "all": False}),
        ((0.3,), "cancelled", LIMITS, {"ttft": False, "all": False}),
        ((), "cancelled", LIMITS, {}),
    ],
)
def test_slos_are_judged_by_what_the_client_saw_and_a_failed_sequence_has_missed_each(gaps_s, outcome, limits, met):
    assert EndedRequests().add(ended(None, *gaps_s, limits=limits), outcome).slos_met() == met


def test_without_slos_none_is_told():
    row, lines = told(ended(an_assignment(), 0.5, 0.06, limits=(math.inf, math.inf)))
    assert (row["ttft_limit_s"], row["tpot_limit_s"]) == (None, None)
    assert lines[2].endswith("TPOT 50 ms predicted, 60 ms seen, no limit")


def test_what_happened_before_the_choice_and_what_it_relied_on_is_told():
    row, lines = told(ended(an_assignment("w0", "w0", "short_prompt", held_s=0.2, cached_tokens=96), 0.5))
    assert row["decision"]["held_s"] == 0.2
    assert lines[1].endswith(
        "; placed 250 ms after arrival; waited 200 ms for a worker that had enough prompts already; 96 tokens of the "
        "prompt expected in the worker's cache"
    )


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_request_that_was_placed_again_is_told_as_its_client_saw_it_without_predictions_for_its_rest(tokens):
    timeline = ended(an_assignment(), *[0.5] * tokens)
    timeline.interrupted("prefilling")
    timeline.interrupted("prefilling")
    row, lines = told(timeline, "cancelled")
    assert row["placements"] == 3
    assert lines[0] == f"cmpl-1: 512 tokens in, {tokens} out (60 expected), cancelled 3.0 s ago"
    assert lines[1].endswith("; placement 3, after it was taken from a worker that was lost or drained")
    seen = "500 ms seen" if tokens else "not seen"
    assert lines[2] == f"  TTFT {seen}, limit 2.00 s; TPOT not seen, limit 100 ms"


@pytest.mark.parametrize(("seconds", "written"), [(0.05, "0.1 s"), (59, "59.0 s"), (90, "2 min"), (90_000, "25 h")])
def test_how_long_ago_it_was_is_told_in_a_unit_that_fits(seconds, written):
    assert told(ended(an_assignment(), 0.1), after_s=seconds)[1][0].endswith(f"finished {written} ago")


def test_the_latest_are_kept_and_only_those_with_a_prediction_are_decisions():
    recent = EndedRequests(FakeClock())
    for number in range(KEPT + 10):
        recent.add(ended(an_assignment() if number % 2 else None, request_id=f"r{number}"), "finished")
    assert recent.answer(1).kept == KEPT
    latest = [one.request_id for one in recent.latest(2 * KEPT)]
    assert latest == [f"r{number}" for number in reversed(range(10, KEPT + 10))]
    assert [one.request_id for one in recent.latest(3)] == latest[:3]
    assert [one.request_id for one in recent.decisions(2 * KEPT)] == latest[::2]
    assert [one.request_id for one in recent.decisions(3)] == latest[:6:2]
    assert told(ended(None, 0.5))[1] == []


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("cmpl-a", {"cmpl-a-0", "cmpl-a-1[0]", "cmpl-a-1[1]"}),
        ("cmpl-a-1", {"cmpl-a-1[0]", "cmpl-a-1[1]"}),
        ("cmpl-a-1[1]", {"cmpl-a-1[1]"}),
        ("cmpl-b", {"cmpl-b.c"}),
        ("cmpl-b.c", {"cmpl-b.c"}),
        ("r-1", {"cmpl-a-0", "cmpl-a-1[0]", "cmpl-a-1[1]", "cmpl-b.c"}),
        ("cmpl", set()),
        ("cmpl-b?c", set()),
    ],
)
def test_a_request_is_found_by_each_of_its_ids_with_all_of_its_sequences(wanted, found):
    recent = EndedRequests(FakeClock())
    for request_id in ("cmpl-a-0", "cmpl-a-1[0]", "cmpl-a-1[1]"):
        recent.add(ended(request_id=request_id, http_request_id="a"), "finished")
    recent.add(ended(request_id="cmpl-b.c", http_request_id="cmpl-b"), "finished")
    assert {one.request_id for one in recent.find(wanted)} == found


def test_a_record_has_the_hand_off_and_where_each_stage_was():
    clock = FakeClock(1000.0)
    recent = EndedRequests(FakeClock(), wall_clock=clock)
    recent.add(handed_over(http_request_id="h"), "finished")
    [one] = recent.latest(1)
    assert one.handoff == Handoff("worker-0", "worker-1", "shm", "ok", "", 4096, 0.125, 0.25, False, None)
    assert (one.latency_s, one.ttft_s, one.tpot_s) == (3.375, 1.25, 1.0625)
    assert one.arrived_unix_s == 1000.0 - 3.375
    places = [(stage.name, stage.pool, stage.worker) for stage in one.stages]
    assert places[:3] == [("preprocess", None, ""), ("queue", None, ""), ("dispatch", "prefill", "worker-0")]
    assert places[-1] == ("decode", "decode", "worker-1")
    [cut] = (recent.add(ended(None, 0.5), "failed"), recent.latest(1))[1]
    assert (cut.handoff, cut.decision) == (None, None)
