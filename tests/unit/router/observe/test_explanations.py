"""What operators are told of a decision of mode adaptive, and of what came of it."""

import json
import math

import msgspec
import pytest

from ridgeline.cluster.commands.decisions import sentences
from ridgeline.router.observe.explanations import KEPT, MOST_ID_CHARACTERS, Explanation, Explanations
from ridgeline.router.observe.timeline import RequestTimeline
from ridgeline.router.scheduler.features import Assignment, RequestFeatures
from tests.support.clock import FakeClock


def an_assignment(prompt_worker="w0", decode_worker="w1", reason="in_shape", **values):
    request = RequestFeatures(700, 60, waited_s=0.25)
    predicted = {"ttft_s": 0.4, "tpot_s": 0.05}
    return Assignment(prompt_worker, decode_worker, reason, policy="1 of 2", request=request, **predicted, **values)


def ended(assignment, *gaps_s, request_id="cmpl-1", limits=(2.0, 0.1)):
    """A sequence that has had a token after each of these gaps."""
    clock = FakeClock()
    timeline = RequestTimeline(
        clock, "r", 512, "disaggregated", client_request_id=request_id, ttft_limit_s=limits[0], tpot_limit_s=limits[1]
    )
    timeline.assignment = assignment
    for gap_s in gaps_s:
        clock.now_s += gap_s
        timeline.tokens(1, "adaptive")
    return timeline


def told(timeline, outcome="finished", after_s=3.0):
    """What went over HTTP, and what is printed."""
    clock = FakeClock()
    explanations = Explanations(clock)
    explanations.add(timeline, outcome)
    clock.now_s += after_s
    (row,) = json.loads(json.dumps(msgspec.to_builtins(explanations.latest(10)), allow_nan=False))
    return row, list(sentences(msgspec.convert(row, Explanation)))


def test_a_decision_is_told_with_its_policy_its_reason_and_what_was_predicted_and_seen():
    row, lines = told(ended(an_assignment(), 0.5, 0.06, 0.06))
    assert (row["prompt_worker"], row["decode_worker"], row["policy"]) == ("w0", "w1", "1 of 2")
    assert (row["ttft_s"], row["tpot_s"]) == (0.5, pytest.approx(0.06))
    assert lines == [
        "cmpl-1: 512 tokens in, 3 out (60 expected), finished 3.0 s ago",
        "  w0 -> w1: policy '1 of 2', one worker for prompts, another for decode; placed 250 ms after arrival",
        "  TTFT 400 ms predicted, 500 ms seen, limit 2.00 s; TPOT 50 ms predicted, 60 ms seen, limit 100 ms",
    ]


def test_without_slos_none_is_told():
    row, lines = told(ended(an_assignment(), 0.5, 0.06, limits=(math.inf, math.inf)))
    assert (row["ttft_limit_s"], row["tpot_limit_s"]) == (None, None)
    assert lines[2].endswith("TPOT 50 ms predicted, 60 ms seen, no limit")


def test_what_happened_before_the_choice_and_what_it_relied_on_is_told():
    row, lines = told(ended(an_assignment("w0", "w0", "short_prompt", held_s=0.2, cached_tokens=96), 0.5))
    assert row["held_s"] == 0.2
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


def test_a_request_id_of_a_client_is_cut_in_its_middle():
    row, _ = told(ended(an_assignment(), 0.1, request_id="first" + "x" * 10_000 + "last"))
    assert len(row["request_id"]) == MOST_ID_CHARACTERS
    assert (row["request_id"][:5], row["request_id"][-4:]) == ("first", "last")


@pytest.mark.parametrize(("seconds", "written"), [(0.05, "0.1 s"), (59, "59.0 s"), (90, "2 min"), (90_000, "25 h")])
def test_how_long_ago_it_was_is_told_in_a_unit_that_fits(seconds, written):
    assert told(ended(an_assignment(), 0.1), after_s=seconds)[1][0].endswith(f"finished {written} ago")


def test_the_latest_decisions_are_kept_and_those_without_a_prediction_are_not():
    explanations = Explanations(FakeClock())
    for number in range(KEPT + 10):
        explanations.add(ended(an_assignment(), request_id=f"r{number}"), "finished")
        explanations.add(ended(None), "finished")
    latest = [one.request_id for one in explanations.latest(1000)]
    assert latest == [f"r{number}" for number in reversed(range(10, KEPT + 10))]
    assert len(explanations.latest(3)) == 3
