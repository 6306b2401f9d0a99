"""The arithmetic of the accuracy measurement; the measurement itself needs two running servers."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "tools" / "bench" / "wire_accuracy.py"
spec = importlib.util.spec_from_file_location("wire_accuracy", BENCH)
wire_accuracy = importlib.util.module_from_spec(spec)
sys.modules["wire_accuracy"] = wire_accuracy  # dataclasses look their module up
spec.loader.exec_module(wire_accuracy)
Answer, compare, summarise = wire_accuracy.Answer, wire_accuracy.compare, wire_accuracy.summarise

REFERENCE = Answer((7, 8, 9, 10), (-0.1, -0.2, -0.3, -0.4))


def test_equal_answers_differ_by_their_logprobs_from_the_second_token_on():
    seen = compare(REFERENCE, Answer((7, 8, 9, 10), (-9.0, -0.25, -0.3, -0.2)))
    assert (seen.first_agrees, seen.second_agrees, seen.whole_agrees, seen.first_difference) == (True, True, True, None)
    assert seen.errors_nat == pytest.approx((0.05, 0.0, 0.2))


def test_logprobs_count_only_before_the_first_difference():
    seen = compare(REFERENCE, Answer((7, 8, 0, 10), (-0.1, -0.3, -5.0, -0.4)))
    assert (seen.first_agrees, seen.second_agrees, seen.whole_agrees, seen.first_difference) == (True, True, False, 2)
    assert seen.errors_nat == pytest.approx((0.1,))


def test_a_second_token_that_differs_leaves_nothing_to_compare():
    seen = compare(REFERENCE, Answer((7, 0, 9, 10), (-0.1, -0.3, -5.0, -0.4)))
    assert (seen.first_agrees, seen.second_agrees, seen.whole_agrees) == (True, False, False)
    assert seen.errors_nat == ()


def test_a_first_token_that_differs_is_not_the_wires_doing_and_counts_for_nothing_else():
    other = compare(REFERENCE, Answer((0, 8, 9, 10), (-0.1, -0.3, -5.0, -0.4)))
    assert (other.first_agrees, other.second_agrees, other.whole_agrees, other.errors_nat) == (False, False, False, ())
    report = summarise([other, compare(REFERENCE, REFERENCE)])
    assert (report.prompts, report.first_tokens_agree) == (2, 1)
    assert (report.second_token_agreement, report.whole_answer_agreement) == (1.0, 1.0)


@pytest.mark.parametrize(("ours", "theirs"), [((1, 2), (1, 2, 3)), ((1,), (1,)), ((), ())])
def test_answers_of_other_lengths_are_refused(ours, theirs):
    with pytest.raises(ValueError, match="cannot be compared"):
        compare(Answer(ours, (0.0,) * len(ours)), Answer(theirs, (0.0,) * len(theirs)))


def test_the_report_joins_all_prompts():
    others = [
        Answer((7, 8, 9, 10), (-0.1, -0.3, -0.3, -0.4)),
        Answer((7, 8, 0, 10), (-0.1, -0.5, -5.0, -0.4)),
        Answer((7, 0, 9, 10), (-0.1, -0.3, -5.0, -0.4)),
        Answer((7, 8, 9, 10), (-0.1, -0.2, -0.3, -0.4)),
    ]
    report = summarise([compare(REFERENCE, other) for other in others])
    assert (report.second_tokens_agree, report.answers_agree) == (3, 2)
    assert (report.second_token_agreement, report.whole_answer_agreement) == (0.75, 0.5)
    assert report.compared_positions == 3 + 1 + 0 + 3
    assert report.mean_logprob_error_nat == pytest.approx(0.4 / 7)
    assert report.max_logprob_error_nat == pytest.approx(0.3)


def test_nothing_to_tell_is_said_as_such():
    report = summarise([])
    assert (report.second_token_agreement, report.mean_logprob_error_nat, report.max_logprob_error_nat) == (None,) * 3


def test_prompts_are_the_same_for_a_seed_and_no_two_begin_alike():
    text = wire_accuracy.TEXT_FILE.read_text(encoding="utf-8")
    prompts = wire_accuracy.make_prompts(text, 100, seed=1)
    assert prompts == wire_accuracy.make_prompts(text, 100, seed=1)
    assert len(prompts) == 100
    assert len({" ".join(prompt.split()[:12]) for prompt in prompts}) == 100
    lengths = [len(prompt.split()) for prompt in prompts]
    assert min(lengths) >= wire_accuracy.SHORTEST_WORDS
    assert max(lengths) <= wire_accuracy.LONGEST_WORDS
    assert prompts != wire_accuracy.make_prompts(text, 100, seed=2)
    with pytest.raises(ValueError, match="no 100 different beginnings"):
        wire_accuracy.make_prompts("one two three", 100, seed=1)


def test_an_answer_is_read_from_a_completion():
    choice = json.loads('{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, -1.0], "tokens": ["a", "b"]}}')
    assert wire_accuracy.answer_of(choice) == Answer((5, 6), (-0.5, -1.0))
