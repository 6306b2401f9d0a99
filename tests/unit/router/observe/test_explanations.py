"""What operators are told of a decision of mode adaptive, and of what came of it."""

import json
import math

import pytest

from cluster.commands.operators.decisions import sentences
from router.fleet.adaptive import Decision, Option, Wanted
from router.observe.explanations import KEPT, MOST_ID_CHARACTERS, Explanations
from router.observe.timeline import RequestTimeline
from tests.support.clock import FakeClock


def option(prompt_worker, decode_worker, ttft_s=0.4, tpot_s=0.05, **values):
    return Option(prompt_worker, decode_worker, ttft_s, tpot_s, 0.0, 1.0, 3.0, **values)


def a_decision(reason="within_limits", *, limits=(2.0, 0.1), lost=(0.05, 0.5, 0.02), held_s=0.0, chosen=None):
    return Decision(
        chosen or option("w0", "w1"),
        reason,
        (option("w0", "w0"), option("w2", "w2", ttft_s=0.3)),
        Wanted(512, 60, *limits, waited_s=0.25),
        lost,
        held_s,
    )


def ended(decision, *gaps_s, request_id="cmpl-1"):
    """A sequence that has had a token after each of these gaps."""
    clock = FakeClock()
    timeline = RequestTimeline(clock, request_id, 512, path="disaggregated")
    timeline.decision = decision
    for gap_s in gaps_s:
        clock.now_s += gap_s
        timeline.tokens(1, "adaptive")
    return timeline


def told(timeline, outcome="finished", after_s=3.0):
    clock = FakeClock()
    explanations = Explanations(clock)
    explanations.add(timeline, outcome)
    clock.now_s += after_s
    (row,) = explanations.rows(10)
    return json.loads(json.dumps(row, allow_nan=False)), list(sentences(row))


def test_a_decision_is_told_with_its_reason_its_alternatives_and_what_was_predicted_and_seen():
    row, lines = told(ended(a_decision(), 0.5, 0.06, 0.06))
    assert [(one["prompt_worker"], one["decode_worker"], one["lost"]) for one in row["options"]] == [
        ("w0", "w1", 0.05),
        ("w0", "w0", 0.5),
        ("w2", "w2", 0.02),
    ]
    assert (row["seen"]["ttft_s"], row["seen"]["tpot_s"]) == pytest.approx((0.5, 0.06))
    assert lines == [
        "cmpl-1: 512 tokens in, 3 out (60 expected), finished 3.00 s ago",
        "  w0 -> w1: its limits and those of others can be kept; chosen 250 ms after it came",
        "  TTFT 400 ms predicted, 500 ms seen, limit 2.00 s; TPOT 50 ms predicted, 60 ms seen, limit 100 ms",
        "  or w0 alone: loses 0.45 requests more; TTFT 400 ms; TPOT 50 ms",
        "  or w2 alone: loses 0.03 requests fewer, but takes longer; TTFT 300 ms; TPOT 50 ms",
    ]


def test_without_limits_options_are_told_by_their_latency():
    row, lines = told(ended(a_decision("least_latency", limits=(math.inf, math.inf), lost=()), 0.5, 0.06))
    assert (row["ttft_limit_s"], row["tpot_limit_s"], row["options"][1]["lost"]) == (None, None, None)
    assert "this is the least latency" in lines[1]
    assert lines[2].endswith("TPOT 50 ms predicted, 60 ms seen, no limit")
    assert lines[3] == (
        "  or w0 alone: 3.00 s of latency, its own and what it adds to others', instead of 3.00 s; TTFT 400 ms; "
        "TPOT 50 ms"
    )


def test_what_happened_before_and_after_the_choice_is_told():
    timeline = ended(a_decision(held_s=0.2, chosen=option("w0", "w0", cached_tokens=96, against=1)), 0.5)
    timeline.interrupted("decoding")
    timeline.tokens(1, "adaptive")
    row, lines = told(timeline, "cancelled")
    assert (row["held_s"], row["seen"]["lost_workers"]) == (0.2, 1)
    assert lines[0].endswith("cancelled 3.00 s ago")
    assert lines[1].endswith(
        "; chosen 250 ms after it came; held for 200 ms until this worker had room; 96 tokens were in the worker's "
        "cache; against what the workers favour; 1 worker lost, and this is the choice after that"
    )


def test_a_sequence_that_ended_without_a_token_is_told_too():
    row, lines = told(ended(a_decision()), "failed")
    assert (row["seen"]["ttft_s"], row["seen"]["tpot_s"]) == (None, None)
    assert "400 ms predicted, not seen, limit" in lines[2]


def test_a_request_id_of_a_client_is_cut_and_cannot_move_the_cursor():
    row, lines = told(ended(a_decision(), 0.1, request_id="\x1b[2J\x9b1m\n" + "x" * 10_000))
    assert len(row["request_id"]) == MOST_ID_CHARACTERS
    assert lines[0].startswith("?[2J?1m?xxx")


def test_the_latest_decisions_are_kept_and_those_without_a_prediction_are_not():
    explanations = Explanations(FakeClock())
    for number in range(KEPT + 10):
        explanations.add(ended(a_decision(), request_id=f"r{number}"), "finished")
        explanations.add(ended(None), "finished")
    rows = explanations.rows(1000)
    assert [row["request_id"] for row in rows] == [f"r{number}" for number in reversed(range(10, KEPT + 10))]
    assert len(explanations.rows(3)) == 3
